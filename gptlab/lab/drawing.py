"""The drawing process: turns run directories into SVG and HTML text outside the kernel, at low priority.

Drawing in a kernel's thread would break the user's own figures (matplotlib's text parser is global) and take the
kernel's time. So a process of its own reads the runs and draws; the kernel puts finished text into widgets. It ends
when its standard input does, so no way in which a kernel can die leaves it behind.

    $ echo '{"runs_dir": "runs"}' | python -m gptlab.lab.drawing

Requests and answers are JSON, one object a line. A request: `runs_dir`, `sweep` (a name, or null for every run of the
folder), `x`, `running`, and `save` (a path without ending: writes .png and .csv there). An answer: `{}` where nothing
changed or the last picture is too fresh, else `svg`, `table`, `progress`, `active`, `cost_s`, and `saved`.
Left out on purpose: what the picture looks like (`figures.py`, `tables.py`).
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptlab.grid import SHAPE
from gptlab.lab import figures, tables
from gptlab.runs import ACTIVE, Run, list_runs
from gptlab.sweeps import Sweep

SHARE = 0.1
"""Part of one core that drawing may take: the rest between two pictures grows with what one costs."""
SHORTEST_S = 0.5
"""Seconds between two pictures, at least."""
MOST_ROWS = 60
"""Newest runs of a folder that are listed."""


class Artist:
    """The kernel's side: starts the process, hands it requests, takes answers without ever waiting for one.

    Used by one thread. A process that died or hangs is replaced at the next request.
    """

    def __init__(self, patience_s: float = 30.0) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._patience_s = patience_s
        self._asked_at: float | None = None
        self._buffer = bytearray()

    @property
    def busy(self) -> bool:
        """Whether an answer is still to come."""
        return self._asked_at is not None

    @property
    def pid(self) -> int | None:
        """The process's id, once there is one."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Starts the process, so that matplotlib is loaded before the first request."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        # A session of its own: a notebook's interrupt goes to the kernel's whole group.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gptlab.lab.drawing"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def ask(self, request: dict[str, Any]) -> None:
        """Sends a request; `answer` brings what comes of it."""
        assert not self.busy
        self.start()
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self.close()
            return
        self._asked_at = time.monotonic()

    def answer(self, timeout: float = 0.0) -> dict[str, Any] | None:
        """The answer, or None if it is not complete within `timeout` seconds."""
        if self._asked_at is None or self._process is None or self._process.stdout is None:
            return None
        deadline = time.monotonic() + timeout
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                if time.monotonic() - self._asked_at > self._patience_s:
                    self.close()
                return None
            part = os.read(descriptor, 1 << 20)
            if not part:
                self.close()
                return None
            self._buffer += part
        line, _, rest = self._buffer.partition(b"\n")
        self._buffer, self._asked_at = bytearray(rest), None
        return dict(json.loads(line))

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # a request that a dead process never read
                        pipe.close()
        self._process, self._asked_at, self._buffer = None, None, bytearray()


