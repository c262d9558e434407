"""The workers of one attempt: forks them, watches them, ends them all when one is lost."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from gptlab.launcher import ending, entry
from gptlab.launcher.verdict import Failure
from gptlab.launcher.watch import Stuck, Watch
from gptlab.recording import RunWriter
from gptlab.runs import Run, write_json

ECHO_S = 0.05
"""How long the others of a lost worker are given: a death is reported a moment after what it causes."""
LINGER_S = 5.0
"""How long workers may take to leave once the run has its result."""
_forking = threading.Lock()  # multiprocessing's list of children is not made for several threads


class Crew:
    """`world_size` workers on one attempt of a run.

    Args:
        place: folder, environment and import path that they start in.
        wake: a file descriptor that becomes readable when the attempt shall end at once.
    """

    def __init__(self, run: Run, attempt: int, world_size: int, worker: str, place: dict[str, Any], wake: int) -> None:
        self.run, self.attempt, self.world_size = run, attempt, world_size
        self.worker, self.place, self.wake = worker, place, wake
        self.writer = RunWriter(run.path, attempt)
        self.processes: list[ForkServerProcess] = []
        self.watch: Watch | None = None
        self.stuck: Stuck | None = None
        self.codes: dict[int, int] = {}  # exit code by rank, in the order in which they left of their own accord

    def work(self) -> Failure | None:
        """The whole attempt. None where the run has its result or was told to end; no process is left."""
        meeting = tempfile.mkdtemp(prefix="meet-")  # a store of its own: no port to be taken, no earlier attempt's keys
        try:
            self._fork(os.path.join(meeting, "store"))
            asked = self._watch()
        finally:
            self._end()
            shutil.rmtree(meeting, ignore_errors=True)
        return None if asked or self.has_result() or self.has_paused() else self._failure()

    def kill_worker(self, rank: int) -> None:
        """Ends one worker, as a failing machine would."""
        if rank < len(self.processes) and rank not in self.codes:
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(self.processes[rank].pid or 0, signal.SIGKILL)

    def _fork(self, rendezvous: str) -> None:
        context = multiprocessing.get_context("forkserver")
        hold, gate = context.Pipe(duplex=False)
        for rank in range(self.world_size):
            process = context.Process(
                target=entry.work, name=f"rank-{rank}",
                args=(self.place, self.worker, self.run.path, self.attempt, rank, self.world_size, rendezvous,
                      hold if rank == 0 else None),
            )  # fmt: skip
            with _forking:
                process.start()
                self.processes.append(process)
        hold.close()
        pids = [process.pid or 0 for process in self.processes]
        config = self.run.config
        self.watch = Watch(
            self.writer.folder, dict(enumerate(pids)), config.hang_timeout_s, patient=config.compile != "off"
        )
        with gate:
            self.writer.status("starting", pids=pids, world_size=self.world_size)
            gate.send_bytes(b"go")

    def _watch(self) -> bool:
        """Until all workers have left, one is lost or stuck, or the attempt shall end, which is True."""
        assert self.watch is not None
        deadline = None
        while len(self.codes) < self.world_size:
            here = [process.sentinel for rank, process in enumerate(self.processes) if rank not in self.codes]
            left = self.watch.every_s if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait([*here, self.wake], left)
            if self.wake in ready:
                return True
            self._collect()
            if any(self.codes.values()):
                if self._killed_rank() is None and len(self.codes) < self.world_size:
                    time.sleep(ECHO_S)
                    self._collect()
                return False
            if deadline is None and (self.has_result() or self.has_paused()):
                deadline = time.monotonic() + LINGER_S
            if not ready and deadline is not None:
                return False
            if deadline is None:
                alive = set(range(self.world_size)) - set(self.codes)
                self.stuck = self.watch.look(alive)
                if self.stuck is not None:
                    self.watch.keep_stacks(alive)
                    return False
        return False

    def _collect(self) -> None:
        for rank, process in enumerate(self.processes):
            if rank not in self.codes:
                with _forking:
                    code = process.exitcode
                if code is not None:
                    self.codes[rank] = code

    def _killed_rank(self) -> int | None:
        """The first rank that a signal from outside has ended."""
        outside = (rank for rank, code in self.codes.items() if (code < 0 and code != -signal.SIGABRT) or code == 255)
        return next(outside, None)

    def _end(self) -> None:
        """Kills what is left. A worker has nothing to clean up: what it writes is whole or absent."""
        for rank, process in enumerate(self.processes):
            if self.codes.get(rank, 255) == 255:  # 255: the fork server is gone, and the worker may not be
                try:
                    os.kill(process.pid or 0, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        deadline = time.monotonic() + LINGER_S
        for process in self.processes:
            wait([process.sentinel], max(0.0, deadline - time.monotonic()))
            with _forking:
                if process.exitcode is not None:
                    process.close()

    def has_result(self) -> bool:
        """Whether this attempt brought the run to its end."""
        return (self.run.result() or {}).get("attempt") == self.attempt

    def has_paused(self) -> bool:
        """Whether this attempt made way for another number of workers."""
        return (self.writer.folder / "paused.json").exists()

    def _failure(self) -> Failure:
        """What went wrong first, also as the attempt's error.json."""
        left, stream = ending.traces(self.run, self.writer.folder), "err"
        aborted = next((rank for rank, code in self.codes.items() if code == -signal.SIGABRT), None)
        early = next((rank for rank, code in self.codes.items() if code == 0), None)
        killed = self._killed_rank()
        lost = aborted if killed is None else killed
        # Of a rank that went without a word the others say that a connection was closed, or abort. Signals but that one
        # come from outside.
        silent = aborted is not None or early is not None
        if self.stuck is not None:
            rank, what, stream = self.stuck.rank, self.stuck.what, "stack"
            kind = "WorkerStopped" if self.stuck.stopped else "WorkerHung"
        elif left.error is not None and killed is None and not (silent and left.is_echo):
            return left.raised()
        elif lost is not None:
            rank, kind, what = lost, "WorkerKilled", f"was killed by {_signal_name(self.codes[lost])}"
        elif early is not None:
            rank, kind, what = early, "WorkerLeft", "left with exit code 0, though the run is not over,"
        else:
            rank = next(iter(self.codes))
            kind, what = "WorkerLeft", f"left with exit code {self.codes[rank]}"
        failure = Failure(
            rank, left.step, kind, f"rank {rank} {what} {left.after}", left.checkpoint,
            by_signal=kind in ("WorkerStopped", "WorkerKilled"),
            traceback=_tail(self.writer.folder / f"rank-{rank}.{stream}"),
        )  # fmt: skip
        write_json(self.writer.folder / "error.json", {**failure.to_dict(), "time": time.time(), "echo": left.error})
        return failure


def _signal_name(code: int) -> str:
    if code == 255:
        return "an unknown signal (the fork server went too)"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"{name} (by hand, or for want of memory)" if name == "SIGKILL" else name


def _tail(path: Path) -> str:
    """The end of a rank's error stream, where faulthandler leaves the stack of a crash."""
    try:
        return path.read_text(errors="replace")[-4000:]
    except OSError:
        return ""
