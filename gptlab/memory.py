"""The most memory that this process has held: on a GPU by the allocator, on a CPU by the system.

    >>> from gptlab.memory import peak_bytes, reset_peak
    >>> reset_peak("cpu"); peak_bytes("cpu") > 0
    True

On Linux that is VmHWM, which can be set back to what is resident now, so that what came before (measuring the machine,
an earlier run) does not count. Elsewhere the system's own maximum serves, which only grows.

Left out on purpose: what a config is predicted to hold (`costs.py`).
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def reset_peak(device: str) -> None:
    """Lets the peak begin anew at what is held now, where the system can (Linux, CUDA)."""
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")  # proc(5): resets the peak resident set size


def peak_bytes(device: str) -> int:
    """The most bytes held since the last `reset_peak`."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    with contextlib.suppress(OSError, StopIteration):
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024  # VmHWM:   123456 kB
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others kB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
