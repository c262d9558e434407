"""What stands in the files of a run directory, and what each entry must be for its readers.

    >>> from pathlib import Path
    >>> from gptlab.records import read_record
    >>> read_record(Path("runs/first/status.json"))    # doctest: +SKIP

A run directory comes from elsewhere: another version wrote it, a disk that was full, or a hand. An entry that is not
what its readers take it for is left out, as if it had never been written, so that one spoilt file cannot take a table
of many runs with it. Unknown entries are kept.

Left out on purpose: the settings under `config`, which `TrainConfig` checks, and where the files lie (`runs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptlab.config import LIMITS
from gptlab.jsonfile import read_json

LARGEST = 3.4e38
"""Greatest number that a measurement can be: float32's. Figures and sums of greater ones overflow."""

_STEPS = LIMITS["max_iters"][1]
_WORDS = ("state", "status", "message", "type", "traceback", "name", "cwd", "host", "device_name", "phase", "gptlab")
_OBJECTS = ("config", "setting", "reasons", "data", "versions", "peak", "imported", "shares")
_COUNTS = {
    "step": _STEPS, "max_iters": _STEPS, "from_step": _STEPS, "tokens": LARGEST, "attempt": 1e6, "format": 1e6,
    "rank": LIMITS["nproc"][1], "world_size": LIMITS["nproc"][1], "straggler": LIMITS["nproc"][1],
}  # fmt: skip
"""Whole numbers from 0 on, each with its greatest."""
_AMOUNTS = (
    "created", "started", "updated", "time", "began", "since", "first_step", "progress", "time_s", "step_s",
    "tokens_per_s", "mfu", "lr", "peak_bytes",
)  # fmt: skip
"""Finite numbers."""
_LOSSES = ("loss", "val_loss", "grad_norm", "train_loss", "val_accuracy")
"""Numbers that training can also leave infinite, or none at all."""


def sound(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without the entries that are not what readers take them for; None is welcome anywhere."""
    return {name: value for name, value in record.items() if value is None or _fits(name, value)}


def read_record(path: Path) -> dict[str, Any] | None:
    """The sound part of a JSON file of a run directory; None where there is none, or nothing that can be read."""
    record = read_json(path)
    return None if record is None else sound(record)


def _fits(name: str, value: Any) -> bool:
    if name in _WORDS:
        return isinstance(value, str)
    if name in _OBJECTS:
        return isinstance(value, dict)
    if name == "pids":
        return isinstance(value, list)
    if name in _COUNTS:
        return type(value) is int and 0 <= value <= _COUNTS[name]
    if name in _LOSSES and type(value) is float and not math.isfinite(value):
        return True
    if name in _AMOUNTS or name in _LOSSES:
        return type(value) in (int, float) and -LARGEST < value < LARGEST
    return True
