"""What runs inside a SLURM job: srun, attempt after attempt, until the run is over or the time nearly is.

    exec python -m gptlab.launcher.engines.batch RUN    (the last line of the script that `slurm.py` writes)

It is to the job what the supervisor is to one machine: it holds the run's lock, starts the ranks with one srun an
attempt, starts them again where one was lost, and writes the final record where they could not. USR1, which SLURM
sends before the time limit, asks the ranks to save and stop; then the job goes back into the queue. TERM (scancel,
preemption, `scontrol requeue`) does the same but for the queue, which is SLURM's affair then.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from gptlab.config import ConfigError
from gptlab.joining import ATTEMPT
from gptlab.launcher import ending
from gptlab.launcher.engines import queue, settings
from gptlab.launcher.verdict import Failure, reason_to_end
from gptlab.recording import Claim, RunWriter
from gptlab.runs import QUEUED, Run

_LOST = re.compile(r"tasks? ([\d,-]+): (.*)")
"""What srun says of tasks that it has lost, as in `srun: error: n1: task 1: Killed`."""

OURS = "SLURM ends the job"
"""In the file `stop`, where no person has asked for it."""


class Batch:
    """A run's part in one job."""

    def __init__(self, run: Run, job: str) -> None:
        self.run, self.job = run, job
        self._stop = run.path / "stop"
        self.claim = Claim(run.path, wait_s=60.0)  # the one that SLURM has just ended may take a moment
        self.again = False  # the time is nearly up
        self.told = False  # SLURM ends the job
        self.lost = ""  # what srun said of the first tasks that it lost
        signal.signal(signal.SIGUSR1, self._hear_limit)
        signal.signal(signal.SIGTERM, self._hear_end)

    def _hear_limit(self, number: int, frame: object) -> None:
        self.again = not self._stop.exists()  # a stop that someone asked for stays one
        self._ask_to_stop()

    def _hear_end(self, number: int, frame: object) -> None:
        self.told = True
        self._ask_to_stop()

    def _ask_to_stop(self) -> None:
        """A stop for this job alone: the next one takes it away."""
        if not self._stop.exists():
            self._stop.write_text(OURS)

    def work(self, *, queued: bool) -> int:
        """The job's whole work; returns its exit code.

        Args:
            queued: whether a stop that lies there was asked for while this job waited for its turn.
        """
        with self.claim:
            failures: list[Failure] = []
            keep_stop = queued and not (self._stop.exists() and self._stop.read_text() == OURS)
            while True:
                attempt = self.claim.new_attempt(keep_stop=keep_stop)
                keep_stop = True
                RunWriter(self.run.path, attempt).status("starting", pids=[], job=self.job)
                if self._stop.exists():
                    ending.end(self.run, attempt, "stopped", message="stopped before its first step")
                    break
                code = self._start_ranks(attempt)
                result = self.run.result() or {}
                if result.get("attempt") == attempt:
                    break
                failure = self._failure(attempt, code)
                failures.append(failure)
                if self.told or self.again:
                    ending.end(self.run, attempt, "stopped", message=failure.message)
                    break
                if reason := reason_to_end(failures):
                    ending.fail(self.run, attempt, failure, reason)
                    break
                RunWriter(self.run.path, attempt).status("restarting", pids=[], job=self.job, message=failure.message)
            if self.again and (self.run.result() or {}).get("status") == "stopped":
                self._go_back()
        return int((self.run.result() or {}).get("status") == "failed")

    def _start_ranks(self, attempt: int) -> int:
        """One srun over all ranks; its exit code."""
        folder = str(self.run.path / "attempts" / f"{attempt:02d}").replace("%", "%%")
        environ = {ATTEMPT: str(attempt), "MASTER_PORT": str(_free_port())}
        command = [
            "srun", "--kill-on-bad-exit=1", f"--cpus-per-task={os.environ.get('SLURM_CPUS_PER_TASK', '1')}",
            f"--output={folder}/rank-%t.out", f"--error={folder}/rank-%t.err",
            *settings.worker_command(self.run),
        ]  # fmt: skip
        self.lost = ""
        process = subprocess.Popen(command, env={**os.environ, **environ}, stderr=subprocess.PIPE, text=True)
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        code = process.wait()
        reader.join(5)
        return code

    def _read(self, process: subprocess.Popen[str]) -> None:
        """Keeps what srun says of lost tasks, and hands all of it on."""
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            if not self.lost and (found := _LOST.search(line)):
                self.lost = f"rank {found[1]}: {found[2]}"

    def _failure(self, attempt: int, code: int) -> Failure:
        what = self.lost or f"srun ended with exit code {code}"
        folder = self.run.path / "attempts" / f"{attempt:02d}"
        failure = ending.failure_of(self.run, folder, otherwise=what)
        if failure.type == "WorkerKilled" and "exit code" in what:  # no signal: it may well come again
            return Failure(None, failure.step, "WorkerLeft", failure.message, failure.checkpoint)
        return failure

    def _go_back(self) -> None:
        """Puts the job back into the queue, to go on from the checkpoint that was just written."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # SLURM's way of taking the job back
        self._stop.unlink(missing_ok=True)
        generation = int(self.run.attempts()[-1].name)
        rows = self.run.metrics()
        RunWriter(self.run.path, generation).status(
            "queued", step=rows[-1]["step"] if rows else 0, max_iters=self.run.config.max_iters, pids=[], job=self.job
        )
        if not queue.requeue(self.job):
            print("SLURM did not take the job back: submit it again", file=sys.stderr)
            RunWriter(self.run.path, generation).status("stopped", pids=[], message="its time was up")


def _free_port() -> int:
    """A port that is free now on this node, where srun starts rank 0."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def main(argv: list[str]) -> int:
    """The job of the run directory that is named."""
    job = os.environ.get("SLURM_JOB_ID", "")
    try:
        batch = Batch(Run(Path(argv[0])), job)
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    return batch.work(queued=requeued or batch.run.state == QUEUED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
