"""A sweep: a grid of configs becomes a queue of runs and one table.

Depth, heads and width are the usual axes, but every field of the config can be one. A cell that cannot be (7 heads
over 96 features) is a row like the others, marked `invalid` with the reason. Started again, a sweep skips the cells
that are finished and goes on with those that were interrupted.

    >>> from gptlab import preset, sweep
    >>> s = sweep(preset("tiny", max_iters=50), {"n_layer": [2, 4], "n_head": [2], "n_embd": [64, 128]}, name="first")
    >>> s.wait(), s.table()

`runs/NAME.sweep.json` holds the grid and `runs/NAME.sweep.csv` the table; the cells are ordinary runs beside them, and
the presence of `runs/NAME.sweep.stop` asks for a stop.
The queue lives in a thread of the process that started the sweep: when that ends, its runs end, and the next start
takes them up. Left out on purpose: the queue itself (`queueing.py`), fits over the table (`scaling/`), curves (`lab/`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from gptlab.config import ConfigError, TrainConfig, did_you_mean
from gptlab.csvfile import write_csv
from gptlab.fields import check_range
from gptlab.grid import Cell, cells, checked, listed
from gptlab.halving import rungs
from gptlab.queueing import Launcher, Queue
from gptlab.recording import MOST_BYTES, check_name
from gptlab.runs import Run, default_runs_dir, read_json, write_json

if TYPE_CHECKING:
    import pandas

    from gptlab.launcher.engines import Slurm

FORMAT = 1
"""Version of the manifest's layout."""
ARRAY_POLL_S = 2.0
"""Seconds between two questions to SLURM."""


def sweep(
    base: TrainConfig,
    grid: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]],
    *,
    name: str,
    runs_dir: str | os.PathLike[str] | None = None,
    at_once: int | None = None,
    halving: int = 0,
    launcher: Launcher | None = None,
    engine: Slurm | None = None,
) -> Sweep:
    """Starts a sweep, or goes on with it, and returns while its runs train in other processes.

    Args:
        grid: values by field, of which every combination is run; or a list of rows, each a cell (`dial.isoflops`).
        at_once: how many runs train at a time; on a CPU they share its cores. None is 1, and with SLURM no
            limit.
        halving: stops hopeless cells early: of so many only the best one goes on from rung to rung (`halving.py`).
        launcher: what starts runs; `gptlab.launcher` unless told otherwise.
        engine: SLURM, to which all runs go at once, as a job array; it goes on without this process.

    Raises:
        ConfigError: no cell can be run, or a run of that name exists with other settings. Nothing is made then.
    """
    if at_once is not None:
        check_range("at_once", at_once, 1, 4096)
    check_name(name)
    folder = Path(runs_dir) if runs_dir is not None else default_runs_dir()
    made = checked(cells(base, grid) if isinstance(grid, Mapping) else listed(base, grid))
    if not made:
        raise ConfigError(f"The sweep {name!r} has no cells: give at least one.")
    if all(cell.config is None for cell in made):
        raise ConfigError(f"No cell of the sweep {name!r} can be run; the first: {made[0].reason}")
    found = Sweep(name, folder, made)
    found.check_names()
    found.check_earlier_runs()
    if engine is not None:
        engine.check_folder(folder.absolute())
    if halving and engine is not None:
        raise ConfigError(f"halving {halving} needs a queue that watches, and SLURM runs all cells: leave out the one.")
    if halving:
        configs = [cell.config for cell in made if cell.config is not None]
        found.thin(halving, rungs(configs, halving))
    axes = list(grid) if isinstance(grid, Mapping) else []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(
            found.path,
            {"format": FORMAT, "name": name, "created": time.time(), "base": base.to_dict(),
             "grid": {field: list(dict.fromkeys(cell.values[field] for cell in made)) for field in axes},
             "cells": [{"name": cell.name, "values": cell.values, "reason": cell.reason} for cell in made]},
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"{folder} cannot hold a sweep ({error.strerror}): choose another --runs-dir.") from None
    if engine is not None:
        found.start_array(engine, at_once or 0)
    else:
        found.start(launcher, at_once or 1)
    return found


def array_script(
    base: TrainConfig, grid: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]], name: str,
    runs_dir: str | os.PathLike[str] | None, engine: Slurm, at_once: int = 0,
) -> str:  # fmt: skip
    """What SLURM would be given for a sweep; nothing is made."""
    planned = Sweep(
        name,
        (Path(runs_dir) if runs_dir is not None else default_runs_dir()).absolute(),
        cells(base, grid) if isinstance(grid, Mapping) else listed(base, grid),
    )
    paths = [planned.runs_dir / planned.run_name(cell) for cell in planned.cells if cell.config is not None]
    return engine.script(name, base.nproc, paths, Path.cwd(), planned.array_log, at_once)


