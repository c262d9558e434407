"""Where a rank is, and where its time goes: what heartbeats, shares and the straggler are made of.

    >>> from gptlab.pace import Pace
    >>> pace = Pace(rank=0, world_size=1)
    >>> pace.enter("forward")
    >>> pace.report()["phase"]
    'forward'

A rank says which phase it enters; a thread beside it puts that into the attempt's folder twice a second, as
`rank-R.json`. So a reader, and the supervisor above all, can tell a rank that waits for others from the one that they
wait for, and a process that was stopped from one that hangs.

At each step's closing sum the ranks also tell each other for how long they were busy since the last one. The time that
a rank spends in sums is then told apart: it *waits* for as long as the busiest rank was busier, the rest is
*communication*. Times are the host's: on a GPU, kernels that are still queued count where the host waits for them.

Left out on purpose: what a rank does (`training.py`), and what follows from a rank that hangs (`launcher/`).
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gptlab.jsonfile import write_json

PULSE_S = 0.5
"""Seconds between two heartbeats."""
SHARES = ("forward", "backward", "communication", "wait")
"""What is told of a rank's time; the rest goes to windows, updates, looks at the validation loss and saving."""
COMMUNICATION = "communication"
PREPARING = "preparing"
"""Phase of a rank that prepares the run's text itself, or waits for one that does: as long as that takes."""
OVER = "over"
"""Phase of a rank's last heartbeat."""
PATIENT = ("starting", PREPARING, "saving")
"""Phases that may take long without a sign of progress."""
FORGET = 0.95
"""What a second counts for, a step later."""
WINDOW = 16
"""Steps over which a straggler is looked for."""
SLOW = 1.5
"""How many times as long as the others a straggler takes for the same work."""


class Pace:
    """The clock of one rank. Only the rank's own thread tells it something; any thread may ask for a report."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.phase = "starting"
        self.step = 0
        """Steps taken, of the whole run."""
        self.from_step = 0
        """Steps that were taken when this attempt began."""
        self.marks = 0
        """Signs of progress so far: each phase that is entered is one."""
        self.first_step: float | None = None
        """When this attempt's first step was done, in epoch seconds."""
        self.news = threading.Event()
        """Set where a report should not wait for the next heartbeat."""
        self.straggler: int | None = None
        """The rank that others wait for, where one takes much longer than they do."""
        self._began = time.time()
        self._at = time.perf_counter()
        self._seconds: dict[str, float] = {}  # by phase, in this step
        self._totals: dict[str, float] = dict.fromkeys(SHARES, 0.0)
        self._total = 0.0
        self._window: deque[list[float]] = deque(maxlen=WINDOW)

    def enter(self, phase: str) -> None:
        """The phase before ends here and this one begins."""
        now = time.perf_counter()
        self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + now - self._at
        self.phase, self._at = phase, now
        self.marks += 1

    def mark(self) -> None:
        """A sign of progress within a phase."""
        self.enter(self.phase)

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """A phase in the middle of another."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def begin(self, step: int) -> None:
        """This attempt goes on from so many steps; what it took to get there is no part of a step."""
        self.step = self.from_step = step
        self._seconds.clear()
        self.enter("other")
        self._seconds.clear()

    def busy(self) -> list[float]:
        """What the closing sum carries: a number a rank, of which this rank fills its own; seconds, this step."""
        self.mark()
        mine = sum(seconds for phase, seconds in self._seconds.items() if phase != COMMUNICATION)
        return [mine if rank == self.rank else 0.0 for rank in range(self.world_size)]

    def compare(self, busy: Sequence[float], portions: Sequence[int]) -> None:
        """Takes what the closing sum made of everybody's `busy`, once a step.

        Args:
            portions: micro-batches of each rank: who has more of them may take longer.
        """
        self.mark()
        spent = self._seconds.get(COMMUNICATION, 0.0)
        wait = min(spent, max(busy) - busy[self.rank]) if busy else 0.0
        step = {name: self._seconds.get(name, 0.0) for name in SHARES} | {"wait": wait, COMMUNICATION: spent - wait}
        for name in SHARES:
            self._totals[name] = self._totals[name] * FORGET + step[name]
        self._total = self._total * FORGET + sum(self._seconds.values())
        self._seconds.clear()
        each = [seconds / portion if portion else 0.0 for seconds, portion in zip(busy, portions, strict=True)]
        self._window.append(each)
        self.straggler = _straggler(self._window)

    def done(self, step: int) -> None:
        """So many steps are taken."""
        self.step = step
        if self.first_step is None:
            self.first_step = time.time()
            self.news.set()

    def shares(self) -> dict[str, float]:
        """Of this rank's recent time, 0..1."""
        return {name: seconds / self._total if self._total else 0.0 for name, seconds in self._totals.items()}

    def report(self) -> dict[str, Any]:
        """Plain values, for rank-R.json. `since` is when the last sign of progress came; times are epoch seconds."""
        now = time.time()
        fresh = self.step - self.from_step < 2  # whatever is compiled, allocated or measured comes here
        return {
            "rank": self.rank, "world_size": self.world_size, "pid": os.getpid(), "time": now, "began": self._began,
            "from_step": self.from_step, "step": self.step, "first_step": self.first_step, "phase": self.phase,
            "since": now - (time.perf_counter() - self._at), "marks": self.marks,
            "patience": fresh or self.phase in PATIENT, "shares": self.shares(),
            "straggler": self.straggler,
        }  # fmt: skip


def _straggler(window: Sequence[Sequence[float]]) -> int | None:
    """The rank whose micro-batches take much longer than the others', over a few steps at least."""
    if len(window) < WINDOW // 4:
        return None
    # The median: a save or a look at the validation loss makes one step long, not a rank slow.
    usual = [statistics.median(times) for times in zip(*window, strict=True)]
    working = [rank for rank, seconds in enumerate(usual) if seconds > 0]
    if len(working) < 2:
        return None
    slowest = max(working, key=lambda rank: usual[rank])
    others = statistics.median(usual[rank] for rank in working if rank != slowest)
    return slowest if usual[slowest] > SLOW * others else None


class Pulse:
    """Puts a rank's pace into a file twice a second, from a thread beside it, until it is closed.

    A full disk or a directory that is gone is the rank's own thread's to report.
    """

    def __init__(self, pace: Pace, folder: Path) -> None:
        self.pace, self.path = pace, folder / f"rank-{pace.rank}.json"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._over.is_set():
            self.pace.news.clear()
            with contextlib.suppress(OSError):
                write_json(self.path, self.pace.report())
            self.pace.news.wait(PULSE_S)

    def close(self) -> None:
        """A last one."""
        self.pace.enter(OVER)
        self._over.set()
        self.pace.news.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            write_json(self.path, self.pace.report())
