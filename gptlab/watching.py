"""Live tables in the terminal: bars, speed and time left of a run, a sweep, or every run of a folder.

    $ gptlab runs watch

Everything is read from run directories, so runs of a notebook or of another terminal are watched as well. Where no
terminal is, a line is printed whenever something has changed that a log should say. Left out on purpose: starting runs
(`launcher/`, `sweeps.py`), the lines of a single run (`following.py`), widgets (`lab/`).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gptlab.config import ConfigError
from gptlab.runs import ACTIVE, Run, list_runs
from gptlab.wording import cell, duration

if TYPE_CHECKING:
    from rich.table import Table

    from gptlab.sweeps import Sweep

POLL_S = 0.5
"""Seconds between two pictures of a table."""
TELL_S = 30.0
"""Seconds between two lines about a run that goes on, where no terminal is."""
_SHOWN = ("loss", "val_loss", "tokens_per_s", "mfu")
_TITLES = {"val_loss": "val loss", "tokens_per_s": "tok/s", "mfu": "MFU"}
_STYLES = {
    "running": "green",
    "finished": "dim",
    "failed": "red",
    "diverged": "red",
    "lost": "red",
    "stopped": "yellow",
}


def left_s(row: Mapping[str, Any], tokens_a_step: int) -> float | None:
    """About how many seconds a run still trains at its own speed; None where that is not known."""
    speed = row.get("tokens_per_s")
    if row["state"] not in ACTIVE or not speed or not row.get("max_iters"):
        return None
    return float((row["max_iters"] - (row.get("step") or 0)) * tokens_a_step / speed)


def live_table(rows: Sequence[Mapping[str, Any]], left: Mapping[str, float | None], *, names: bool = True) -> Table:
    """Rows with a bar, their last values, and the time that is left.

    Args:
        rows: as `Run.summary` or `Sweep.rows` gives them.
        left: seconds by run name.
        names: whether a column says names; a sweep's rows are told by their shapes.
    """
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    drawn.add_column("run" if names else "shape", no_wrap=True)
    drawn.add_column("state", no_wrap=True)
    drawn.add_column("", width=16)
    drawn.add_column("step", justify="right", no_wrap=True)
    for name in _SHOWN:
        drawn.add_column(_TITLES.get(name, name), justify="right", no_wrap=True)
    drawn.add_column("left", justify="right", no_wrap=True)
    for row in rows:
        shape = "x".join(str(row.get(field, "?")) for field in ("n_layer", "n_head", "n_embd"))
        step, whole = row.get("step") or 0, row.get("max_iters") or 0
        state = str(row["state"])
        time_left = left.get(str(row["name"]))
        drawn.add_row(
            str(row["name"]) if names else shape,
            Text(state, style=_STYLES.get(state, "")),
            ProgressBar(total=whole or 1, completed=step, width=16) if state != "invalid" else "",
            f"{step}/{whole}" if whole else "",
            *(cell(name, row.get(name)) for name in _SHOWN),
            duration(time_left) if time_left is not None else "",
        )
    return drawn


@contextlib.contextmanager
def screen() -> Iterator[Callable[[Any], None]]:
    """A function that replaces what stands at the end of the terminal; lines printed meanwhile stand above it."""
    from rich.live import Live

    with Live(refresh_per_second=4) as live:
        yield lambda drawn: live.update(drawn, refresh=True)


def run_table(run: Run) -> Table | None:
    """A single run's row, or nothing while it cannot be read yet."""
    row = run.row()
    return live_table([row], {run.name: _left(run, row)}) if "max_iters" in row else None


def watch_sweep(begun: Sweep, *, live: bool, silent: bool = False) -> None:
    """Until its queue is empty: a table that is drawn anew, or a line whenever a run has changed its state."""
    if live:
        with screen() as show:
            ended = False
            while not ended:
                ended = begun.wait(POLL_S)
                show(_sweep_table(begun))
        return
    told: dict[str, str] = {}
    ended = False
    while not ended:
        ended = begun.wait(POLL_S)
        for row in begun.rows():
            if told.get(row["name"]) != row["state"] and not silent and row["state"] != "waiting":
                told[row["name"]] = row["state"]
                print(_line(row), flush=True)


def _sweep_table(begun: Sweep) -> Any:
    """The rows of a sweep, and under them how far all of it is."""
    from rich.console import Group
    from rich.text import Text

    from gptlab.lab.tables import is_ended, work

    rows = begun.rows()
    runs = {run.name: run for run in begun.runs}
    left = {row["name"]: _left(runs[row["name"]], row) for row in rows if row["name"] in runs}
    share, seconds = work(rows)
    valid = [row for row in rows if row["state"] != "invalid"]
    over = sum(map(is_ended, valid))
    said = f"{over} of {len(valid)} runs ended, {share:.0%} of the work"
    if seconds and begun.is_active:
        said += f", about {duration(seconds)} left"
    return Group(live_table(rows, left, names=len({row["name"] for row in rows}) != len(_shapes(rows))), Text(said))


def _shapes(rows: Sequence[Mapping[str, Any]]) -> set[tuple[Any, ...]]:
    return {(row.get("n_layer"), row.get("n_head"), row.get("n_embd")) for row in rows}


def watch_runs(runs_dir: str | None, names: Sequence[str]) -> None:
    """Watches runs of a folder until none of them trains any more, or Ctrl-C.

    Args:
        names: which; all that train, and those that begin meanwhile, where none is named.

    Raises:
        ConfigError: there is no such run, or none that trains.
    """
    named = [Run.open(name, runs_dir) for name in names]
    seen: dict[str, Run] = {run.name: run for run in named}

    def look() -> list[tuple[Run, dict[str, Any]]]:
        for run in [] if named else list_runs(runs_dir):
            if run.name not in seen and run.is_active:
                seen[run.name] = run
        return [(run, run.row()) for run in seen.values()]

    rows = look()
    if not rows:
        raise ConfigError("No run trains now: `gptlab runs` lists those that there are.")
    with contextlib.ExitStack() as stack:
        show = stack.enter_context(screen()) if sys.stdout.isatty() else None
        told: dict[str, tuple[str, float]] = {}
        while True:
            if show is not None:
                show(live_table([row for _, row in rows], {run.name: _left(run, row) for run, row in rows}))
            for run, row in rows if show is None else ():
                state, at = told.get(run.name, ("", 0.0))
                if state != row["state"] or (row["state"] in ACTIVE and time.monotonic() - at > TELL_S):
                    told[run.name] = (row["state"], time.monotonic())
                    print(_line(row), flush=True)
            if not any(row["state"] in ACTIVE for _, row in rows):
                return
            time.sleep(POLL_S)
            rows = look()


def _left(run: Run, row: Mapping[str, Any]) -> float | None:
    config = run.info.get("config", {})
    tokens = config.get("global_batch_size", 0) * config.get("block_size", 0)
    return left_s(row, tokens) if tokens else None


def _line(row: Mapping[str, Any]) -> str:
    """A run in a line."""
    step = f" at step {row['step']} of {row['max_iters']}" if row.get("step") and row["state"] in ACTIVE else ""
    loss = f", val loss {row['val_loss']:.4f}" if row.get("val_loss") is not None else ""
    return f"{row['name']}: {row['state']}{step}{loss}" + (f": {row['reason']}" if row.get("reason") else "")