class Sweep:
    """A sweep: its cells, their runs, and the thread that starts them one after another."""

    def __init__(self, name: str, runs_dir: Path, cells: list[Cell]) -> None:
        self.name, self.runs_dir, self.cells = name, runs_dir, cells
        self.path = runs_dir / f"{name}.sweep.json"
        self.csv_path = runs_dir / f"{name}.sweep.csv"
        self._stop_path = runs_dir / f"{name}.sweep.stop"
        self._runs = [Run(runs_dir / self.run_name(cell)) for cell in cells]
        self._reasons = [cell.reason for cell in cells]
        self._reading = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._halving, self._rungs = 0, list[int]()

    @classmethod
    def open(cls, name: str, runs_dir: str | os.PathLike[str] | None = None) -> Self:
        """A sweep as it lies in the folder, to read; `sweep(...)` is what goes on with it."""
        folder = Path(runs_dir) if runs_dir is not None else default_runs_dir()
        manifest = read_json(folder / f"{name}.sweep.json")
        if not manifest:
            known = [path.name.removesuffix(".sweep.json") for path in folder.glob("*.sweep.json")]
            raise ConfigError(f"There is no sweep {name!r} in {folder}{did_you_mean(name, known)}.")
        made = []
        try:
            base, stored = TrainConfig.from_dict(manifest["base"]), manifest["cells"]
            reasons = {check_name(cell["name"]): cell["reason"] for cell in stored}
            for cell in listed(base, [one["values"] for one in stored], [one["name"] for one in stored]):
                reason = reasons.get(cell.name) or cell.reason
                made.append(dataclasses.replace(cell, reason=reason, config=None if reason else cell.config))
        except (KeyError, TypeError, AttributeError, ConfigError) as error:
            said = str(error) if isinstance(error, ConfigError) else "an entry is lacking or of another type"
            raise ConfigError(
                f"{folder / f'{name}.sweep.json'} cannot be read ({said}): start the sweep anew, which takes up its "
                "runs, or read it with the version that wrote it."
            ) from None
        return cls(name, folder, made)

    def run_name(self, cell: Cell) -> str:
        """The name of a cell's run."""
        return f"{self.name}-{cell.name}"[:100].strip()

    @property
    def runs(self) -> list[Run]:
        """The runs that were started so far, in the grid's order."""
        return [run for run in self._runs if (run.path / "run.json").is_file()]

    @property
    def is_active(self) -> bool:
        """Whether its queue is at work in this process."""
        return self._thread is not None and self._thread.is_alive()

    def check_names(self) -> None:
        """Raises ConfigError where two cells would share a run, since a run's name ends after 100 characters."""
        names = [self.run_name(cell) for cell in self.cells]
        if len(set(names)) < len(names) or any(len(name.encode()) > MOST_BYTES for name in names):
            raise ConfigError(
                f"The sweep's name {self.name[:20]!r}... leaves no room for the names of its runs, which begin with it "
                f"and have at most 100 letters and {MOST_BYTES} bytes: use a shorter one."
            )

    def check_earlier_runs(self) -> None:
        """Raises ConfigError where a run of a cell's name was made with other settings."""
        for cell, run in zip(self.cells, self._runs, strict=True):
            if cell.config is None or not (run.path / "run.json").is_file():
                continue
            for field, old in run.config.to_dict().items():
                new = getattr(cell.config, field, old)
                # Where a choice was left open, the record may hold what was chosen; threads follow from at_once.
                same = old == new or new == "auto" or field == "threads" or (field == "vocab_size" and new == 0)
                if same or (field == "data" and os.path.abspath(old) == os.path.abspath(new)):
                    continue
                raise ConfigError(
                    f"The sweep {self.name!r} was started with {field} {old}, and this is {new}: "
                    "choose another --name, or the old value."
                )

    def thin(self, factor: int, rungs: list[int]) -> None:
        """Lets only the best of so many cells go on at each rung (a step); `sweep(halving=...)` does it."""
        self._halving, self._rungs = factor, rungs

    def start(self, launcher: Launcher | None = None, at_once: int = 1) -> None:
        """Starts the queue; `sweep(...)` does it."""
        if launcher is None:
            from gptlab import launcher as ours

            launcher = ours
        queue = Queue(
            [(cell.config, run) for cell, run in zip(self.cells, self._runs, strict=True)], self._reasons, launcher,
            at_once=at_once, halving=self._halving, rungs=self._rungs, stopping=self._stopping,
            stop_path=self._stop_path, ended=self.record,
        )  # fmt: skip
        self._stop_path.unlink(missing_ok=True)
        self._thread = threading.Thread(target=queue.work, daemon=True)
        self._thread.start()

    @property
    def array_log(self) -> Path:
        """Where SLURM's own words about a job of the array go, as sbatch is told it."""
        return Path(str(self.runs_dir.absolute()).replace("%", "%%")) / f"{self.name}.sweep-%a.log"

    def start_array(self, engine: Slurm, at_once: int) -> None:
        """Hands what is to be done to SLURM as one job array; `sweep(...)` does it."""
        from gptlab.launcher.engines import starting

        todo = []
        for cell, run in zip(self.cells, self._runs, strict=True):
            if cell.config is None or (run.result() or {}).get("status") in ("finished", "diverged") or run.is_active:
                continue
            if not (run.path / "run.json").is_file():
                starting.prepare(cell.config, run.name, self.runs_dir, engine)
            todo.append(Run(run.path.absolute()))
        if todo:
            job = engine.start_array(todo, self.runs_dir / f"{self.name}.sweep.sh", self.array_log, at_once)
            self._thread = threading.Thread(target=self._watch_array, args=(job, todo), daemon=True)
            self._thread.start()

    def _watch_array(self, job: str, runs: list[Run]) -> None:
        """Until SLURM has no job of the array any more."""
        from gptlab.launcher.engines import queue

        told, ended = False, 0
        self._stop_path.unlink(missing_ok=True)
        while queue.is_alive(job):
            if self._stop_path.exists():
                self._stopping.set()
            if self._stopping.is_set() and not told:
                told = True
                queue.cancel(job, "--state=PENDING")
                for run in runs:
                    run.request_stop()
            now = sum(run.result() is not None for run in runs)
            if now != ended:
                ended = now
                with contextlib.suppress(OSError):  # the array goes on where a disk is full
                    self.write_csv()
            self._stopping.wait(ARRAY_POLL_S) if not told else time.sleep(ARRAY_POLL_S)
        for run in runs:
            queue.leave(run, "SLURM ended its job before it began")
        self.write_csv()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the queue is empty and its runs have ended, or `timeout` seconds; whether they have."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._thread is not None and self._thread.is_alive():
            left = 0.5 if deadline is None else min(0.5, deadline - time.monotonic())
            if left <= 0:
                return False
            self._thread.join(left)  # in slices, so that Ctrl-C is heard
        return True

    def stop(self) -> None:
        """Asks the running runs to stop, each with a checkpoint, and starts no more. `wait()` waits for them."""
        self._stopping.set()

    def request_stop(self) -> None:
        """Asks the same of the sweep's queue, in whichever process it is at work; its next start forgets it."""
        self._stop_path.touch()

    def rows(self) -> list[dict[str, Any]]:
        """A row a cell: what the grid sets, its state, parameters and what the run has reached."""
        from gptlab import costs

        fields = dict.fromkeys(field for cell in self.cells for field in cell.values)  # of a list of rows: any cell's
        with self._reading:
            rows = []
            for cell, run, reason in zip(self.cells, self._runs, self._reasons, strict=True):
                row: dict[str, Any] = cell.shape | {
                    field: cell.values.get(field, getattr(cell.config, field, None)) for field in fields
                }
                row |= dict.fromkeys(("state", "parameters", "non_embedding", "step", "max_iters", "loss", "val_loss"))
                row |= dict.fromkeys(("matmul_parameters", "tokens", "flops", "tokens_per_s", "mfu", "seconds"))
                if cell.config is not None:
                    row["max_iters"] = cell.config.max_iters
                if (run.path / "run.json").is_file():
                    found = run.row()
                    reason = reason or found.get("reason")
                    row |= {key: value for key, value in found.items() if key in row}
                if row["step"] is not None:
                    config = run.config  # its vocabulary is known
                    count, tokens = costs.parameters(config), run.tokens()
                    row |= {"parameters": count.total, "non_embedding": count.non_embedding}
                    row |= {"matmul_parameters": costs.matmul_parameters(config)}
                    row |= {"tokens": tokens, "flops": tokens and tokens * costs.flops_per_token(config)}
                elif row["state"] is None:
                    row["state"] = "waiting" if reason is None else "invalid"
                rows.append(row | {"name": self.run_name(cell), "reason": reason or _error(run)})
        return rows

    def table(self) -> pandas.DataFrame:
        """`rows()` as a table."""
        import pandas

        return pandas.DataFrame(self.rows())

    def write_csv(self) -> Path:
        """Replaces the table on disk."""
        rows = self.rows()
        write_csv(self.csv_path, list(rows[0]), rows)
        return self.csv_path

    def record(self) -> None:
        """Replaces the table on disk, and in the manifest, which is what others read, the reasons why cells are not
        run: the queue does it whenever runs have ended."""
        reasons = {cell.name: reason for cell, reason in zip(self.cells, self._reasons, strict=True)}
        manifest = read_json(self.path) or {}
        with contextlib.suppress(KeyError, TypeError):  # spoilt meanwhile: the next start writes it anew
            stored = manifest["cells"]
            told = [cell | {"reason": reasons.get(cell["name"], cell["reason"])} for cell in stored]
            if told != stored:
                write_json(self.path, manifest | {"cells": told})
        self.write_csv()


def _error(run: Run) -> str | None:
    """In one line why a run failed."""
    error = run.error() if (run.result() or {}).get("status") == "failed" else None
    return f"{error.get('type')}: {error.get('message')}" if error else None
