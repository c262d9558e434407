"""Which CPU this is and what it can do, as the system says it once.

    >>> from gptlab.cpu import cpu_flags
    >>> "avx512f" in cpu_flags()

Left out on purpose: how many cores there are, and what else the machine offers (`hardware.py`).
"""

from __future__ import annotations

import functools
import platform
import re
import subprocess
import sys
from pathlib import Path


@functools.cache
def cpu_name() -> str:
    """The CPU's model, as the system names it."""
    if found := re.search(r"^model name\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE):
        return found[1].strip()
    if sys.platform == "darwin":
        return output_of(["sysctl", "-n", "machdep.cpu.brand_string"]) or platform.machine()
    return platform.processor() or platform.machine() or "unknown CPU"


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The instruction sets of the CPU, as Linux names them; none where the system is another."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return ""


def output_of(command: list[str]) -> str:
    """What a command prints, or nothing where it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
