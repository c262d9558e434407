"""The process between a notebook and its workers: takes commands, runs a Job for each run, leaves nothing behind.

Started by `client.py` as `python -m gptlab.launcher.supervisor FOLDER`. Standard input is a socket: commands come in as
JSON lines, each `start` with the open file that locks its run; its end is the order to leave. It imports no torch: that
is the fork server's part, which also keeps this process quick to start and small.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from gptlab.launcher.job import Job, say_last_words
from gptlab.recording import Claim


def main() -> None:
    """Serves until the socket ends, the parent dies, or SIGTERM comes."""
    folder = Path(sys.argv[1])
    tempfile.tempdir = str(folder)  # of this process alone: what a kill leaves lies where the parent removes it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    multiprocessing.get_context("forkserver").set_forkserver_preload(["gptlab.launcher.preload"])
    forkserver.ensure_running()  # imports while the first command is on its way
    jobs: dict[str, Job] = {}
    try:
        for order, fds in _orders(socket.socket(fileno=0)):
            path = order["path"]
            if order["do"] == "start":
                jobs = {name: job for name, job in jobs.items() if job.is_alive()}
                if (job := _begin(order, fds.pop(0))) is not None:
                    jobs[path] = job
            elif path not in jobs:
                continue  # it is over
            elif order["do"] == "kill":
                jobs[path].kill()
            elif order["do"] == "kill worker":
                jobs[path].kill_worker(order["rank"])
            elif order["do"] == "scale":
                jobs[path].scale(order["world_size"])
    except Exception:
        traceback.print_exc()  # the client's end reads it, and removes the folder that it lies in
        _end_all_processes()
        os._exit(1)
    finally:
        _end_all_processes()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)  # the jobs' threads have nothing left to do


def _begin(order: dict[str, Any], fd: int) -> Job | None:
    """Begins a run. Of one that cannot begin the client's end hears why, and the others go on."""
    claim = None
    try:
        claim = Claim.adopt(Path(order["path"]), fd)
        job = Job(claim, order["attempt"], order["worker"], order["place"], prepared=order["prepared"])
        job.start()
    except Exception as error:
        say_last_words(order["path"], error)
        if claim is not None:
            claim.release()
        return None
    return job


def _orders(commands: socket.socket) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Commands as they come, with the open files that have come so far and were not taken."""
    parent, data, fds = os.getppid(), b"", []
    while os.getppid() == parent:  # a fork of the parent may keep the socket open
        if not select.select([commands], [], [], 0.5)[0]:
            continue
        more, new_fds, _, _ = socket.recv_fds(commands, 1 << 16, 16)
        if not more:
            return
        fds += new_fds
        *lines, data = (data + more).split(b"\n")
        for line in lines:
            yield json.loads(line), fds


def _end_all_processes() -> None:
    """Kills fork server, workers, and what these started. The resource tracker ends by itself, having cleaned up."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if not any("resource_tracker" in word for word in process.cmdline()):
                process.kill()


if __name__ == "__main__":
    main()
