"""Successive halving: hopeless cells of a sweep stop early, and what they would have cost is saved.

    >>> gptlab.sweep(base, grid, name="s", halving=3)

Every cell trains to a first rung; the best third (of `halving=3`) goes on to a rung three times as far, and so on until
the rest trains to its end (Jamieson and Talwalkar 2016; Karnin et al. 2013). Cells are compared on the loss of the same
training windows, up to the same step. Each keeps the schedule of its whole run, so one that survives is the run that it
would have been without. What stopped keeps its checkpoint.

Left out on purpose: the queue (`queueing.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gptlab.config import ConfigError, TrainConfig
from gptlab.runs import Run

FIRST_SHARE = 0.1
"""Least share of a run that its first rung is: earlier, the loss tells more of the warm-up than of the model."""


def rungs(configs: Sequence[TrainConfig], factor: int) -> list[int]:
    """Steps at which the field is thinned, ascending; the end is not one of them.

    Raises:
        ConfigError: a factor under 2, or cells that cannot be compared step by step.
    """
    if factor < 2:
        raise ConfigError(f"halving {factor} would keep every cell: give 2 or more.")
    for field in ("max_iters", "global_batch_size", "block_size", "data", "tokenizer"):
        if len({getattr(config, field) for config in configs}) > 1:
            raise ConfigError(
                f"halving compares cells at the same step, and these differ in {field}: leave out the one or the other."
            )
    total = configs[0].max_iters
    found: list[int] = []
    step, left = total // factor, len(configs)
    while left > 1 and step >= max(1, FIRST_SHARE * total):
        found.append(step)
        step, left = step // factor, -(-left // factor)
    return sorted(found)


def loss_at(run: Run, step: int) -> float:
    """A run's training loss around a step: the mean over the tenth of the steps before it; infinite without any."""
    losses = [row["loss"] for row in run.metrics() if 0.9 * step < row["step"] <= step and row.get("loss") is not None]
    return sum(losses) / len(losses) if losses else math.inf


def survivors(losses: Sequence[float], factor: int) -> list[int]:
    """Places of the best 1 / factor (rounded up) of some losses, in the order of the list."""
    order = sorted(range(len(losses)), key=lambda index: (not math.isfinite(losses[index]), losses[index]))
    return sorted(order[: -(-len(losses) // factor)])
