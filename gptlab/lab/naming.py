"""The names of a Lab's sweeps, which follow from their settings, and those that a folder holds.

    >>> sweep_name("lab", TrainConfig(max_iters=100))    # the same for every shape

Left out on purpose: the names of runs, which are the sweep's (`sweeps.py`).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from gptlab.config import TrainConfig
from gptlab.grid import SHAPE


def sweep_name(name: str, base: TrainConfig) -> str:
    """The name of the sweep that has these settings: the Lab's, and a hash of all but the shape."""
    settings = {field: value for field, value in base.to_dict().items() if field not in SHAPE}
    return f"{name}-{hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:6]}"


def sweeps_in(runs_dir: Path) -> list[str]:
    """Names of the sweeps in a folder, the newest first."""
    found = sorted(runs_dir.glob("*.sweep.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [path.name.removesuffix(".sweep.json") for path in found]
