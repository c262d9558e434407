"""A peak is what was held since it was reset, also after it was given back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gptlab import memory

CODE = """
from gptlab.memory import peak_bytes, reset_peak
block = bytearray(b"x") * 300_000_000
del block
reset_peak("cpu")
low = peak_bytes("cpu")
block = bytearray(b"x") * 100_000_000
del block
print(peak_bytes("cpu") - low)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can reset the peak of resident memory")
def test_the_peak_counts_from_its_reset() -> None:
    """In a process of its own: the system may take idle pages from one that has many, in the middle of it."""
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=60)
    assert 95_000_000 < int(found.stdout) < 130_000_000


def test_elsewhere_the_system_s_own_maximum_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_STATUS", "_CLEAR"):
        monkeypatch.setattr(memory, name, tmp_path / "none" / name)  # there is no /proc
    memory.reset_peak("cpu")
    assert memory.peak_bytes("cpu") > 1_000_000
    kilobytes = memory.peak_bytes("cpu")
    monkeypatch.setattr("sys.platform", "darwin")
    assert memory.peak_bytes("cpu") * 1024 >= kilobytes, "macOS counts bytes"
