"""A fitted law with intervals and predictions, and the refusal of what a table cannot determine.

    >>> fit = scaling.fit({"N": n, "D": d}, losses)
    >>> fit.predict({"N": 1e9, "D": 2e10}), fit.interval({"N": 1e9, "D": 2e10})

Intervals are percentiles over refits to new tables, each made of the fitted losses and residuals drawn anew (Davison
and Hinkley 1997, chapter 6). The draw is smoothed (Silverman and Young 1987): a fit by nearly absolute values passes
through as many runs as it has parameters, and the zeros among its residuals would make it look surer than it is. A
prediction's interval holds one run's own scatter too. A table is refused where its runs are too few, its variables do
not vary or move together, or the interval of an exponent comes out so wide that the number would say nothing.

Left out on purpose: the solver (`laws.py`), parabolas (`isoflop.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gptlab.config import ConfigError
from gptlab.fields import check_range
from gptlab.scaling import laws

DELTA = 1e-3
"""Huber's delta in log L: Hoffmann et al. (2022), appendix D.3."""
DRAWS = 400
"""Refits behind an interval."""
WIDEST = 10.0
"""An exponent whose interval spans more than this factor is not determined."""
GREEK = {"N": "alpha", "D": "beta", "C": "gamma"}
"""Names of exponents; any other variable's is exponent_NAME."""
AMOUNT = {"N": "A", "D": "B", "C": "K"}
"""Names of amounts; any other variable's is amount_NAME."""

Values = Mapping[str, float]
Columns = Mapping[str, Sequence[float] | np.ndarray]
Points = Mapping[str, float] | Columns


class Undetermined(ConfigError):
    """The table cannot determine the fit: one sentence that says why, and what would."""


@dataclass(frozen=True)
class Fit:
    """L = E + sum of A / x^a over the variables, fitted to a table."""

    variables: tuple[str, ...]
    values: dict[str, float]
    """E, then an amount and an exponent for each variable."""
    intervals: dict[str, tuple[float, float]]
    """95 % intervals of the same."""
    residuals: np.ndarray
    """log of measured loss over fitted loss, (runs,)."""
    delta: float
    centre: np.ndarray
    """Mean log of each variable, around which the solver works, (K,)."""
    theta: np.ndarray
    """Solver's parameters, (1 + 2 K,)."""
    draws: np.ndarray
    """Solver's parameters of each refit, (draws, 1 + 2 K)."""

    @property
    def law(self) -> str:
        """The formula in words: L(N, D) = E + A/N^alpha + B/D^beta."""
        names = list(self.values)
        terms = [f"{names[1 + 2 * k]}/{name}^{names[2 + 2 * k]}" for k, name in enumerate(self.variables)]
        return f"L({', '.join(self.variables)}) = E + {' + '.join(terms)}"

    def predict(self, at: Points) -> np.ndarray:
        """The loss at some values of the variables, a number or (points,) each: (points,)."""
        return np.exp(laws.predicted(self.theta[None], self._x(at))[0])

    def interval(self, at: Points, *, level: float = 0.95, noise: bool = True, seed: int = 0) -> np.ndarray:
        """Where a run's loss at these values should lie: (points, 2).

        Args:
            noise: with one run's scatter; without, the interval of the law itself.
        """
        logs = laws.predicted(self.draws, self._x(at))  # (draws, points)
        if noise:
            logs = logs + _drawn(self.residuals, len(self.theta), logs.shape, np.random.default_rng(seed))
        tail = 50 * (1 - level)
        return np.exp(np.percentile(logs, [tail, 100 - tail], axis=0).T)

    def _x(self, at: Points) -> np.ndarray:
        missing = [name for name in self.variables if name not in at]
        if missing:
            raise ConfigError(f"{self.law} needs {missing[0]} to predict: give it.")
        columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(at[name], dtype=float)) for name in self.variables))
        return np.log(np.column_stack(columns)) - self.centre

    def best_split(self, compute: float) -> dict[str, float]:
        """How a fit in N and D spends C = 6 N D best: N, D and the loss (Hoffmann et al. 2022, equation 4)."""
        alpha, beta = self.values["alpha"], self.values["beta"]
        g = (alpha * self.values["A"] / (beta * self.values["B"])) ** (1 / (alpha + beta))
        n = g * (compute / 6) ** (beta / (alpha + beta))
        d = compute / 6 / n
        return {"N": n, "D": d, "loss": float(self.predict({"N": [n], "D": [d]})[0])}


