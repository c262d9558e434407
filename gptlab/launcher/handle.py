"""What the caller of `launch` holds of a run. All it knows, it reads from the run directory."""

from __future__ import annotations

import contextlib
import shlex
import time
from typing import TYPE_CHECKING, Any

from gptlab.config import ConfigError
from gptlab.runs import ACTIVE, Run, is_locked

if TYPE_CHECKING:
    from gptlab.launcher.client import Client
    from gptlab.launcher.detached import Detached


class Handle:
    """A run that this process started.

    Args:
        attempt: number of the first attempt of this start; older results are not its own.
    """

    def __init__(self, run: Run, client: Client | Detached, attempt: int) -> None:
        self.run, self._client, self._attempt = run, client, attempt

    def __repr__(self) -> str:
        return f"<Handle of {self.run.name!r}: {self.status}>"

    @property
    def name(self) -> str:
        """The run's name."""
        return self.run.name

    @property
    def status(self) -> str:
        """One word, as `Run.state` has it."""
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
        self.order({"do": "kill", "path": str(self.run.path)})

    def order(self, order: dict[str, Any]) -> None:
        """Hands an order on to who holds the run's processes; where it is gone, so are they."""
        with contextlib.suppress(OSError):
            self._client.send(order)

    def scale(self, workers: int) -> None:
        """Adds or takes workers while the run goes on; returns at once.

        After the step that is being taken all save together, and so many workers go on from there. The global batch
        stays what it was, and so does its cut into micro-batches: the workers share them, the first ones one more where
        they don't come out even.

        Raises:
            ConfigError: a number that cannot work, or a run that is over.
        """
        from gptlab import spread
        from gptlab.batches import micro_batches
        from gptlab.launcher.checks import check_devices

        config = self.run.config
        size = self.run.info.get("setting", {}).get("micro_batch_size") or config.micro_batch_size
        wanted = config.replace(nproc=workers, micro_batch_size=size)
        check_devices(wanted)
        pieces = micro_batches(config.global_batch_size, size) if size else workers
        if workers // spread.processes(wanted, workers) > pieces:
            raise ConfigError(
                f"{workers} workers are more than the {pieces} micro-batches of {size} that a step has: use at most "
                f"{pieces}, or start a run with a smaller micro_batch_size."
            )
        self._ask("scale", world_size=workers)

    def kill_worker(self, rank: int) -> None:
        """Ends one worker with SIGKILL, as a failing machine would: for trying what happens then. Returns at once.

        Raises:
            ConfigError: there is no such rank, or the run is over.
        """
        pids = self.run.status().get("pids", [])
        if type(rank) is not int or not 0 <= rank < max(1, len(pids)):
            raise ConfigError(
                f"There is no rank {rank!r} in {self.name!r}: choose one from 0 to {max(0, len(pids) - 1)}."
            )
        self._ask("kill worker", rank=rank)

    def _ask(self, do: str, **what: Any) -> None:
        """Tells the supervisor."""
        if self.status not in ACTIVE:
            raise ConfigError(
                f"The run {self.name!r} is {self.status}: `gptlab train --resume {shlex.quote(self.name)}` goes on."
            )
        try:
            self._client.send({"do": do, "path": str(self.run.path), **what})
        except OSError:
            raise ConfigError(f"The supervisor of {self.name!r} is gone: resume the run.") from None

    def why(self) -> list[str]:
        """Why the run is in the state that it is in, in lines for a person."""
        return self.run.why()

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
        words = self._client.last_words(self.run.path)
        if not self.run.path.exists():
            message = f"the run directory {self.run.path} is gone"
        elif self._client.is_alive():
            message = f"the run {self.run.name!r} could not go on: {words}"
        else:
            message = (
                f"the supervisor of {self.run.name!r} ended before the run: `gptlab.resume` goes on from its checkpoint"
            )
            message += f"\n{words}" if words else ""
        return {"status": "lost", "attempt": self._attempt, "message": message}