class Painter:
    """The process's side: remembers what it read and drew, so that a look at unchanged runs costs next to nothing."""

    def __init__(self) -> None:
        self._sweep: Sweep | None = None
        self._manifest: tuple[int, int] | None = None
        self._runs: dict[Path, Run] = {}
        self._series: dict[Path, tuple[Any, figures.Series]] = {}
        self._seen: Any = None
        self._shown: set[str] = set()
        self._not_before = 0.0

    def look(self, request: dict[str, Any]) -> dict[str, Any]:
        """One answer to one request."""
        began = time.process_time()
        runs_dir, x = Path(request["runs_dir"]), request.get("x", "step")
        sweep, runs = self._find(runs_dir, request.get("sweep"))
        started = {run.name: run for run in runs if (run.path / "run.json").is_file()}
        marks = {name: (_mark(run.path), run.state) for name, run in started.items()}
        asked = {key: value for key, value in request.items() if key != "save"}
        seen = (asked, self._manifest, marks)
        points = {name for name, run in started.items() if _size(run.path / "metrics.jsonl")}
        answer: dict[str, Any] = {}
        # A first point, a question that changed, or the end is worth a picture at once; more of the same can wait.
        urgent = self._seen is None or self._seen[0] != asked or not points <= self._shown
        urgent = urgent or [mark[1] for mark in marks.values()] != [mark[1] for mark in self._seen[2].values()]
        if "save" not in request and (seen == self._seen or (time.monotonic() < self._not_before and not urgent)):
            return answer
        rows, series = self._gather(sweep, runs)
        if "save" in request:
            answer["saved"] = save(Path(request["save"]), series, rows, x)
        answer["svg"] = figures.svg(figures.draw(series, x=x, legend=False), figures.describe(series))
        colours = {one.name: index for index, one in enumerate(series)}
        answer["table"] = tables.table(rows, colours, names=sweep is None)
        answer["progress"] = tables.progress(rows, bool(request.get("running")))
        answer["active"] = sum(row["state"] in ACTIVE for row in rows)
        self._seen, self._shown = seen, points
        answer["cost_s"] = time.process_time() - began
        self._not_before = time.monotonic() + max(SHORTEST_S, answer["cost_s"] / SHARE)
        return answer

    def _find(self, runs_dir: Path, name: str | None) -> tuple[Sweep | None, list[Run]]:
        """The sweep, if one is asked for and there, and the runs to look at, which keep what they read before."""
        self._manifest = _mark_of(runs_dir / f"{name}.sweep.json") if name is not None else None
        if name is None or self._manifest is None:
            self._sweep = None
            return None, [self._runs.setdefault(run.path, run) for run in list_runs(runs_dir)[-MOST_ROWS:]]
        old = self._sweep
        if (
            old is None
            or (old.name, old.runs_dir) != (name, runs_dir)
            or self._seen is None
            or self._seen[1] != self._manifest
        ):
            self._sweep = old = Sweep.open(name, runs_dir)
        return old, [self._runs.setdefault(run.path, run) for run in old.runs]

    def gather(self, runs_dir: Path, sweep: str | None) -> tuple[list[dict[str, Any]], list[figures.Series]]:
        """The table's rows, and the curves of those that are drawn, of a sweep or (None) of a folder."""
        return self._gather(*self._find(runs_dir, sweep))

    def _gather(self, sweep: Sweep | None, runs: Sequence[Run]) -> tuple[list[dict[str, Any]], list[figures.Series]]:
        rows = sweep.rows() if sweep is not None else tables.run_rows(runs)
        started = {run.name: run for run in runs}
        drawn = [row for row in rows if row["state"] != "invalid"]
        if len(drawn) > figures.MOST_CURVES:  # the last of those that have points, in the table's order
            drawn = [row for row in drawn if row.get("step")][-figures.MOST_CURVES :] or drawn[: figures.MOST_CURVES]
        series = []
        for row in drawn:
            shape = figures.TIMES.join(str(row[field]) for field in SHAPE)
            name = str(row["name"])
            label = shape if sweep is not None else name
            series.append(self._read(started[name], label) if name in started else figures.empty(name, label))
        return rows, series

    def _read(self, run: Run, label: str) -> figures.Series:
        mark = (_mark_of(run.path / "metrics.jsonl"), label)
        if run.path not in self._series or self._series[run.path][0] != mark:
            self._series[run.path] = (mark, figures.read(run, label))
        return self._series[run.path][1]


def save(stem: Path, series: Sequence[figures.Series], rows: Sequence[dict[str, Any]], x: figures.XAxis) -> list[str]:
    """Writes the picture and the table beside each other, each whole or not at all; gives both paths."""
    picture, table = stem.with_name(stem.name + ".png"), stem.with_name(stem.name + ".csv")
    beside = stem.with_name(f".{stem.name}.{os.getpid()}")
    figures.save_png(figures.draw(series, x=x), str(beside))
    os.replace(beside, picture)
    if rows:
        with open(beside, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        os.replace(beside, table)
    return [str(picture), str(table)]


def _mark_of(path: Path) -> tuple[int, int] | None:
    """What changes when a file does: time and size. None if it is not there."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def _mark(path: Path) -> tuple[Any, ...]:
    return tuple(_mark_of(path / name) for name in ("metrics.jsonl", "result.json", "run.json"))


def _size(path: Path) -> int:
    mark = _mark_of(path)
    return mark[1] if mark else 0


def main() -> None:
    """Answers requests until standard input ends."""
    os.nice(5)  # training and the user's cells come first
    painter = Painter()
    # A picture of nothing loads fonts and backends before anyone waits for them.
    figures.svg(figures.draw([]), "")
    for line in sys.stdin:
        try:
            answer = painter.look(json.loads(line))
        except Exception as error:  # a directory that vanished or was written by hand: said, not fatal
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