def fit(columns: Columns, loss: Sequence[float] | np.ndarray, *, delta: float = DELTA, draws: int = DRAWS,
        seed: int = 0) -> Fit:  # fmt: skip
    """Fits the law in the given variables.

    Args:
        columns: by the variable's name (N, D, C, or any other) its value for each run.
        loss: in nats a token, for each run.
        draws: refits behind the intervals.

    Raises:
        Undetermined: the table cannot determine the law.
    """
    check_range("delta", delta, 1e-12, 1e6)
    check_range("draws", draws, 2, 1e6)
    y = np.asarray(loss, dtype=float)
    raw = np.column_stack([np.asarray(column, dtype=float) for column in columns.values()])  # (runs, K)
    names = tuple(columns)
    _refuse_table(names, raw, y)
    logs = np.log(raw)
    centre = logs.mean(0)
    problem = laws.Problem(logs - centre, np.log(y), delta)
    theta = laws.best(problem)
    fitted = laws.predicted(theta[None], problem.x)[0]
    residuals = problem.y - fitted
    generator = np.random.default_rng(seed)
    tables = fitted + _drawn(residuals, len(theta), (draws, len(y)), generator)
    refits, _ = laws.descend(problem, np.repeat(theta[None], draws, 0), tables)
    found = Fit(
        variables=names, values=_named(names, theta[None], centre, 0), intervals={}, residuals=residuals, delta=delta,
        centre=centre, theta=theta, draws=refits,
    )  # fmt: skip
    plain = {name: _unwound(name, names, refits, centre) for name in found.values}
    found.intervals.update(
        {name: (float(low), float(high)) for name, (low, high) in
         ((name, np.percentile(column, [2.5, 97.5])) for name, column in plain.items())}
    )  # fmt: skip
    _refuse_fit(found)
    return found


def _drawn(
    residuals: np.ndarray, parameters: int, shape: tuple[int, ...], generator: np.random.Generator
) -> np.ndarray:
    """New residuals: old ones around zero, with the variance they had before the fit spent its parameters on them and
    Student's width in place of the normal one, and smoothed by a normal kernel."""
    from scipy.stats import norm, t

    count, free = len(residuals), len(residuals) - parameters
    wide = (residuals - residuals.mean()) * np.sqrt(count / free) * (t.ppf(0.975, free) / norm.ppf(0.975))
    kernel = wide.std() * count**-0.2
    return generator.choice(wide, shape) + generator.normal(0.0, kernel, shape)


def parameter_names(variables: Sequence[str]) -> list[str]:
    """E, then an amount and an exponent for each variable."""
    names = ["E"]
    for name in variables:
        names += [AMOUNT.get(name, f"amount_{name}"), GREEK.get(name, f"exponent_{name}")]
    return names


