"""What curves are made of: a run's measurements as arrays, smoothed and thinned, and the words that say them.

    >>> from gptlab.lab.curves import describe, read
    >>> describe([read(run) for run in gptlab.runs.list_runs()])

Left out on purpose: drawing them (`figures.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from gptlab.runs import Run

if TYPE_CHECKING:
    import numpy as np

XAxis = Literal["step", "tokens", "flops", "time_s"]
X_LABELS: dict[XAxis, str] = {
    "step": "optimizer steps",
    "tokens": "tokens seen",
    "flops": "FLOPs spent",
    "time_s": "seconds of training",
}
"""What the horizontal axis can count."""
TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True)
class Series:
    """What a run measured, a float64 array a column; NaN where a row lacks it."""

    name: str
    label: str
    columns: dict[str, np.ndarray]
    """step, tokens, flops, time_s, loss, tokens_per_s, mfu, each (rows,); val_step and val_loss, each (looks,)."""
    restarts: list[tuple[int, int]] = field(default_factory=list)
    """For each later attempt the first step that it did, and the last that the attempts before had reached."""


def read(run: Run, label: str | None = None) -> Series:
    """The curves of a run directory as they stand now."""
    import numpy as np

    from gptlab.costs import flops_per_token

    config, rows = run.config, run.metrics()
    steps = [row for row in rows if isinstance(row.get("loss"), int | float)]
    looks = [row for row in rows if isinstance(row.get("val_loss"), int | float)]

    def column(name: str, of: list[dict[str, Any]]) -> np.ndarray:
        return np.array([math.nan if row.get(name) is None else row[name] for row in of], dtype=np.float64)

    names = ("step", "tokens", "time_s", "loss", "tokens_per_s", "mfu")
    columns = {name: column(name, steps) for name in names}
    columns["flops"] = columns["tokens"] * flops_per_token(config)
    columns |= {f"val_{name}": column(name, looks) for name in ("step", "tokens", "time_s")}
    columns["val_flops"] = columns["val_tokens"] * flops_per_token(config)
    columns["val_loss"] = column("val_loss", looks)
    name = TIMES.join(map(str, (config.n_layer, config.n_head, config.n_embd)))
    return Series(run.name, label or name, columns, _restarts(run, steps))


def _restarts(run: Run, steps: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """Where later attempts took the run up, and how far the ones before them had come."""
    if not steps or steps[-1]["attempt"] == 1:
        return []
    found, reached = [], 0
    for row in run.attempts_table():
        if row["to_step"] is None:
            continue
        if reached:
            found.append((int(row["from_step"]) + 1, reached))
        reached = max(reached, int(row["to_step"]))
    return found


def empty(name: str, label: str) -> Series:
    """The curves of a run that has not begun: its colour is kept for it."""
    import numpy as np

    names = [*X_LABELS, "loss", "tokens_per_s", "mfu", "val_loss", *(f"val_{x}" for x in X_LABELS)]
    return Series(name, label, {name: np.empty(0) for name in names})


def describe(series: Sequence[Series]) -> str:
    """The picture in words, for who cannot see it: each run's last values."""
    said = []
    for one in series:
        last = {name: values[-1] for name, values in one.columns.items() if len(values)}
        if "loss" not in last:
            said.append(f"{one.label} has no points yet")
            continue
        speed = f", {last['tokens_per_s']:,.0f} tokens per second" if last["tokens_per_s"] > 0 else ""
        mfu = f", MFU {100 * last['mfu']:.1f} %" if last["mfu"] > 0 else ""
        again = f", {len(one.restarts)} restart{'s' * (len(one.restarts) > 1)}" if one.restarts else ""
        said.append(f"{one.label} at step {last['step']:.0f}: loss {last['loss']:.3f}{speed}{mfu}{again}")
    return "Curves of loss, tokens per second and MFU. " + ("; ".join(said) or "No runs yet") + "."


def furthest(series: Sequence[Series], x: XAxis) -> float:
    """The greatest value that any curve has on the horizontal axis; 0 without one."""
    return max((float(one.columns[x][-1]) for one in series if len(one.columns[x])), default=0.0)


def thin(at: np.ndarray, values: np.ndarray, points: int, log: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """At most so many points, each the mean of its neighbours; the last one stays. Both (rows,) -> (points,).

    On a logarithmic axis the groups grow with their place, so that the first rows stay apart.
    """
    import numpy as np

    rows = len(values)
    if rows <= points:
        return at, values
    if log:
        starts = np.unique(np.geomspace(1, rows, points).astype(int) - 1)[:-1]
    else:
        starts = np.linspace(0, rows - 1, points - 1, endpoint=False).astype(int)
    counts = np.diff(np.append(starts, rows - 1))
    means = [np.add.reduceat(column[:-1], starts) / counts for column in (at, values)]
    return np.append(means[0], at[-1]), np.append(means[1], values[-1])


def smooth(values: np.ndarray) -> np.ndarray:
    """The mean of a value's neighbours, a thirtieth of the curve to each side, fewer towards its ends; without NaN."""
    import numpy as np

    rows, reach = len(values), max(3, len(values) // 30)
    valid = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(valid, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(valid)])
    middle = np.arange(rows)
    # As many before as after keep a slope true; but a lone last value is noise, so the ends lean inwards a little.
    side = np.maximum(reach // 3, np.minimum(reach, np.minimum(middle, rows - 1 - middle)))
    low, high = np.maximum(0, middle - side), np.minimum(rows, middle + side + 1)
    with np.errstate(invalid="ignore"):
        return (sums[high] - sums[low]) / (counts[high] - counts[low])


def short(value: float) -> str:
    """A number for an axis or a cell: 950, 12.5k, 3.2M, 1.1G, 4T, 2P, 3e+18."""
    if not math.isfinite(value):
        return "?"
    if abs(value) >= 0.9995e18:  # FLOPs: people know the power better than a letter for it
        return f"{value:.3g}"
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
