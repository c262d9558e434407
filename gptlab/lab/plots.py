"""Figures of scaling studies: losses with their law, iso-FLOP parabolas, best sizes, predictions beside measurements.

    >>> from gptlab.lab import plots
    >>> plots.law(fit, points.columns, points.loss).savefig("law.png")

The same canvas, colours and themes as the curves of runs have (`figures.py`, `rendering.py`); `rendering.save` writes
them as PNG or SVG. Like those, call them on a kernel's main thread alone. Left out on purpose: the fits
(`scaling/`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gptlab.lab.figures import COLOURS, short
from gptlab.lab.rendering import canvas, settings
from gptlab.scaling import Fit, IsoFlop

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEANING = {"N": "parameters N", "D": "training tokens D", "C": "training compute C (FLOPs)"}
HELD = COLOURS[7]
"""The run that a fit has not seen."""
_MARKS = "osD^vPpX"


def law(fit: Fit, columns: Mapping[str, np.ndarray], loss: np.ndarray, *, held: Mapping[str, Any] | None = None,
        width: float = 10.0, height: float = 4.2) -> Figure:  # fmt: skip
    """Measured losses and the law through them on the left, how far each run is from it on the right.

    With N and D a curve for each size over the tokens; with one variable one curve.

    Args:
        columns: the variables of the runs that were fitted, (runs,) each.
        held: N, D, ..., and `loss`, of a run that the fit has not seen: drawn as a star, with its interval.
    """
    import matplotlib
    import numpy as np

    over = fit.variables[-1]
    lines = np.unique(columns["N"]) if len(fit.variables) > 1 else np.array([np.nan])
    reach = np.concatenate([columns[over], [held[over]] if held else []])
    xs = np.geomspace(reach.min() / 1.15, reach.max() * 1.15, 100)
    with matplotlib.rc_context(settings()):
        figure = canvas(width, height, "losses and the law through them")
        left, right = _panels(figure, (1.7, 1))
        for index, n in enumerate(lines):
            mine = columns["N"] == n if len(fit.variables) > 1 else np.ones(len(loss), dtype=bool)
            colour, mark = _look(index)
            at = {"N": np.full_like(xs, n), over: xs} if len(fit.variables) > 1 else {over: xs}
            left.plot(xs, fit.predict(at), color=colour, linewidth=1.4)
            left.plot(columns[over][mine], loss[mine], mark, color=colour, markersize=5.5,
                      label=f"N = {short(float(n))}" if len(fit.variables) > 1 else "runs")  # fmt: skip
        if held:
            _star(left, fit, held, over, xs)
        left.set_title("loss (nats per token) and the fitted law", loc="left")
        left.set_xlabel(MEANING.get(over, over))
        decades(left, "xy")
        left.legend(frameon=False)
        right.axhline(0, color=COLOURS[0], linewidth=1)
        fitted = np.exp(np.log(loss) - fit.residuals)
        right.plot(fitted, 100 * fit.residuals, "o", color=COLOURS[0], markersize=5)
        right.set_title("measured above the law (%)", loc="left")
        right.set_xlabel("fitted loss")
    return figure


def _look(index: int) -> tuple[str, str]:
    """Colour and mark of the index-th size or budget: unique up to 64."""
    return COLOURS[index % len(COLOURS)], _MARKS[(index + index // len(COLOURS)) % len(_MARKS)]


def _star(axes: Axes, fit: Fit, held: Mapping[str, Any], over: str, xs: np.ndarray) -> None:
    """The held-back run: what was predicted, with its interval, and what was measured."""
    import numpy as np

    at = {name: np.array([float(held[name])]) for name in fit.variables}
    low, high = fit.interval(at)[0]
    predicted, colour = fit.predict(at)[0], HELD
    if len(fit.variables) > 1:
        curve = {name: np.full_like(xs, float(held[name])) for name in fit.variables} | {over: xs}
        axes.plot(xs, fit.predict(curve), color=colour, linewidth=1.2, linestyle=(0, (4, 2)))
    # An interval of few refits may lie beside the prediction.
    reach = [[max(0.0, predicted - low)], [max(0.0, high - predicted)]]
    axes.errorbar(at[over], [predicted], yerr=reach, fmt="_", color=colour, capsize=4, markersize=12,
                  label="predicted, 95 % interval")  # fmt: skip
    axes.plot(at[over], [held["loss"]], "*", color=colour, markersize=14, label="measured, not in the fit")


def parabolas(found: IsoFlop, n: np.ndarray, loss: np.ndarray, *, width: float = 10.0, height: float = 4.2) -> Figure:
    """Iso-FLOP runs: loss over size for each budget with its parabola on the left; the best size over compute on the
    right."""
    import matplotlib
    import numpy as np

    with matplotlib.rc_context(settings()):
        figure = canvas(width, height, "iso-FLOP parabolas")
        left, right = _panels(figure, (1.3, 1))
        for index, budget in enumerate(found.budgets):
            colour, mark = _look(index)
            sizes = n[budget.rows]
            xs = np.geomspace(sizes.min() / 1.1, sizes.max() * 1.1, 100)
            left.plot(xs, budget.loss(xs), color=colour, linewidth=1.4)
            left.plot(
                sizes, loss[budget.rows], mark, color=colour, markersize=5.5, label=f"C = {short(budget.compute)}"
            )
            left.plot([budget.n_opt], [budget.floor], "x", color=colour, markersize=9, markeredgewidth=2)
            low, high = budget.n_interval
            right.errorbar([budget.compute], [budget.n_opt], yerr=[[max(0.0, budget.n_opt - low)],
                           [max(0.0, high - budget.n_opt)]], fmt=mark, color=colour, capsize=3)  # fmt: skip
        left.set_title("loss (nats per token) at equal compute; crosses: lowest points", loc="left")
        left.set_xlabel(MEANING["N"])
        left.legend(frameon=False)
        compute = np.array([budget.compute for budget in found.budgets])
        ends = np.geomspace(compute.min() / 1.5, compute.max() * 1.5, 2)
        right.plot(ends, [found.n_opt(float(c)) for c in ends], color=COLOURS[7], linewidth=1.4)
        low, high = found.interval
        right.set_title(f"best size: N grows as C^{found.exponent:.2f} (95 %: {low:.2f} to {high:.2f})", loc="left")
        right.set_xlabel(MEANING["C"])
        decades(left, "x")
        decades(right, "xy")
    return figure


def frontier(fit: Fit, compute: Sequence[float], runs: Mapping[str, np.ndarray], *,
             held: Mapping[str, float] | None = None, width: float = 10.0, height: float = 4.2) -> Figure:  # fmt: skip
    """What compute buys: the loss of the best split of each budget with its band on the left, the best N and D on the
    right.

    Args:
        fit: in N and D.
        compute: budgets C = 6 N D to draw, ascending.
        runs: N, D and loss of the runs, (runs,) each.
        held: N, D and loss of a run that the fit has not seen.
    """
    import matplotlib
    import numpy as np

    splits = [fit.best_split(float(c)) for c in compute]
    at = {name: np.array([split[name] for split in splits]) for name in ("N", "D")}
    band = fit.interval(at, noise=False)
    with matplotlib.rc_context(settings()):
        figure = canvas(width, height, "what compute buys")
        left, right = _panels(figure, (1.3, 1))
        left.fill_between(
            compute, band[:, 0], band[:, 1], color=COLOURS[0], alpha=0.18, linewidth=0, label="95 % interval"
        )
        left.plot(
            compute,
            [split["loss"] for split in splits],
            color=COLOURS[0],
            linewidth=1.6,
            label="best split, by the fit",
        )
        left.plot(
            6 * runs["N"] * runs["D"], runs["loss"], "o", color=COLOURS[2], markersize=4.5, label="runs of the fit"
        )
        left.axhline(fit.values["E"], color=COLOURS[6], linewidth=1, linestyle=(0, (4, 2)), label="E: what stays")
        if held:
            spent = 6 * held["N"] * held["D"]
            left.plot([spent], [held["loss"]], "*", color=HELD, markersize=14, label="held back, measured")
        left.set_title("loss (nats per token)", loc="left")
        left.set_xlabel(MEANING["C"])
        left.legend(frameon=False)
        right.plot(compute, at["N"], color=COLOURS[1], linewidth=1.6, label="parameters N")
        right.plot(compute, at["D"], color=COLOURS[4], linewidth=1.6, linestyle=(0, (5, 2)), label="tokens D")
        right.set_title("the best split of the compute", loc="left")
        right.set_xlabel(MEANING["C"])
        right.legend(frameon=False)
        decades(left, "x")
        decades(right, "xy")
    return figure


def _panels(figure: Figure, ratios: tuple[float, float]) -> tuple[Axes, Axes]:
    """Two axes beside each other, with fixed margins."""
    from matplotlib.gridspec import GridSpec

    grid = GridSpec(1, 2, figure, width_ratios=ratios, left=0.06, right=0.985, top=0.91, bottom=0.13, wspace=0.16)
    return figure.add_subplot(grid[0]), figure.add_subplot(grid[1])


def decades(axes: Axes, which: str) -> None:
    """Logarithmic axes whose ticks are numbers that one reads aloud: 1, 2 and 5 of each decade, fewer over many."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    for name, axis, (low, high) in (("x", axes.xaxis, axes.get_xlim()), ("y", axes.yaxis, axes.get_ylim())):
        if name not in which:
            continue
        (axes.set_xscale if name == "x" else axes.set_yscale)("log")
        if low <= 0:
            low, high = axes.get_xlim() if name == "x" else axes.get_ylim()
        ratio = high / low
        steps: tuple[float, ...] = (
            (1.0,) if ratio > 300 else (1.0, 2.0, 5.0) if ratio > 8 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
        )
        if ratio < 3:
            steps = tuple(round(1 + 0.1 * k, 1) for k in range(90))
            if ratio > 1.6:
                steps = tuple(round(1 + 0.2 * k, 1) for k in range(45))
        axis.set_major_locator(LogLocator(10, subs=steps, numticks=50))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        axis.set_minor_formatter(NullFormatter())
