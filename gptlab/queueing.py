"""The queue of a sweep: starts its runs one after another, at most so many at a time, from rung to rung.

    >>> queue = Queue([(cell.config, run) for ...], reasons, launcher)
    >>> threading.Thread(target=queue.work, daemon=True).start()

A run that is finished is skipped, one that was interrupted is resumed, and one that another process trains is waited
for. What goes wrong with one is no trouble of the others: its reason says it. With halving the queue is worked once
for each rung, and only the best go on. Left out on purpose: what is run (`grid.py`), when the field is thinned
(`halving.py`), the table (`sweeps.py`), SLURM's own queue (`launcher/engines/`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from gptlab.config import ConfigError, TrainConfig
from gptlab.halving import loss_at, survivors
from gptlab.runs import Run, is_locked

POLL_S = 0.05
"""Seconds between two looks at the runs."""


class Handle(Protocol):
    """What the queue needs of a started run."""

    def stop(self) -> None: ...


class Launcher(Protocol):
    """What the queue needs of `gptlab.launcher`; tests hand in another."""

    def launch(self, config: TrainConfig, *, name: str, runs_dir: Path) -> Handle: ...
    def resume(self, name: str, *, runs_dir: Path) -> Handle: ...


class Queue:
    """Runs that are waiting, and what starts them.

    Args:
        cells: of each the config (None where there is nothing to run), and the run that it becomes.
        reasons: of each why it is not run, which the queue adds to; None where nothing is in the way.
        launcher: what starts runs.
        at_once: how many train at a time.
        halving, rungs: of so many only the best goes on at each of these steps.
        stopping: set by whoever wants the running runs to stop, and no more to start.
        stop_path: the presence of this file asks for the same, from any process.
        ended: called whenever runs have ended, and last of all; an OSError of it is passed over.
    """

    def __init__(
        self,
        cells: Sequence[tuple[TrainConfig | None, Run]],
        reasons: list[str | None],
        launcher: Launcher,
        *,
        at_once: int = 1,
        halving: int = 0,
        rungs: Sequence[int] = (),
        stopping: threading.Event,
        stop_path: Path,
        ended: Callable[[], Any],
    ) -> None:
        self.cells, self.reasons, self.launcher, self.at_once = cells, reasons, launcher, at_once
        self.halving, self.rungs = halving, rungs
        self.stopping, self.stop_path, self.ended = stopping, stop_path, ended

    def work(self) -> None:
        """Works the queue, once for each rung and once to the end, until a stop is asked."""
        left = [index for index, (config, _) in enumerate(self.cells) if config is not None]
        for rung in self.rungs:
            self._to(rung, left)
            if self.stopping.is_set():
                break
            left = self._best(rung, [index for index in left if self.reasons[index] is None])
        else:
            self._to(None, left)
        self._tell()

    def _to(self, rung: int | None, cells: Sequence[int]) -> None:
        """Trains cells to a step, or to their end, at most `at_once` at a time."""
        waiting, running = list(cells), dict[int, Handle]()
        told = set[int]()
        runs = [run for _, run in self.cells]
        while running or (waiting and not self.stopping.is_set()):
            if self.stop_path.exists():
                self.stopping.set()
            ended = [index for index in running if not is_locked(runs[index].path)]  # held to its last moment
            for index in ended:
                del running[index]
            while waiting and len(running) < self.at_once and not self.stopping.is_set():
                index = waiting.pop(0)
                if rung is not None and runs[index].step() >= rung:
                    continue
                handle = self._start(index)
                if handle is not None:
                    running[index] = handle
            for index, handle in running.items():
                there = rung is not None and runs[index].step() >= rung
                if (there or self.stopping.is_set()) and index not in told:
                    told.add(index)
                    handle.stop()
            if ended:
                self._tell()
            time.sleep(POLL_S)

    def _tell(self) -> None:
        """Says that runs have ended. What is done then may need a disk, and the queue goes on where that is full."""
        with contextlib.suppress(OSError):
            self.ended()

    def _best(self, rung: int, cells: Sequence[int]) -> list[int]:
        """The cells that go on from a rung; the others' rows say why they do not."""
        losses = [loss_at(self.cells[index][1], rung) for index in cells]
        kept = [cells[place] for place in survivors(losses, self.halving)]
        for index, loss in zip(cells, losses, strict=True):
            if index not in kept:
                place = 1 + sum(other < loss for other in losses)
                self.reasons[index] = f"halving: loss {loss:.4f} at step {rung} was {place} of {len(cells)}"
        return kept

    def _start(self, index: int) -> Handle | None:
        """Starts a cell's run or goes on with it; None where it is done or cannot be started."""
        config, run = self.cells[index]
        assert config is not None
        try:
            if not (run.path / "run.json").is_file():
                return self.launcher.launch(_share_cores(config, self.at_once), name=run.name, runs_dir=run.path.parent)
            status = (run.result() or {}).get("status")
            if run.is_active:
                return _Elsewhere(run)
            if status in ("finished", "diverged"):  # it would diverge again
                return None
            return self.launcher.resume(run.name, runs_dir=run.path.parent)
        except Exception as error:  # one cell's trouble is not the others'
            if is_locked(run.path):  # another process was quicker
                return _Elsewhere(run)
            text = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            self.reasons[index] = text
            return None


class _Elsewhere:
    """A run of this sweep that another process trains: watched, and asked to stop like the others."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def stop(self) -> None:
        self.run.request_stop()


def _share_cores(config: TrainConfig, at_once: int) -> TrainConfig:
    """Runs that train at the same time share the cores, as the processes of one run do."""
    if at_once == 1 or config.threads:
        return config
    from gptlab import hardware

    return config.replace(threads=max(1, hardware.cores() // (config.nproc * at_once)))
