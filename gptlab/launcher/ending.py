"""Ends of attempts: what one left, was it the last, and the final record of a run that no worker could write.

    if (reason := hopeless(run, restarts)): ...

torchrun and DLRover replace workers until a count is used up, whatever the cause, and leave no record of why they gave
up. So a worker that they start again looks at what its predecessors left, and the process that waits for the agent
writes the final record where no worker could; under our own supervisor and in SLURM's jobs whoever started the workers
does both.

Left out on purpose: the rules themselves (`verdict.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptlab.launcher.verdict import ECHO, Failure, reason_to_end
from gptlab.recording import RunWriter
from gptlab.runs import Run, read_json


@dataclass(frozen=True)
class Traces:
    """What an attempt left behind that ended early."""

    step: int | None
    """Last step that it did; None where it did none."""
    checkpoint: str | None
    """Name of the run's newest checkpoint, where it was there when the attempt ended."""
    error: Mapping[str, Any] | None
    """The first error of its ranks, error.json."""

    @property
    def after(self) -> str:
        """Its last step, in words."""
        return "before its first step" if self.step is None else f"after step {self.step}"

    @property
    def is_echo(self) -> bool:
        """Whether the error is only what another rank's end causes."""
        return self.error is not None and ECHO.search(self.error["message"]) is not None

    def raised(self) -> Failure:
        """The error, as why the attempt ended."""
        error = self.error
        assert error is not None
        return Failure(
            error["rank"], self.step if error["step"] is None else error["step"], error["type"], error["message"],
            self.checkpoint, by_signal=error["type"] == "WorkerStopped", traceback=error["traceback"],
        )  # fmt: skip


def traces(run: Run, folder: Path) -> Traces:
    """Of the attempt whose folder it is."""
    number, newest = int(folder.name), None
    steps = [row["step"] for row in run.metrics() if row["attempt"] == number]
    if checkpoints := run.checkpoints():
        name = checkpoints[-1].name
        # Who did its step saved it: attempts before that one ended without it.
        saved = next((row["attempt"] for row in reversed(run.metrics()) if name == f"step-{row['step']:08d}"), number)
        newest = name if saved <= number else None
    return Traces(steps[-1] if steps else None, newest, read_json(folder / "error.json"))


def failure_of(run: Run, folder: Path, *, otherwise: str = "a worker was lost") -> Failure:
    """Why an attempt ended early: its first error, or, where that is only the echo of a lost process, that loss."""
    left = traces(run, folder)
    if left.error is not None and not left.is_echo:
        return left.raised()
    return Failure(None, left.step, "WorkerKilled", f"{otherwise} {left.after}", left.checkpoint, by_signal=True)


def hopeless(run: Run, restarts: int) -> tuple[Failure, str] | None:
    """The last failure and why no further attempt should follow those that an agent has made; None where one should."""
    failures = [failure_of(run, folder) for folder in run.attempts()[-restarts:]] if restarts else []
    reason = reason_to_end(failures) if failures else None
    return (failures[-1], reason) if reason else None


def fail(run: Run, attempt: int, failure: Failure, reason: str) -> None:
    """The final record of a run that ends with this failure."""
    where = f" on rank {failure.rank}" if failure.rank is not None else ""
    what = failure.message if failure.type.startswith("Worker") else f"{failure.type}{where}: {failure.message}"
    end(run, attempt, "failed", message=f"{what} ({reason})", error=failure.to_dict())


def end(run: Run, attempt: int, status: str, **more: Any) -> None:
    """A final record, and status.json as it says."""
    rows = run.metrics()
    RunWriter(run.path, attempt).result(status, step=rows[-1]["step"] if rows else 0, **more)
    mirror(run, attempt)


def mirror(run: Run, attempt: int) -> None:
    """Leaves status.json as the final record has it, without processes."""
    result, last = run.result() or {}, read_json(run.path / "status.json") or {}
    kept = {key: last[key] for key in ("step", "max_iters", "world_size") if key in last}
    said = {key: result[key] for key in ("step", "message") if key in result}
    RunWriter(run.path, attempt).status(result["status"], pids=[], heartbeats=[], **(kept | said))
