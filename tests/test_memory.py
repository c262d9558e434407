"""A peak is what was held since it was reset, also after it was given back."""

from __future__ import annotations

import sys

import pytest

from gptlab.memory import peak_bytes, reset_peak


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can reset the peak of resident memory")
def test_the_peak_counts_from_its_reset() -> None:
    block = bytearray(b"x") * 300_000_000
    del block
    reset_peak("cpu")
    low = peak_bytes("cpu")
    block = bytearray(b"x") * 100_000_000
    del block
    assert 95_000_000 < peak_bytes("cpu") - low < 130_000_000
