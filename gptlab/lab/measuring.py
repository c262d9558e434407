"""Measuring once how fast this machine is, beside the kernel, so that times can be predicted before the first run.

    >>> meter = Meter(); meter.begin(cells)    # True while a measurement is on its way

It is `gptlab cost --measure` in a process of its own, for the kernel imports no torch; what it finds lies in the user's
cache. Left out on purpose: what is measured (`peaks.py`).
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import gptlab
from gptlab.grid import SHAPE, Cell

WARM_S = 4.0
"""Seconds that the launcher's own start is waited for: beside it the measurement would find a busy machine."""

MOST = 30
"""Cells that are looked at: a grid seldom has several kinds of them."""


class Meter:
    """At most one measurement at a time, and one for each kind of config. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: set[str] = set()
        self._next: list[str] = []

    @property
    def is_busy(self) -> bool:
        """Whether something is being measured, or will be."""
        return self._process is not None or bool(self._next)

    def begin(self, cells: Sequence[Cell]) -> bool:
        """Measures for the first of these cells whose speed is unknown here; whether something is being measured. One
        that waits already goes first: when it `has_news`, ask again."""
        from gptlab import costs, kernels

        with self._lock:
            if self._next:
                return True
            for cell in cells[:MOST]:
                if cell.config is None:
                    continue
                found = costs.cost(cell.config)
                native = kernels.serves(cell.config, found["device"], found["dtype"])
                key = f"{found['device']} {found['dtype']} {native}"
                if key not in self._asked and found["fits"] and found["predicted_s"] is None:
                    self._asked.add(key)
                    shape = {name: getattr(cell.config, name) for name in (*SHAPE, "kernels", "compile")}
                    wanted = shape | {"device": found["device"], "dtype": found["dtype"]}
                    self._next = [part for name, value in wanted.items() for part in (_flag(name), str(value))]
                    return True
            return self.is_busy

    def has_news(self) -> bool:
        """Whether a measurement has ended since the last time; starts the next one."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._process = None
                return True
            if self._next and self._process is None and time.monotonic() - self._made > WARM_S:
                command = [sys.executable, "-m", "gptlab.cli", "cost", "--measure", "--json", *self._next]
                self._next = []
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    start_new_session=True, cwd=Path(gptlab.__file__).parents[1],
                )  # fmt: skip
            return False

    def stop(self) -> None:
        """Leaves it to the first run, which measures by itself."""
        with self._lock:
            self._next = []
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None


def _flag(field: str) -> str:
    """A field's flag on the command line."""
    return f"--{field.replace('_', '-')}"
