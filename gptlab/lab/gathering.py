"""What a view shows, read from run directories: which runs, their rows, their curves; read again only where they grew.

    >>> from gptlab.lab.gathering import Gatherer
    >>> rows, series, places = Gatherer().gather(Path("runs"), sweep=None)

Left out on purpose: turning it into pictures and tables (`drawing.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from gptlab.config import ConfigError
from gptlab.grid import SHAPE
from gptlab.lab import figures, tables
from gptlab.runs import Run, list_runs
from gptlab.sweeps import Sweep

MOST_ROWS = 60
"""Newest runs of a folder that are listed."""
Mark = tuple[int, int] | None
"""What changes when a file does: time and size. None if it is not there."""


class Gatherer:
    """Remembers what it read, so that a look at unchanged runs costs next to nothing."""

    def __init__(self) -> None:
        self._sweeps: dict[Path, tuple[Mark, Sweep]] = {}
        self._runs: dict[Path, Run] = {}
        self._series: dict[Path, tuple[Any, figures.Series]] = {}

    def find(self, runs_dir: Path, name: str | None) -> tuple[Sweep | None, list[Run]]:
        """The sweep, if one is asked for and there, and its runs; else the newest of the folder."""
        path = runs_dir / f"{name}.sweep.json"
        mark = mark_of(path) if name is not None else None
        if name is None or mark is None:
            return None, [self._runs.setdefault(run.path, run) for run in list_runs(runs_dir)[-MOST_ROWS:]]
        if path not in self._sweeps or self._sweeps[path][0] != mark:
            self._sweeps[path] = (mark, Sweep.open(name, runs_dir))
        sweep = self._sweeps[path][1]
        return sweep, [self._runs.setdefault(run.path, run) for run in sweep.runs]

    def run(self, runs_dir: Path, name: str) -> Run | None:
        """One run, if it is there."""
        path = runs_dir / name
        return self._runs.setdefault(path, Run(path)) if (path / "run.json").is_file() else None

    def gather(
        self,
        runs_dir: Path,
        sweep: str | None,
        *,
        hidden: Collection[str] = (),
        only: Collection[str] = (),
    ) -> tuple[list[dict[str, Any]], list[figures.Series], list[int]]:
        """The table's rows, the curves of those that are drawn, and the place in the palette of each curve.

        Args:
            hidden: names that are left out; the others keep their colours.
            only: names that are shown, where there are some.
        """
        found, runs = self.find(runs_dir, sweep)
        rows = found.rows() if found is not None else tables.run_rows(runs)
        started = {run.name: run for run in runs}
        valid = [row for row in rows if row["state"] != "invalid"]
        rows = [row for row in rows if row["name"] not in hidden and (not only or row["name"] in only)]
        drawn = [row for row in valid if row in rows]
        if len(drawn) > figures.MOST_CURVES:  # the last of those that have points, in the table's order
            drawn = [row for row in drawn if row.get("step")][-figures.MOST_CURVES :] or drawn[: figures.MOST_CURVES]
        # A colour belongs to a run, whatever else is hidden, as far as there are enough of them.
        owners = valid if len(valid) <= figures.MOST_CURVES else drawn
        colours = {row["name"]: place for place, row in enumerate(owners)}
        series = []
        for row in drawn:
            shape = figures.TIMES.join(str(row.get(field, "?")) for field in SHAPE)
            name = str(row["name"])
            label = shape if found is not None else name
            series.append(self._read(started[name], label) if name in started else figures.empty(name, label))
        return rows, series, [colours[row["name"]] for row in drawn]

    def _read(self, run: Run, label: str) -> figures.Series:
        mark = (mark_of(run.path / "metrics.jsonl"), label)
        if run.path not in self._series or self._series[run.path][0] != mark:
            try:
                found = figures.read(run, label)
            except ConfigError:  # the table says why it cannot be read
                found = figures.empty(run.name, label)
            self._series[run.path] = (mark, found)
        return self._series[run.path][1]


def mark_of(path: Path) -> Mark:
    """A file's mark."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def marks(runs: Sequence[Run]) -> dict[str, tuple[Any, ...]]:
    """What has changed when a run has, by name; runs that were started only."""
    files = ("metrics.jsonl", "result.json", "run.json")
    return {
        run.name: (*(mark_of(run.path / name) for name in files), run.state)
        for run in runs
        if (run.path / "run.json").is_file()
    }
