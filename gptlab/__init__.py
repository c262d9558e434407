"""gptlab: an interactive scaling lab for GPTs.

    import gptlab

    run = gptlab.launch(gptlab.preset("1m", max_iters=200))
    print(run.wait()["val_loss"])

What stands here is loaded when it is first used: `import gptlab` costs next to nothing and imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gptlab.benchmark import bench
    from gptlab.config import ConfigError, GPTConfig, TrainConfig
    from gptlab.launcher import Handle, launch, resume
    from gptlab.model import GPT
    from gptlab.presets import PRESETS, preset
    from gptlab.runs import Run, list_runs
    from gptlab.sampling import sample
    from gptlab.sweeps import Sweep, sweep

__version__ = "0.1.0"

_HOME = {
    "bench": "benchmark", "ConfigError": "config", "GPTConfig": "config", "TrainConfig": "config",
    "PRESETS": "presets", "preset": "presets",
    "Handle": "launcher", "launch": "launcher", "resume": "launcher",
    "GPT": "model", "Run": "runs", "list_runs": "runs", "sample": "sampling", "Sweep": "sweeps", "sweep": "sweeps",
}  # fmt: skip

__all__ = [
    "GPT", "PRESETS", "ConfigError", "GPTConfig", "Handle", "Run", "Sweep", "TrainConfig",
    "bench", "launch", "list_runs", "preset", "resume", "sample", "sweep",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gptlab' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gptlab.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
