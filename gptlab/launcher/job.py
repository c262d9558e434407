"""One run in the supervisor: its text prepared, then attempt after attempt until it has a result."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import socket
import sys
import threading
import traceback
from multiprocessing.connection import wait
from typing import Any

from gptlab.launcher import ending, entry
from gptlab.launcher.crew import Crew
from gptlab.launcher.verdict import Failure, reason_to_end
from gptlab.recording import Claim, RunWriter
from gptlab.runs import Run

LOOK_S = 0.1
"""Seconds between two looks for a `stop`, while no worker is there to look."""


class Job(threading.Thread):
    """A claimed run, on a thread of its own.

    Args:
        attempt: number of the first attempt, which the claim has begun.
        worker: what every rank runs, as `module:function`.
        place: folder, environment and import path that its processes start in.
        prepared: whether the run's text is known to be prepared.
    """

    def __init__(self, claim: Claim, attempt: int, worker: str, place: dict[str, Any], *, prepared: bool) -> None:
        super().__init__(name=claim.path.name, daemon=True)
        self.claim, self.attempt, self.worker, self.place, self.prepared = claim, attempt, worker, place, prepared
        self.record = Run(claim.path)
        self._killed = threading.Event()
        self._wake, self._bell = socket.socketpair()
        self._changing = threading.Lock()  # of the world's size, and of who works
        self._world_size = self.record.config.nproc
        self._crew: Crew | None = None

    def kill(self) -> None:
        """Ends the run's processes now; the run is then stopped."""
        self._killed.set()
        with contextlib.suppress(OSError):  # it is over already
            self._bell.send(b"!")

    def scale(self, world_size: int) -> None:
        """Has so many workers go on from the next step, or where there are none yet, begin."""
        with self._changing:
            self._world_size = world_size
            if self._crew is not None and self._crew.world_size != world_size:
                with contextlib.suppress(OSError):  # a directory that is gone ends the run by itself
                    self._crew.writer.request_pause()

    def kill_worker(self, rank: int) -> None:
        """Ends one worker of the present attempt."""
        with self._changing:
            if self._crew is not None:
                self._crew.kill_worker(rank)

    def run(self) -> None:
        """Until the run is over. Whatever goes wrong here ends the run as failed, with its reason."""
        try:
            if self.prepared or self._prepare():
                self._attempts()
        except Exception as error:
            failure = Failure(None, None, type(error).__name__, str(error), traceback=traceback.format_exc())
            try:
                ending.fail(self.record, self.attempt, failure, "in the supervisor")
            except OSError as last:  # the directory was deleted, or became read-only
                say_last_words(str(self.record.path), last)
        finally:
            self.claim.release()
            self._wake.close()
            self._bell.close()

    def _attempts(self) -> None:
        failures: list[Failure] = []
        while not self._asked_to_end():
            crew = self._next_crew()
            failure = crew.work()
            with self._changing:
                self._crew = None
            if crew.has_result():
                return ending.mirror(self.record, self.attempt)
            if failure is None:
                if crew.has_paused():
                    self._writer().status("restarting", pids=[], world_size=self._world_size, message="another world")
                    self.attempt = self.claim.new_attempt(keep_stop=True)
                continue  # else it was killed
            failures.append(failure)
            reason = reason_to_end(failures)
            if reason is not None:
                return ending.fail(self.record, self.attempt, failure, reason)
            self._writer().status("restarting", pids=[], world_size=self._world_size, message=failure.message)
            self.attempt = self.claim.new_attempt(keep_stop=True)
        words = "killed on request" if self._killed.is_set() else "stopped between two attempts"
        ending.end(self.record, self.attempt, "stopped", message=words)

    def _next_crew(self) -> Crew:
        """Of as many workers as are wanted now; run.json says how many, so that a resumed run has as many."""
        with self._changing:
            config = self.record.config
            if self._world_size != config.nproc:
                config = config.replace(nproc=self._world_size)
                self._writer().update_info(config=config.to_dict())
            self._crew = Crew(self.record, self.attempt, self._world_size, self.worker, self.place, self._wake.fileno())
            return self._crew

    def _prepare(self) -> bool:
        """Prepares the text in a process of its own, which may take minutes. Whether the run can go on."""
        config, writer = self.record.config, self._writer()
        context = multiprocessing.get_context("spawn")
        reports, report = context.Pipe(duplex=False)
        process = context.Process(
            target=entry.prepare, args=(self.place, writer.folder, config.data, config.tokenizer, config.task, report)
        )
        process.start()
        report.close()
        news: Any = (0.0, "")
        try:
            while isinstance(news, tuple):
                writer.status("preparing", pids=[process.pid], progress=news[0], message=news[1])
                while not reports.poll():
                    if self._asked_to_end():
                        words = "ended while its text was being prepared"
                        ending.end(self.record, self.attempt, "stopped", message=words)
                        return False
                    wait([reports, self._wake], LOOK_S)
                try:
                    while reports.poll() and isinstance(news, tuple):  # of many reports in a row, the last
                        news = reports.recv()
                except EOFError:
                    news = {"type": "WorkerKilled", "message": "the process that prepared the text was killed"}
        finally:
            process.terminate()
            process.join(1)
            process.kill()
            process.join()
            process.close()
            reports.close()
        if news is not None:
            ending.fail(self.record, self.attempt, Failure(None, None, **news), "while its text was being prepared")
        return news is None

    def _asked_to_end(self) -> bool:
        return self._killed.is_set() or (self.record.path / "stop").exists()

    def _writer(self) -> RunWriter:
        return RunWriter(self.record.path, self.attempt)


def say_last_words(path: str, error: Exception) -> None:
    """Says in the supervisor's own log why it left a run whose directory could not take it: its client reads it."""
    print(json.dumps({"run": path, "words": str(error)}), file=sys.stderr, flush=True)
