"""Two things timed by turns, and what their times say.

    >>> from gptlab.benchmark.pairing import interval
    >>> interval([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    (2.0, 2.0)

Left out on purpose: what is timed (`inside/race.py`).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

RESAMPLES = 2000
NORMAL = statistics.NormalDist().inv_cdf(0.975)
TIGHT = 0.02
"""A race ends when its interval reaches no farther than this share of the ratio to either side,"""
ENOUGH = 10
"""after so many pairs at least: the times of few that follow on each other are more alike than another run's."""
WARM = 2
"""Turns of each side before those that are timed."""
SAME = 0.02
"""Ratios that are nearer to 1 than this are the same, whatever their interval: sides take turns, but not at once."""


def warm_up(a: Callable[[], object], b: Callable[[], object], *, agree: Callable[[bool], bool] = bool) -> None:
    """Turns that nobody times: what compiles does so here, and memory is taken."""
    for _ in range(WARM):
        for work in (a, b):
            agree(False)
            work()


def take_turns(
    a: Callable[[], object], b: Callable[[], object], pairs: int, *, budget_s: float = float("inf"),
    agree: Callable[[bool], bool] = bool,
) -> tuple[list[float], list[float]]:  # fmt: skip
    """Seconds of each, A B A B. Both wait for their device.

    Args:
        pairs: the most; it ends before where the interval is tight, or the budget is spent.
        agree: makes one process's wish to end that of all, and is called before each turn (several then start it
            together).
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    end = time.monotonic() + budget_s
    for _ in range(pairs):
        for work, kept in zip((a, b), seconds, strict=True):
            agree(False)
            began = time.perf_counter()
            work()
            kept.append(time.perf_counter() - began)
        if agree(time.monotonic() > end or is_tight(*seconds)):
            break
    return seconds


def is_tight(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether more pairs would say little more."""
    if len(a) < ENOUGH:
        return False
    low, high = interval(b, a)
    return (high - low) / 2 <= TIGHT * median(b) / median(a)


def median(values: Sequence[float]) -> float:
    """The middle."""
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """The distance of the quartiles over the median."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / middle


def interval(over: Sequence[float], under: Sequence[float]) -> tuple[float, float]:
    """Where the ratio of medians lies with a probability of 95 %: the percentile bootstrap (Efron 1979) over pairs,
    from a seed of its own, so that equal times give equal bounds. Few pairs scatter less than others of their kind
    would: the interval is expanded by Student's t over the normal's quantile (Hesterberg 2015, "What teachers should
    know about the bootstrap")."""
    from scipy.special import stdtrit

    draw, count = random.Random(0), len(over)  # noqa: S311 - no secret
    ratio = median(over) / median(under)
    if count < 2:
        return ratio, ratio
    ratios = []
    for _ in range(RESAMPLES):
        pick = [draw.randrange(count) for _ in range(count)]
        ratios.append(median([over[i] for i in pick]) / median([under[i] for i in pick]))
    ratios.sort()
    edge = RESAMPLES // 40
    wider = float(stdtrit(count - 1, 0.975)) / NORMAL * (count / (count - 1)) ** 0.5
    return max(0.0, ratio + (ratios[edge] - ratio) * wider), ratio + (ratios[-1 - edge] - ratio) * wider


def verdict(ratio: float, low: float, high: float) -> str:
    """`faster`, `slower` or `same`."""
    if low <= 1 <= high or abs(ratio - 1) < SAME:
        return "same"
    return "faster" if ratio > 1 else "slower"
