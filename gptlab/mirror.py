"""Metrics of a run elsewhere: as TensorBoard's events while it trains or afterwards, and as one CSV file.

    $ gptlab train --preset tiny --tensorboard --name first && tensorboard --logdir runs
    >>> from gptlab.mirror import to_csv
    >>> to_csv(gptlab.Run("runs/first"))

The run directory is read, as everything reads it; the trainer knows nothing of TensorBoard, and torch is not imported.
`tensorboard` is an extra: pip install 'gptlab[tensorboard]'. Left out on purpose: figures (`lab/`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptlab.config import ConfigError
from gptlab.csvfile import write_csv
from gptlab.runs import Run

EVERY_S = 1.0
"""Seconds between two looks at a run that trains."""
_NOT_SHOWN = ("step", "attempt")


def check_installed() -> None:
    """Raises ConfigError where TensorBoard is not."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("--tensorboard needs a package that is not installed: pip install 'gptlab[tensorboard]'.")


class Mirror:
    """Writes what a run's metrics gained since the last look as TensorBoard's events, into the run's `tensorboard/`."""

    def __init__(self, run: Run) -> None:
        check_installed()
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.run, self.folder = run, run.path / "tensorboard"
        for old in self.folder.glob("events.out.tfevents.*"):  # of an earlier mirror: all of it comes again
            old.unlink()
        self._writer = EventFileWriter(str(self.folder))
        self._written: dict[int, dict[str, Any]] = {}

    def update(self) -> None:
        """Writes the rows that are new or have grown. Where an attempt took steps again, the old ones are purged."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        began = float(self.run.info.get("created", 0.0))
        for row in self.run.metrics():
            step = row["step"]
            old = self._written.get(step, {})
            if (
                old
                and old.get("attempt") != row.get("attempt")
                and "loss" in row
                and row.get("loss") != old.get("loss")
            ):
                purge = Event(wall_time=began, step=step, session_log=SessionLog(status=SessionLog.START))
                self._writer.add_event(purge)
                self._written = {known: values for known, values in self._written.items() if known < step}
                old = {}
            values = [
                Summary.Value(tag=name, simple_value=float(value))
                for name, value in row.items()
                if name not in _NOT_SHOWN and old.get(name) != value and isinstance(value, int | float)
            ]
            if values:
                at = began + float(row.get("time_s", 0.0))
                self._writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=values)))
            self._written[step] = dict(row)
        self._writer.flush()

    def close(self) -> None:
        """Writes what is left."""
        self.update()
        self._writer.close()


@contextlib.contextmanager
def mirrored(run: Run) -> Iterator[None]:
    """Meanwhile the run's metrics are mirrored, once a second, from a thread."""
    mirror, over = Mirror(run), threading.Event()

    def work() -> None:
        while not over.wait(EVERY_S):
            mirror.update()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        mirror.close()


def to_csv(run: Run, path: Path | None = None) -> Path:
    """Writes a run's metrics as CSV, a row a step: `metrics.csv` in the run unless told otherwise."""
    rows = run.metrics()
    target = path or run.path / "metrics.csv"
    columns = list(dict.fromkeys(name for row in rows for name in row)) or ["step"]
    try:
        write_csv(target, columns, rows)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error.strerror}): mend that.") from None
    return target
