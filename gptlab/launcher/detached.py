"""A run that outlives the process that started it: its caller is a process of its own, which does nothing but wait.

    >>> import gptlab
    >>> handle = gptlab.launch(gptlab.preset("tiny"), detach=True)  # the notebook may be closed now

That process holds the run's supervisor, and lives in a session of its own, so that nothing that ends a notebook's
kernel or a terminal reaches it. `gptlab runs stop NAME` ends the run, `gptlab.Run` reads it. Who started it can also
kill and resize it, by orders over a pipe, as long as it lives itself.

Left out on purpose: all else about a run (`client.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from gptlab.launcher import client
from gptlab.launcher.handle import Handle
from gptlab.recording import Claim, no_link
from gptlab.runs import Run


class Detached:
    """The process that waits, seen from the one that started it."""

    def __init__(self, run: Run, claim: Claim, *, cwd: Path, prepared: bool, worker: str) -> None:
        self._sending = threading.Lock()
        order = {"path": str(run.path), "fd": claim.fileno(), "prepared": prepared, "worker": worker}
        with open(run.path / "detached.log", "ab", opener=no_link) as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gptlab.launcher.detached", json.dumps(order)], cwd=cwd,
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=client.environment(),
                pass_fds=[claim.fileno()], start_new_session=True,
            )  # fmt: skip
        threading.Thread(target=self.process.wait, name="detached run", daemon=True).start()  # no zombie is left

    def is_alive(self) -> bool:
        """Whether it waits still."""
        return self.process.poll() is None

    def send(self, order: dict[str, Any], *fds: int) -> None:
        """One command, one line. Raises BrokenPipeError where the process is gone."""
        assert not fds and self.process.stdin is not None
        with self._sending:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()

    def last_words(self, path: Path) -> str:
        """What it could not say in the run's directory."""
        try:
            return (path / "detached.log").read_text(errors="replace")[-2000:].strip()
        except OSError:
            return ""


def start(run: Run, claim: Claim, *, cwd: Path, prepared: bool, worker: str = client.WORKER) -> Handle:
    """Hands a claimed run over, as `client.start` does, to a process that this one's end does not end."""
    done = [int(folder.name) for folder in run.attempts()]
    caller = Detached(run, claim, cwd=cwd, prepared=prepared, worker=worker)
    claim.release()  # the other process holds it now
    return Handle(run, caller, max(done, default=0) + 1)


def main() -> None:
    """The process that waits."""
    order = json.loads(sys.argv[1])
    run = Run(order["path"])
    claim = Claim.adopt(run.path, order["fd"])
    os.set_inheritable(order["fd"], False)
    handle = client.start(run, claim, cwd=Path.cwd(), prepared=order["prepared"], worker=order["worker"])
    threading.Thread(target=_listen, args=(handle,), daemon=True).start()
    result = handle.wait()
    if result["status"] == "lost":
        print(result["message"], flush=True)


def _listen(handle: Handle) -> None:
    """Passes on what the starter asks for, until that ends."""
    for line in sys.stdin:
        handle.order(json.loads(line))


if __name__ == "__main__":
    main()
