"""Looking after the workers of an attempt: which one the others wait for in vain, and where in its code it is.

A worker says twice a second what it does (`pace.py`). Time without a sign of progress is counted by the supervisor's
own looks, so that a machine that slept, or a supervisor that was itself stopped, condemns nobody. A worker that waits
for others is no suspect while there is one that they may be waiting for.

Left out on purpose: what follows (`crew.py`, `verdict.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptlab.jsonfile import read_json
from gptlab.pace import COMMUNICATION, PATIENT

LOOK_S = 0.5
"""Longest time between two looks."""
PATIENCE = 10.0
"""How many times as long a worker may take that starts, saves, or was compiled."""
SLOWEST = 5.0
"""A worker is not hung before it took so many times as long as it ever did between two signs of progress."""
STACK_S = 2.0
"""Seconds that a worker is given to write its stack."""
STACK_SIGNAL = signal.SIGUSR2
"""At which a worker writes the stacks of its threads to its error stream (`entry.py`)."""


@dataclass(frozen=True)
class Stuck:
    """A worker that makes no progress."""

    rank: int
    stopped: bool
    """By a signal: it does not run at all."""
    seconds: float
    """Without a sign of progress."""
    phase: str

    @property
    def what(self) -> str:
        """What it did wrong, without its rank."""
        if self.stopped:
            return f"was stopped (by SIGSTOP, or a debugger) for {self.seconds:.3g} s, while {_doing(self.phase)},"
        return f"made no progress for {self.seconds:.3g} s while {_doing(self.phase)},"


class Progress:
    """For how long a worker has shown nothing new, by the looks of who watches it, and for how long it may.

    Args:
        timeout_s: without progress.
        patient: whether all phases may take `PATIENCE` times as long, as where code is compiled.
    """

    def __init__(self, timeout_s: float, *, patient: bool) -> None:
        self.timeout_s, self.patient = timeout_s, patient
        self.idle = 0.0
        """Seconds since the last sign."""
        self._longest = 0.0
        self._before: tuple[Any, str] = (None, PATIENT[0])  # the last sign, and the phase that it was of

    def count(self, said: Mapping[str, Any], sign: Any, passed: float) -> None:
        """A look, so many seconds after the one before; another sign than then is progress."""
        before, phase = self._before
        if sign == before:
            self.idle += passed
            return
        if phase not in (COMMUNICATION, *PATIENT):
            self._longest = max(self._longest, self.idle)
        self._before, self.idle = (sign, said.get("phase", PATIENT[0])), 0.0

    def is_over(self, said: Mapping[str, Any]) -> bool:
        """Whether its time is over, where it last said that."""
        limit = max(self.timeout_s, SLOWEST * self._longest)
        if self.patient or said.get("patience", True):
            limit *= PATIENCE
        return self.idle >= limit


class Watch:
    """Over the workers of one attempt.

    Args:
        folder: the attempt's.
        pids: process ids, by rank.
        timeout_s: without progress; 0 watches nobody.
        patient: as for `Progress`.
    """

    def __init__(self, folder: Path, pids: Mapping[int, int], timeout_s: float, *, patient: bool) -> None:
        self.folder, self.pids, self.timeout_s = folder, pids, timeout_s
        self.every_s = min(LOOK_S, timeout_s / 8) if timeout_s else None
        self._progress = {rank: Progress(timeout_s, patient=patient) for rank in pids}
        self._stopped = dict.fromkeys(pids, 0.0)
        self._looked = time.monotonic()

    def look(self, here: set[int]) -> Stuck | None:
        """The worker to blame, among the ranks that are still there; None while all is well."""
        if not self.timeout_s or self.every_s is None:
            return None
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 2 * self.every_s), now
        said = {rank: read_json(self.folder / f"rank-{rank}.json") or {} for rank in here}
        suspects: list[Stuck] = []
        waiting: list[Stuck] = []
        for rank in sorted(here):
            progress, phase = self._progress[rank], said[rank].get("phase", "starting")
            progress.count(said[rank], said[rank].get("marks"), passed)
            self._stopped[rank] = self._stopped[rank] + passed if is_stopped(self.pids[rank]) else 0.0
            if self._stopped[rank] >= self.timeout_s:
                return Stuck(rank, True, self._stopped[rank], phase)
            if progress.is_over(said[rank]):
                (waiting if phase == COMMUNICATION else suspects).append(Stuck(rank, False, progress.idle, phase))
        if suspects:
            return suspects[0]
        # All wait for each other: no one is to blame, and none will go on.
        return waiting[0] if waiting and len(waiting) == len(here) == len(self.pids) else None

    def keep_stacks(self, here: set[int]) -> None:
        """Asks every worker for its stack, which becomes rank-R.stack; of a stopped one that says why it is empty."""
        streams = {rank: self.folder / f"rank-{rank}.err" for rank in here}
        before = {rank: _size(path) for rank, path in streams.items()}
        asked = {rank for rank in here if not is_stopped(self.pids[rank])}
        for rank in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], STACK_SIGNAL)
        deadline, sizes = time.monotonic() + STACK_S, dict(before)
        while time.monotonic() < deadline:
            time.sleep(0.05)
            now = {rank: _size(path) for rank, path in streams.items()}
            if now == sizes and all(now[rank] > before[rank] for rank in asked):
                break
            sizes = now
        for rank, path in streams.items():
            with contextlib.suppress(OSError):
                text = path.read_bytes()[before[rank] :] if rank in asked else b""
                none = "it did not answer" if rank in asked else "stopped by a signal, so it could not be asked for one"
                (self.folder / f"rank-{rank}.stack").write_bytes(text or f"no stack of rank {rank}: {none}\n".encode())


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine was stopped by a signal or a debugger."""
    import psutil

    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _doing(phase: str) -> str:
    """A phase, as something that one does."""
    return {
        "communication": "waiting for the others", "forward": "in a forward pass", "backward": "in a backward pass",
        "windows": "fetching its windows", "other": "between two passes",
    }.get(phase, phase)  # fmt: skip
