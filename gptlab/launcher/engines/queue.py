"""What SLURM's queue says of a job, and what is asked of it: sbatch, squeue, scancel, scontrol.

    >>> from gptlab.launcher.engines import queue
    >>> queue.state("1234")    # PENDING, RUNNING, ... or an empty text where SLURM has forgotten it

Each is SLURM's own command with its words in a list: no shell sees them.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from gptlab.config import ConfigError

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


def _ask(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run([program, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except FileNotFoundError:
        raise ConfigError(
            f"There is no {program} on this machine: start SLURM's runs where its commands are."
        ) from None
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess([program], 1, "", f"no answer within {PATIENCE_S:g} s")
