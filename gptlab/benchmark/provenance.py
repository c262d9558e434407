"""Where a row comes from: versions, machine, code, and how quiet it was meanwhile.

    >>> from gptlab.benchmark.provenance import Quiet
    >>> quiet = Quiet()
    >>> sorted(quiet.columns())
    ['load_after', 'load_before', 'others_cores']

Left out on purpose: what was measured.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

OTHERS = 0.15
"""Cores' worth of other processes' work above which a row is noisy,"""
SPREAD = 0.15
"""or the distance of the quartiles of the opponent's times, over their median."""


@functools.cache
def of_code() -> dict[str, Any]:
    """Versions and the state of gptlab's own repository, where it is one."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, Any] = {"python": platform.python_version(), "host": platform.node()}
    for name in ("gptlab", "torch", "numpy", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found[f"{name}_version"] = version(name)
    home = Path(__file__).parents[2]
    if (home / ".git").exists():
        commit, changed = (_git(home, *words) for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "-uno")))
        found |= {"git_commit": commit, "git_dirty": None if changed is None else bool(changed)}
    return found


def _git(home: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(home), *words], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


class Quiet:
    """How much others did on this machine's CPU, from here on.

    Args:
        processes: of the cell; all of them do as much as this one.
    """

    def __init__(self, processes: int = 1) -> None:
        self.processes, self.load = processes, os.getloadavg()[0]
        self.began, self.all, self.own = time.monotonic(), _busy(), self._own()

    @staticmethod
    def _own() -> float:
        times = os.times()
        return times.user + times.system

    def columns(self) -> dict[str, Any]:
        """Load before and after, and the cores that others kept busy meanwhile (Linux)."""
        found: dict[str, Any] = {"load_before": self.load, "load_after": os.getloadavg()[0]}
        elapsed, busy = time.monotonic() - self.began, _busy()
        if busy is not None and self.all is not None and elapsed > 0:
            others = busy - self.all - (self._own() - self.own) * self.processes
            found["others_cores"] = max(0.0, others / elapsed)
        else:
            found["others_cores"] = None
        return found


def _busy() -> float | None:
    """Seconds that all cores together have been busy since the start; None where the system does not say."""
    try:
        line = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, *_ = (int(value) for value in line.split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def noise(row: dict[str, Any]) -> str:
    """What made a row noisy, in words; empty where nothing did."""
    found = []
    if (row.get("others_cores") or 0.0) > OTHERS:
        found.append(f"other processes kept {row['others_cores']:.1f} cores busy")
    if (row.get("spread") or 0.0) > SPREAD:
        found.append(f"the opponent's turns scatter by {row['spread']:.0%}")
    return " and ".join(found)
