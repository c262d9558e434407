"""What the caller of `launch` holds of a run that another program starts. All it knows, it reads from the directory.

handle = start_agent(run, ["torchrun", ...], {})    # torchrun and DLRover: a process of this machine
handle = JobHandle(run, attempt, "1234")            # SLURM: a job in a queue
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from gptlab import joining
from gptlab.config import ConfigError
from gptlab.launcher.engines import queue, settings
from gptlab.launcher.handle import Handle
from gptlab.runs import Run, is_locked

LOG = "engine.log"
"""In the run directory: what torchrun, DLRover or SLURM has to say."""
ASK_S = 2.0
"""Seconds between two questions to SLURM."""


class EngineHandle(Handle, ABC):
    """A run whose processes are not the warm supervisor's.

    Args:
        attempt: number of the first attempt of this start; older results are not its own.
    """

    def __init__(self, run: Run, attempt: int) -> None:
        self.run, self._attempt = run, attempt

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether nothing more will come."""

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Waits until the run is over. Returns its result.json, or ``{"status": "lost", "message": ...}``.

        Raises:
            TimeoutError: the run is not over after so many seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.is_over:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"the run {self.run.name!r} is still {self.status} after {timeout:g} s")
            time.sleep(0.1)
        result = self.run.result()
        if result is not None and result.get("attempt", 0) >= self._attempt:
            return result
        log = self.run.path / LOG
        words = log.read_text(errors="replace")[-2000:].strip() if log.exists() else ""
        message = f"{self.run.name!r} ended without a result: `gptlab train --resume` goes on from its checkpoint"
        return {"status": "lost", "attempt": self._attempt, "message": f"{message}\n{words}".strip()}

    def _ask(self, do: str, **what: Any) -> None:
        """What only the warm supervisor can do is refused."""
        raise ConfigError(
            f"{do!r} is for runs under this machine's own supervisor, and {self.run.name!r} is not one: start its "
            "engine with other numbers, and resume."
        )


class AgentHandle(EngineHandle):
    """A run under an agent that is a child of this process."""

    def __init__(self, run: Run, attempt: int, process: subprocess.Popen[bytes]) -> None:
        super().__init__(run, attempt)
        self.process = process  # its standard input is the leash: the agent ends when this process does

    @property
    def is_over(self) -> bool:
        """Whether the agent has left."""
        return self.process.poll() is not None

    def kill(self) -> None:
        """Ends this agent and its workers now, without a checkpoint. Where no other node takes part the run is then
        stopped; else the others may go on with it."""
        self.process.terminate()


class JobHandle(EngineHandle):
    """A run in SLURM's queue, or in one of its jobs.

    Args:
        job: the job's number, with `_N` for the N-th of an array.
    """

    def __init__(self, run: Run, attempt: int, job: str) -> None:
        super().__init__(run, attempt)
        self.job = job
        self._asked, self._there = 0.0, True

    @property
    def is_over(self) -> bool:
        """Whether the queue knows of no job any more that is waiting or at work."""
        if not self._there or time.monotonic() - self._asked < ASK_S:
            return not self._there
        self._asked = time.monotonic()
        self._there = queue.is_alive(self.job)
        return not self._there

    def stop(self) -> None:
        """Asks for a stop after the step that is being taken, with a checkpoint; takes a waiting job from the queue."""
        self.run.request_stop()
        if queue.state(self.job) == "PENDING":
            self.kill()

    def kill(self) -> None:
        """Ends the job now, or takes it from the queue."""
        queue.cancel(self.job)
        with contextlib.suppress(OSError):
            queue.leave(self.run, "taken from SLURM's queue")

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """As for every run; one that was still queued when its job went is stopped."""
        found = super().wait(timeout)
        queue.leave(self.run, "SLURM ended its job before it began")
        return found


def start_agent(run: Run, command: Sequence[str], environ: Mapping[str, str], *, alone: bool) -> AgentHandle:
    """Starts a command that starts the run's ranks, in a process that ends it when this one ends. A stop that was asked
    for before is forgotten, and one that is asked for from now on is kept.

    Args:
        alone: whether no other node takes part.
    """
    attempts = run.attempts()
    attempt = int(attempts[-1].name) + 1 if attempts else 1
    flags = ["--alone"] if alone else []
    around = [sys.executable, "-P", "-m", "gptlab.launcher.engines.agent", str(run.path.absolute()), *flags, "--"]
    if not is_locked(run.path):  # else it is joined, and a stop is for those who train it
        (run.path / "stop").unlink(missing_ok=True)
    with open(run.path / LOG, "ab") as log:
        try:
            process = subprocess.Popen(
                [*around, *command],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env=settings.full_environment({**environ, joining.KEEP_STOP: "1"}),
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"{around[0]} cannot be started ({error.strerror}): mend that, and resume.") from None
    return AgentHandle(run, attempt, process)
