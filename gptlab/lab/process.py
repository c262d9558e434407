"""A process of the lab's own that answers in lines of JSON: what the kernel must not do itself, it asks of one.

Drawing belongs outside the kernel because matplotlib is not safe beside a user's own figures, and sampling because it
needs torch. Both are started once, kept warm, and end when their standard input does, so no way in which a kernel can
die leaves one behind.

    >>> process = Process("gptlab.lab.drawing"); process.send({"runs_dir": "runs"})
    >>> process.receive(timeout=5.0)

Left out on purpose: what the processes do (`drawing.py`, `sampler.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from gptlab.config import ConfigError

ENDING_S = 2.0
"""Seconds that a process has to end when it is told to."""


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The process's side: a line for each request until standard input ends; one that fails is answered `error`."""
    for line in sys.stdin:
        try:
            found = answer(json.loads(line))
        except ConfigError as error:
            found = {"error": str(error)}
        except Exception as error:  # a directory that vanished or was written by hand: said, not fatal
            found = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


class Process:
    """The kernel's side: starts a module as a process, sends it objects, takes objects without ever waiting long.

    Used by one thread.
    """

    def __init__(self, module: str) -> None:
        self.module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = bytearray()

    @property
    def pid(self) -> int | None:
        """The process's id, once there is one."""
        return self._process.pid if self._process else None

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts the process where none runs, so that it is warm before the first request."""
        if self.is_alive:
            return
        self.close()
        # A session of its own: a notebook's interrupt goes to the kernel's whole group.
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.module], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def send(self, request: dict[str, Any]) -> bool:
        """Sends an object; whether it left. A process that had died is replaced at the next one."""
        self.start()
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self.close()
            return False
        return True

    def receive(self, timeout: float = 0.0) -> dict[str, Any] | None:
        """The next object, or None if none is complete within `timeout` seconds. A dead process is closed."""
        if self._process is None or self._process.stdout is None:
            return None
        deadline = time.monotonic() + timeout
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            part = os.read(descriptor, 1 << 20)
            if not part:
                self.close()
                return None
            self._buffer += part
        line, _, rest = self._buffer.partition(b"\n")
        self._buffer = bytearray(rest)
        return dict(json.loads(line))

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # a request that a dead process never read
                        pipe.close()
        self._process, self._buffer = None, bytearray()
