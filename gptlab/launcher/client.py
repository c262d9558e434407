"""The caller's end of the supervisor: starts it once, hands runs over, notices its death.

A run is handed over together with the lock on its directory (the open file travels over the socket), so that the lock
is held from `launch` to the run's last moment: nobody else can begin it in between, and who finds it free knows that
the run is over. The socket is also the leash: the supervisor ends when this end of it is closed, which the system sees
to.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path
from typing import Any

import gptlab
from gptlab.launcher.handle import Handle
from gptlab.recording import Claim, RunWriter
from gptlab.runs import Run

WORKER = "gptlab.worker:run_rank"
"""What every rank runs."""
SOCKETS = 60
"""Longest name of a folder, in bytes, below which processes can meet: a Unix socket's path has at most 107, and the
fork server's lies two names deeper."""
_starting = threading.Lock()


def supervisor() -> Client:
    """This process's supervisor, started where there is none (any more)."""
    with _starting:
        client = _of_process(os.getpid())
        if not client.is_alive():
            client.close()
            _of_process.cache_clear()
            client = _of_process(os.getpid())
        return client


def start(run: Run, claim: Claim, *, cwd: Path, prepared: bool, worker: str = WORKER) -> Handle:
    """Hands a claimed run over. It starts in the environment and import path that this process has now.

    Args:
        cwd: the folder that relative paths in its config start from.
        prepared: whether its text is known to be prepared.
        worker: what every rank runs, as `module:function`.
    """
    attempt = claim.new_attempt()
    RunWriter(run.path, attempt).status("starting" if prepared else "preparing", pids=[])
    order = {
        "do": "start", "path": str(run.path), "attempt": attempt, "prepared": prepared, "worker": worker,
        "place": {"cwd": str(cwd), "environ": dict(os.environ), "sys_path": sys.path},
    }  # fmt: skip
    client = supervisor()
    try:
        client.send(order, claim.fileno())
    except OSError:  # it died this very moment
        client.process.wait()
        client = supervisor()
        client.send(order, claim.fileno())
    claim.release()  # the other end holds it now
    return Handle(run, client, attempt)


@functools.cache
def _of_process(pid: int) -> Client:
    """By process id: a fork of this process must not speak on its parent's socket."""
    return Client()


def _folder() -> Path:
    """A new one for temporary files; where TMPDIR is too long a name for sockets, in /tmp."""
    usual = tempfile.gettempdir()
    fits = len(os.fsencode(usual)) <= SOCKETS
    return Path(tempfile.mkdtemp(prefix="gptlab-", dir=usual if fits else "/tmp"))  # noqa: S108 - mkdtemp's own name


class Client:
    """A supervisor process, seen from the one that started it."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._sending = threading.Lock()
        self.folder = _folder()  # the supervisor's temporary files, and its own log
        self._socket, theirs = socket.socketpair()
        with theirs, open(self.folder / "supervisor.log", "wb") as log:
            self.process = subprocess.Popen(
                # -P: no file of the working folder may stand in for a module of the standard library.
                [sys.executable, "-P", "-m", "gptlab.launcher.supervisor", str(self.folder)],
                stdin=theirs.fileno(), stdout=log, stderr=subprocess.STDOUT, env=environment(),
                start_new_session=True,  # Jupyter interrupts the kernel's whole process group
            )  # fmt: skip
        self._last_words = ""
        self._watch = threading.Thread(target=self._see_off, name="gptlab supervisor", daemon=True)
        self._watch.start()
        atexit.register(self.close)

    def is_alive(self) -> bool:
        """Whether the supervisor lives."""
        return self.process.poll() is None

    def _see_off(self) -> None:
        """Waits for the supervisor's end, however it comes, so that neither a zombie nor a file of it is left."""
        self.process.wait()
        with contextlib.suppress(OSError):
            self._last_words = (self.folder / "supervisor.log").read_text(errors="replace")[-2000:].strip()
        shutil.rmtree(self.folder, ignore_errors=True)

    def send(self, order: dict[str, Any], *fds: int) -> None:
        """One command, one line. Raises BrokenPipeError where the supervisor is gone."""
        data = json.dumps(order).encode() + b"\n"
        with self._sending:
            sent = socket.send_fds(self._socket, [data], list(fds))
            self._socket.sendall(data[sent:])

    def close(self) -> None:
        """Lets go of the supervisor, which ends all of its workers, and waits for that."""
        if os.getpid() != self._owner:
            return  # a fork leaves its parent's supervisor alone
        atexit.unregister(self.close)
        self._socket.close()
        self._watch.join(5)
        if self._watch.is_alive():
            self.process.kill()  # its workers see that
            self._watch.join()

    def last_words(self, path: Path) -> str:
        """What the supervisor could not write into a run's directory; after its own death, the end of its own log.

        Either is empty unless something went wrong.
        """
        if not self.is_alive():
            self._watch.join(1)
            return self._last_words
        with contextlib.suppress(OSError):
            for line in reversed((self.folder / "supervisor.log").read_text(errors="replace").splitlines()):
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    said = json.loads(line)
                    if said["run"] == str(path):
                        return str(said["words"])
        return ""


def environment() -> dict[str, str]:
    """This process's, from which gptlab can be imported in any folder."""
    home = str(Path(gptlab.__file__).parent.parent)
    path = os.environ.get("PYTHONPATH", "")
    if home not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):  # a clone, not an installed package
        path = os.pathsep.join(part for part in (home, path) if part)
    return {**os.environ, "PYTHONPATH": path}
