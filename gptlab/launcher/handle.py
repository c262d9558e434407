"""What the caller of `launch` holds of a run. All it knows, it reads from the run directory."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from gptlab.runs import Run, is_locked

if TYPE_CHECKING:
    from gptlab.launcher.client import Client


class Handle:
    """A run that this process started.

    Args:
        attempt: number of the first attempt of this start; older results are not its own.
    """

    def __init__(self, run: Run, client: Client, attempt: int) -> None:
        self.run, self._client, self._attempt = run, client, attempt

    def __repr__(self) -> str:
        return f"<Handle of {self.run.name!r}: {self.status}>"

    @property
    def name(self) -> str:
        """The run's name."""
        return self.run.name

    @property
    def status(self) -> str:
        """One word: preparing, starting, running, restarting, finished, stopped, failed, diverged or lost."""
        return self.run.state

    @property
    def is_over(self) -> bool:
        """Whether nobody is at work on the run any more."""
        return not is_locked(self.run.path)

    def metrics(self) -> list[dict[str, Any]]:
        """A row a step, in order."""
        return self.run.metrics()

    def log(self, rank: int = 0) -> str:
        """What a rank of the newest attempt printed."""
        return self.run.log(rank)

    def stop(self) -> None:
        """Asks for a stop after the step that is being taken, with a checkpoint; returns at once."""
        self.run.request_stop()

    def kill(self) -> None:
        """Ends the run's processes now, without a checkpoint; returns at once.

        The run is then `stopped`, and can be resumed from its last checkpoint.
        """
        with contextlib.suppress(OSError):  # a dead supervisor has no workers
            self._client.send({"do": "kill", "path": str(self.run.path)})

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Waits until the run is over and its processes are gone. Returns its result.json.

        Where the supervisor died, that is ``{"status": "lost", "message": ...}``; `gptlab.resume` goes on from there.

        Raises:
            TimeoutError: the run is not over after so many seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = 0.01
        while is_locked(self.run.path):  # held from launch to the last moment
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"the run {self.run.name!r} is still {self.status} after {timeout:g} s")
            time.sleep(pause)
            pause = min(0.1, pause * 1.5)
        result = self.run.result()
        if result is not None and result.get("attempt", 0) >= self._attempt:
            return result
        message = (
            f"the supervisor of {self.run.name!r} ended before the run: `gptlab.resume` goes on from its checkpoint"
        )
        if not self.run.path.exists():
            message = f"the run directory {self.run.path} is gone"
        elif words := self._client.last_words():
            message += f"\n{words}"
        return {"status": "lost", "attempt": self._attempt, "message": message}
