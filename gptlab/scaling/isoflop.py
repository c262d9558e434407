"""Iso-FLOP parabolas: for each compute budget the size with the least loss, and how it grows with the budget.

    >>> found = scaling.isoflop(n, losses, compute)
    >>> found.exponent, found.interval          # N_opt grows as C ** exponent

Approach 2 of Hoffmann et al. (2022), section 3.2: runs of one budget differ in size, their loss over log N is a
parabola, its lowest point is N_opt(C), and a line through log N_opt over log C is the law. Tokens follow from
C = 6 N D. Intervals are percentiles over refits to parabolas whose residuals were drawn anew.

Left out on purpose: which runs to make (`dial.isoflops`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gptlab.scaling.fits import DRAWS, Undetermined

SAME_BUDGET = 1.15
"""Runs whose compute differs by less than this factor share a budget: steps are whole numbers."""


@dataclass(frozen=True)
class Budget:
    """One budget's parabola: loss = floor + curvature (log N - log n_opt)^2."""

    compute: float
    """FLOPs: the geometric mean of its runs'."""
    rows: list[int]
    """Its runs' places in the table."""
    n_opt: float
    floor: float
    curvature: float
    n_interval: tuple[float, float]
    """95 % interval of n_opt."""

    def loss(self, n: np.ndarray) -> np.ndarray:
        """The parabola at sizes (points,)."""
        return self.floor + self.curvature * (np.log(n) - np.log(self.n_opt)) ** 2

    @property
    def d_opt(self) -> float:
        """Tokens of the best run: D = C / 6 N."""
        return self.compute / 6 / self.n_opt


@dataclass(frozen=True)
class IsoFlop:
    """N_opt = factor * C ** exponent, through the budgets' lowest points."""

    budgets: list[Budget]
    exponent: float
    factor: float
    interval: tuple[float, float]
    """95 % interval of the exponent."""
    skipped: dict[float, str]
    """Budgets without a lowest point among their runs, by compute, and why."""

    def n_opt(self, compute: float) -> float:
        """The best size for a budget."""
        return float(self.factor * compute**self.exponent)

    def d_opt(self, compute: float) -> float:
        """The tokens that the best size sees: D = C / 6 N."""
        return compute / 6 / self.n_opt(compute)


def isoflop(n: Sequence[float] | np.ndarray, loss: Sequence[float] | np.ndarray,
            compute: Sequence[float] | np.ndarray, *, draws: int = DRAWS, seed: int = 0) -> IsoFlop:  # fmt: skip
    """Parabolas through the runs of each budget, and the line through their lowest points.

    Args:
        n: size of each run.
        loss: final loss of each run.
        compute: FLOPs of each run.

    Raises:
        Undetermined: fewer than two budgets have a lowest point within the sizes that were tried.
    """
    size, y, spent = (np.asarray(values, dtype=float) for values in (n, loss, compute))
    for name, column in (("N", size), ("loss", y), ("C", spent)):
        if not (np.isfinite(column).all() and (column > 0).all()):
            raise Undetermined(f"{name} must be finite and above 0 in every row: leave the others out.")
    generator = np.random.default_rng(seed)
    budgets: list[Budget] = []
    drawn: list[np.ndarray] = []
    skipped: dict[float, str] = {}
    for rows in _groups(spent):
        budget = float(np.exp(np.log(spent[rows]).mean()))
        x = np.log(size[rows])
        if len(np.unique(x.round(6))) < 3:
            skipped[budget] = "fewer than 3 sizes"
            continue
        middle = x.mean()
        powers = np.column_stack([np.ones(len(x)), x - middle, (x - middle) ** 2])  # (runs, 3)
        solve = np.linalg.pinv(powers)
        bent = solve @ y[rows]
        if bent[2] <= 0:
            skipped[budget] = "its runs bend downwards"
            continue
        lowest = middle - bent[1] / (2 * bent[2])
        if not x.min() <= lowest <= x.max():
            side = "smaller" if lowest < x.min() else "larger"
            skipped[budget] = f"its lowest point is at a {side} size than any that was tried"
            continue
        residuals = y[rows] - powers @ bent
        free = len(x) - 3
        spread = residuals * np.sqrt(len(x) / free) if free else np.zeros(1)
        tables = powers @ bent + generator.choice(spread, (draws, len(x)))
        refits = tables @ solve.T  # (draws, 3)
        with np.errstate(divide="ignore", invalid="ignore"):
            lows = middle - refits[:, 1] / (2 * refits[:, 2])
        reach = x.max() - x.min()
        lows = np.clip(np.where(refits[:, 2] > 0, lows, middle), x.min() - reach, x.max() + reach)
        drawn.append(lows)
        ends = np.exp(np.percentile(lows, [2.5, 97.5]))
        budgets.append(
            Budget(budget, [int(row) for row in rows], float(np.exp(lowest)),
                   float(bent[0] - bent[1] ** 2 / (4 * bent[2])), float(bent[2]), (float(ends[0]), float(ends[1])))
        )  # fmt: skip
    if len(budgets) < 2:
        why = "; ".join(f"C = {budget:.3g}: {reason}" for budget, reason in skipped.items())
        raise Undetermined(
            f"{len(budgets)} compute budget{'s have' if len(budgets) != 1 else ' has'} a lowest loss within the sizes "
            f"that were tried, and a line needs 2" + (f" ({why})" if why else "") + ": add budgets or sizes."
        )
    at = np.log([one.compute for one in budgets])
    lows_by_budget = np.column_stack(drawn)  # (draws, budgets)
    line = np.polyfit(at, np.log([one.n_opt for one in budgets]), 1)
    slopes = np.polyfit(at, lows_by_budget.T, 1)[0]
    ends = np.percentile(slopes, [2.5, 97.5])
    return IsoFlop(budgets, float(line[0]), float(np.exp(line[1])), (float(ends[0]), float(ends[1])), skipped)


def _groups(compute: np.ndarray) -> list[np.ndarray]:
    """Rows by budget, the smallest first."""
    order = np.argsort(compute, kind="stable")
    groups: list[list[int]] = []
    for row in order:
        if groups and compute[row] <= compute[groups[-1][0]] * SAME_BUDGET:
            groups[-1].append(int(row))
        else:
            groups.append([int(row)])
    return [np.array(group) for group in groups]
