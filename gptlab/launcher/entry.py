"""What a process of a run does first: leash, place, output; then the work.

Runs in a fork of the fork server (workers) or in a fresh interpreter (preparing text). The supervisor imports this too,
so torch is not imported here.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pkgutil
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from gptlab.launcher.watch import STACK_SIGNAL
from gptlab.recording import RunWriter


def work(
    place: dict[str, Any], worker: str, path: Path, attempt: int, rank: int, world_size: int, rendezvous: str,
    gate: Connection | None,
) -> None:  # fmt: skip
    """A rank, from birth to exit.

    Args:
        place: folder, environment and import path of who started the run.
        gate: says when to begin, on the rank that writes status.json: the supervisor has its own line there first.
    """
    writer = RunWriter(path, attempt)
    _settle(place, writer.folder, f"rank-{rank}")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: its name need not resolve
    code: Any = 0
    try:
        if gate is not None:
            gate.recv_bytes()
        run_rank = pkgutil.resolve_name(worker)
        run_rank(path, attempt=attempt, rank=rank, world_size=world_size, rendezvous=rendezvous)
    except SystemExit as leave:
        code = leave.code
    except BaseException as error:  # a KeyboardInterrupt too: someone sent one to this very process
        code = 1
        text = traceback.format_exc()
        print(text, file=sys.stderr)
        with contextlib.suppress(OSError):
            writer.error(rank, None, error, text)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else code is not None)  # torch's own farewell takes a second


def prepare(place: dict[str, Any], folder: Path, data: str, tokenizer: str, task: str, report: Connection) -> None:
    """Prepares a run's text. Reports `(share, words)` as it goes on, then None, or the error as a dictionary."""
    _settle(place, folder, "prepare")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # half-made folders are removed on the way out
    from gptlab import corpus

    try:
        corpus.ensure(data, tokenizer, lambda share, words: report.send((share, words)), task)
        report.send(None)
    except Exception as error:
        report.send({"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()})


def _settle(place: dict[str, Any], folder: Path, name: str) -> None:
    """Takes the leash, the place of who started the run, and files for the output."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_leash, args=(parent.sentinel,), name="leash", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the notebook's cell, not for its runs
    os.environ.clear()
    os.environ.update(place["environ"])
    sys.path[:] = place["sys_path"]
    os.chdir(place["cwd"])
    for fd, stream, suffix in ((1, sys.stdout, "out"), (2, sys.stderr, "err")):
        file = os.open(folder / f"{name}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, fd)
        os.close(file)
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(file=2)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)


def _leash(sentinel: int) -> None:
    """Ends this process when the supervisor has ended."""
    wait([sentinel])
    os._exit(1)