def _unwound(name: str, variables: Sequence[str], theta: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """A parameter as the formula has it, of the solver's (S, 1 + 2 K): (S,)."""
    index = parameter_names(variables).index(name)
    if index == 0:
        return np.exp(theta[:, 0])
    k = (index - 1) // 2
    exponent = theta[:, 2 + 2 * k]
    return np.exp(theta[:, index] + exponent * centre[k]) if index % 2 else exponent


def _named(variables: Sequence[str], theta: np.ndarray, centre: np.ndarray, row: int) -> dict[str, float]:
    return {name: float(_unwound(name, variables, theta, centre)[row]) for name in parameter_names(variables)}


# What a table cannot say ---------------------------------------------------------------------------------------------


def _refuse_table(names: Sequence[str], raw: np.ndarray, loss: np.ndarray) -> None:
    if len(raw) != len(loss):
        raise ConfigError(f"There are {len(raw)} rows of {names[0]} and {len(loss)} losses: give one loss a row.")
    for name, column in (*zip(names, raw.T, strict=True), ("loss", loss)):
        if not (np.isfinite(column).all() and (column > 0).all()):
            wrong = column[~(np.isfinite(column) & (column > 0))][0]
            raise Undetermined(f"{name} {wrong:g} has no logarithm: leave out rows that are not finite and above 0.")
    parameters = 1 + 2 * len(names)
    if len(loss) < parameters + 2:
        raise Undetermined(
            f"{len(loss)} runs cannot determine the {parameters} parameters of L({', '.join(names)}): "
            f"give {parameters + 2} or more."
        )
    least = 4 if len(names) == 1 else 3
    for name, column in zip(names, raw.T, strict=True):
        different = 1 + int((np.diff(np.sort(np.log(column))) > 0.05).sum())
        if different < least:
            raise Undetermined(
                f"{name} takes {different} value{'s' * (different > 1)} that differ by more than 5 %, and its exponent "
                f"needs {least}: add runs with other {name}" + (f", or fit without {name}." if len(names) > 1 else ".")
            )
    logs = np.log(raw)
    for a in range(len(names)):
        for b in range(a):
            together = float(np.corrcoef(logs[:, a], logs[:, b])[0, 1])
            if abs(together) > 0.98:
                raise Undetermined(
                    f"{names[b]} and {names[a]} move together (correlation {together:.3f} of their logarithms), so "
                    "their terms cannot be told apart: vary each while the other stays."
                )


def _refuse_fit(found: Fit) -> None:
    low, high = laws.EXPONENTS
    for variable, name in zip(found.variables, list(found.values)[2::2], strict=True):
        least, most = found.intervals[name]
        if least <= low * 1.5 or most >= high * 0.98 or most / least > WIDEST:
            raise Undetermined(
                f"The exponent {name} of {variable} is not determined: its 95 % interval runs from {least:.3g} to "
                f"{most:.3g}; add runs over a wider range of {variable}, or several seeds of each."
            )


# Against a run that was held back ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """What a fit without some runs says about them."""

    fit: Fit
    rows: list[int]
    """Places of the held-back runs in the table."""
    predicted: np.ndarray
    """(held back,)"""
    intervals: np.ndarray
    """(held back, 2)"""
    measured: np.ndarray
    """(held back,)"""

    @property
    def errors(self) -> np.ndarray:
        """Predicted over measured, minus 1."""
        return np.asarray(self.predicted / self.measured - 1)


def check(columns: Columns, loss: Sequence[float] | np.ndarray, *, hold_back: int = 1, delta: float = DELTA,
          draws: int = DRAWS, seed: int = 0) -> Check:  # fmt: skip
    """Fits all but the runs of the largest compute (the product of the variables), and predicts those.

    Raises:
        Undetermined: what is left cannot determine the law.
    """
    names, y = list(columns), np.asarray(loss, dtype=float)
    check_range("hold_back", hold_back, 1, len(y))
    raw = {name: np.asarray(columns[name], dtype=float) for name in names}
    order = np.argsort(np.prod([np.log(raw[name]) for name in names], axis=0) if len(names) == 1 else
                       np.sum([np.log(raw[name]) for name in names], axis=0), kind="stable")  # fmt: skip
    kept, held = order[: len(y) - hold_back], order[len(y) - hold_back :]
    found = fit({name: raw[name][kept] for name in names}, y[kept], delta=delta, draws=draws, seed=seed)
    at = {name: raw[name][held] for name in names}
    return Check(found, [int(row) for row in held], found.predict(at), found.interval(at), y[held])
