"""What SLURM's queue says of a job, and what is asked of it: sbatch, squeue, scancel, scontrol.

    >>> from gptlab.launcher.engines import queue
    >>> queue.state("1234")    # PENDING, RUNNING, ... or an empty text where SLURM has forgotten it

Each is SLURM's own command with its words in a list: no shell sees them. A run that waits is `queued`, with its job's
number in job.json, until its job begins or is taken out.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from gptlab.config import ConfigError
from gptlab.runs import PLANNED, QUEUED, Run, read_json, write_json

OVER = frozenset(
    (
        "",
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    )
)
"""States of a job from which nothing more comes (squeue's manual, "JOB STATE CODES")."""
STATUS, JOB = "status.json", "job.json"
"""In the run directory: its state, and the number of the job that was submitted last."""
PATIENCE_S = 60.0
"""How long SLURM's controller may take to answer."""


def submit(script: Path, *options: str) -> str:
    """Hands a script to sbatch. Returns the job's number.

    Raises:
        ConfigError: there is no sbatch, or it refuses.
    """
    done = _ask("sbatch", "--parsable", *options, str(script))
    if done.returncode:
        raise ConfigError(f"sbatch refused {script}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


def state(job: str) -> str:
    """The job's state in one word; empty where the queue does not know it (any more)."""
    done = _ask("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}")
    if done.returncode and "Invalid job id" not in done.stderr:
        return "UNKNOWN"  # the controller does not answer: no sign that the job has ended
    states = [word for word in done.stdout.split() if word not in OVER] or done.stdout.split()
    return states[0] if states else ""


def is_alive(job: str) -> bool:
    """Whether the job waits or is at work."""
    return state(job) not in OVER


def cancel(job: str, *options: str) -> None:
    """Takes a job from the queue, or ends it; of an array those that scancel's options choose."""
    _ask("scancel", *options, job)


def requeue(job: str) -> bool:
    """Puts a running job back into the queue; whether SLURM did."""
    return _ask("scontrol", "requeue", job).returncode == 0


def submit_runs(runs: Sequence[Run], script: Path, *, array: bool) -> str:
    """Hands a script to sbatch that trains runs: they are queued from now on, and a stop that was asked for before is
    forgotten. Returns the job's number.

    Args:
        array: whether each run is a job of an array, in this order.

    Raises:
        ConfigError: as for `submit`; the runs are as they were.
    """
    before = {run.path: read_json(run.path / STATUS) for run in runs}
    for run in runs:  # before the job can begin, which then says more
        status = before[run.path] or {}
        kept = {name: status[name] for name in ("attempt", "step", "max_iters") if name in status}
        write_json(run.path / STATUS, {**kept, "state": QUEUED, "updated": time.time(), "pids": []})
        (run.path / "stop").unlink(missing_ok=True)
    try:
        job = submit(script)
    except ConfigError:
        for path, was in before.items():
            write_json(path / STATUS, was or {"state": PLANNED})
        raise
    for number, run in enumerate(runs):
        write_json(run.path / JOB, {"job": f"{job}_{number}" if array else job})
    return job


def job_of(run: Run) -> str:
    """The job that a run waits for: the one that went back into the queue, or else the one that was submitted."""
    return str(run.status().get("job") or (read_json(run.path / JOB) or {}).get("job", ""))


def withdraw(run: Run) -> None:
    """Takes a queued run's job from the queue."""
    if job := job_of(run):
        cancel(job)
    leave(run, "taken from SLURM's queue")


def leave(run: Run, message: str) -> None:
    """A run that is still queued, and whose job is gone, is stopped."""
    status = read_json(run.path / STATUS) or {}
    if status.get("state") == QUEUED:
        write_json(run.path / STATUS, status | {"state": "stopped", "updated": time.time(), "message": message})


def check_not_queued(run: Run) -> None:
    """Refuses to start a run for which SLURM has a job.

    Raises:
        ConfigError: with the job.
    """
    if run.state == QUEUED:
        raise ConfigError(
            f"The run {run.name!r} waits in SLURM's queue, as job {job_of(run)}: wait for it, or take it "
            f"out with `gptlab runs stop {shlex.quote(run.name)}`."
        )


def _ask(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run([program, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except FileNotFoundError:
        raise ConfigError(
            f"There is no {program} on this machine: start SLURM's runs where its commands are."
        ) from None
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess([program], 1, "", f"no answer within {PATIENCE_S:g} s")
