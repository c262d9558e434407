"""Two things timed by turns, and what their times say.

    >>> from gptlab.benchmark.pairing import interval
    >>> interval([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    (2.0, 2.0)

Left out on purpose: what is timed (`sides.py`).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

RESAMPLES = 2000


def take_turns(
    a: Callable[[], None], b: Callable[[], None], pairs: int, *, warm_up: int = 2
) -> tuple[list[float], list[float]]:
    """Seconds of each, A B A B; the first `warm_up` turns of both are not timed. Both wait for their device."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(-warm_up, pairs):
        for work, kept in zip((a, b), seconds, strict=True):
            began = time.perf_counter()
            work()
            if turn >= 0:
                kept.append(time.perf_counter() - began)
    return seconds


def median(values: Sequence[float]) -> float:
    """The middle."""
    return statistics.median(values)


def interval(over: Sequence[float], under: Sequence[float], share: float = 0.95) -> tuple[float, float]:
    """Where the ratio of medians lies with a probability of `share`: the percentile bootstrap (Efron 1979) over pairs,
    from a seed of its own, so that equal times give equal bounds."""
    draw, count = random.Random(0), len(over)
    ratios = []
    for _ in range(RESAMPLES):
        pick = [draw.randrange(count) for _ in range(count)]
        ratios.append(median([over[i] for i in pick]) / median([under[i] for i in pick]))
    ratios.sort()
    edge = int((1 - share) / 2 * RESAMPLES)
    return ratios[edge], ratios[-1 - edge]
