"""Ends of attempts that no supervisor of ours watches: was it the last one, and who writes the final record?

torchrun and DLRover replace workers until a count is used up, whatever the cause, and leave no record of why they gave
up. So a worker that they start again looks at what its predecessors left, and the process that waits for the agent
writes the final record where no worker could.

    if (reason := hopeless(run, restarts)): ...

Left out on purpose: the rules themselves (`verdict.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gptlab.launcher.verdict import ECHO, Failure, reason_to_end
from gptlab.recording import RunWriter
from gptlab.runs import Run, read_json


def failure_of(run: Run, folder: Path, *, otherwise: str = "a worker was lost") -> Failure:
    """Why an attempt ended early: its first error, or, where that is only the echo of a lost process, that loss."""
    number = int(folder.name)
    steps = [row["step"] for row in run.metrics() if row["attempt"] == number]
    step = steps[-1] if steps else None
    checkpoints = run.checkpoints()
    newest = checkpoints[-1].name if checkpoints else None
    error = read_json(folder / "error.json")
    if error is not None and not ECHO.search(error["message"]):
        at = step if error["step"] is None else error["step"]
        return Failure(
            error["rank"], at, error["type"], error["message"], newest, by_signal=error["type"] == "WorkerStopped",
            traceback=error["traceback"],
        )  # fmt: skip
    after = "before its first step" if step is None else f"after step {step}"
    return Failure(None, step, "WorkerKilled", f"{otherwise} {after}", newest, by_signal=True)


def hopeless(run: Run, restarts: int) -> tuple[Failure, str] | None:
    """The last failure and why no further attempt should follow those that an agent has made; None where one should."""
    failures = [failure_of(run, folder) for folder in run.attempts()[-restarts:]] if restarts else []
    reason = reason_to_end(failures) if failures else None
    return (failures[-1], reason) if reason else None


def fail(run: Run, failure: Failure, reason: str) -> None:
    """The final record of a run that ends with this failure, where no worker could write it."""
    attempts = run.attempts()
    where = f" on rank {failure.rank}" if failure.rank is not None else ""
    what = failure.message if failure.type.startswith("Worker") else f"{failure.type}{where}: {failure.message}"
    end(run, int(attempts[-1].name) if attempts else 0, "failed", message=f"{what} ({reason})", error=failure.to_dict())


def end(run: Run, attempt: int, status: str, **more: Any) -> None:
    """A final record, and status.json as it says."""
    rows = run.metrics()
    writer = RunWriter(run.path, attempt)
    writer.result(status, step=rows[-1]["step"] if rows else 0, **more)
    last = read_json(run.path / "status.json") or {}
    kept = {key: last[key] for key in ("step", "max_iters", "world_size") if key in last}
    said = {key: more[key] for key in ("message",) if key in more}
    writer.status(status, pids=[], heartbeats=[], **(kept | said))
