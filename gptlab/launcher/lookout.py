"""A rank's own watch, where no supervisor of ours looks after it: under torchrun, SLURM, Kubernetes and DLRover.

    lookout = Lookout(pace, RunWriter(path, attempt), timeout_s=60.0, patient=False)
    ...
    lookout.close()

Agents replace workers that have left, and know nothing of one that hangs. So each rank has a thread that watches its
own signs of progress, as the supervisor would, and leaves with an error that names it when they cease. A process that
was stopped cannot do that: so each rank also reads the next one's heartbeat, the last one that of the first, and when
it ceases names that rank and leaves in its place. Either way the agent, or srun, ends the others and starts anew.

A rank that waits for others is not to blame; where all wait for each other, the sum's own time-out ends them. Left out
on purpose: what follows (`ending.py`), and a rank alone that is stopped, of which nobody hears.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable

from gptlab.jsonfile import read_json
from gptlab.launcher.watch import LOOK_S, Progress, Stuck, is_stopped
from gptlab.pace import COMMUNICATION, OVER, PREPARING, Pace
from gptlab.recording import RunWriter


class WorkerHung(RuntimeError):
    """A rank made no progress."""


class WorkerStopped(RuntimeError):
    """A rank gave no sign of life."""


class Lookout:
    """Watches this rank and hears the next one, from a thread beside it, until it is closed.

    Args:
        timeout_s: without progress, or without a heartbeat; 0 watches nobody.
        patient: whether all phases may take longer, as where code is compiled.
        leave: ends this process.
    """

    def __init__(
        self, pace: Pace, writer: RunWriter, timeout_s: float, *, patient: bool, leave: Callable[[int], None] = os._exit
    ) -> None:
        self.pace, self.writer, self.leave = pace, writer, leave
        self.every_s = min(LOOK_S, timeout_s / 8)
        self._own = Progress(timeout_s, patient=patient)
        self._next = Progress(timeout_s, patient=patient)
        self._looked = time.monotonic()
        self._over = threading.Event()
        if timeout_s:
            threading.Thread(target=self._watch, name="lookout", daemon=True).start()

    def close(self) -> None:
        """This rank is about to leave."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(self.every_s):
            if (stuck := self.look()) is not None:
                self._end(stuck)
                return

    def look(self) -> Stuck | None:
        """The rank to blame, this one or the next; None while all is well."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 2 * self.every_s), now
        said = self.pace.report()
        self._own.count(said, said["marks"], passed)
        if said["phase"] not in (COMMUNICATION, PREPARING) and self._own.is_over(said):
            return Stuck(self.pace.rank, False, self._own.idle, said["phase"])
        return self._hear(passed) if self.pace.world_size > 1 else None

    def _hear(self, passed: float) -> Stuck | None:
        """Whether the next rank lives."""
        rank = (self.pace.rank + 1) % self.pace.world_size
        said = read_json(self.writer.folder / f"rank-{rank}.json") or {}
        self._next.count({}, said.get("time"), passed)
        # Who could not write a heartbeat of its own may not miss another's: the disk is full, or gone.
        own = read_json(self.writer.folder / f"rank-{self.pace.rank}.json") or {}
        mute = time.time() - own.get("time", 0.0) > self._next.timeout_s
        # Saving and the like may take long, but not for one that lies stopped.
        late = self._next.idle >= self._next.timeout_s
        over = self._next.is_over(said) or (late and _lies_stopped(said.get("pid", 0)))
        if said.get("phase") == OVER or mute or not over:
            return None
        return Stuck(rank, True, self._next.idle, said.get("phase", "starting"))

    def _end(self, stuck: Stuck) -> None:
        """Writes down who is to blame, and leaves."""
        step = self.pace.step if self.pace.first_step is not None else None
        after = "before its first step" if step is None else f"after step {step}"
        place = self.writer.folder / f"rank-{stuck.rank}.stack"
        text = ""
        with contextlib.suppress(OSError):
            if stuck.stopped:
                place.write_text(f"no stack of rank {stuck.rank}: it gave no sign of life, so it could not be asked\n")
            else:
                with open(place, "w") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
            text = place.read_text()
        error: RuntimeError
        if stuck.stopped:
            error = WorkerStopped(
                f"rank {stuck.rank} gave no sign of life for {stuck.seconds:.3g} s (stopped, or cut off), {after}"
            )
        else:
            error = WorkerHung(f"rank {stuck.rank} {stuck.what} {after}")
        with contextlib.suppress(OSError):
            self.writer.error(stuck.rank, step, error, text)
        if stuck.stopped:
            # SIGTERM does not reach it, and torch's agent waits half a minute until it sends the other.
            pid: int = (read_json(self.writer.folder / f"rank-{stuck.rank}.json") or {}).get("pid", 0)
            with contextlib.suppress(OSError):
                if _lies_stopped(pid):
                    os.kill(pid, signal.SIGKILL)
        self.leave(1)


def _lies_stopped(pid: int) -> bool:
    """Whether a rank was stopped, on this machine. What bears another command line than this rank is none."""
    import psutil

    try:
        process = psutil.Process(pid) if pid else None
        return bool(process and process.cmdline() == psutil.Process().cmdline() and is_stopped(process.pid))
    except psutil.Error:
        return False
