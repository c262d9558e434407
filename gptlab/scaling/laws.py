"""A power law with an offset, in one variable or several, and the least Huber loss of its parameters.

    L(x_1, ..., x_K) = E + sum_k A_k / x_k^a_k

With one variable it is L(N), L(D) or L(C); with N and D it is Hoffmann et al. (2022), equation 2. As in their approach
3, the residuals are those of log L under a Huber loss, so that one bad run cannot bend the fit, and descent begins at
every point of a grid. Two things differ. Only exponents stand on the grid: for given exponents the law is linear in E
and A_k, and non-negative least squares (scipy) knows the best. And all descents run side by side in one array
(Levenberg and Marquardt, with the Huber weights of the moment), which makes hundreds of refits for an interval as
cheap as one; `polish` is the plain twin, scipy's L-BFGS on the same objective. The objective is the *sum* over runs:
the mean stops L-BFGS early (Besiroglu et al. 2024, "Chinchilla Scaling: A replication attempt").

Left out on purpose: intervals, and what a table cannot say (`fits.py`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

EXPONENTS = (0.01, 3.0)
"""Exponents that are looked for; published ones are 0.05 to 0.5."""
GRID = (0.05, 0.15, 0.3, 0.5, 0.8, 1.3, 2.0)
"""Exponents at which descent begins, each with each."""
LEAST_E = 1e-3
"""Least offset, as a share of the lowest loss: below it there is as good as none."""
MOST_STEPS = 300
"""Steps of descent, at most; most end after 20 to 60."""


@dataclass(frozen=True)
class Problem:
    """What is fitted: logs of the variables around their means, and log L."""

    x: np.ndarray
    """log x - mean(log x), (runs, K)."""
    y: np.ndarray
    """log L, (runs,)."""
    delta: float
    """Where the Huber loss turns from a square to a line, in log L."""

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Least and greatest of (log E, log A_1, a_1, log A_2, a_2, ...)."""
        terms = self.x.shape[1]
        low, high = self.y.min(), self.y.max()
        least = [low + np.log(LEAST_E)] + [low - 12.0, EXPONENTS[0]] * terms
        most = [low] + [high + 3.0, EXPONENTS[1]] * terms
        return np.array(least), np.array(most)


def predicted(theta: np.ndarray, x: np.ndarray) -> np.ndarray:
    """log L of parameters (S, 1 + 2 K) at points (runs, K): (S, runs)."""
    return _terms(theta, x)[1]


def _terms(theta: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The share of each term in L, (S, runs, 1 + K), and log L, (S, runs)."""
    logs = np.empty((len(theta), len(x), 1 + x.shape[1]))
    logs[:, :, 0] = theta[:, :1]
    logs[:, :, 1:] = theta[:, None, 1::2] - theta[:, None, 2::2] * x
    top = logs.max(-1, keepdims=True)
    shares = np.exp(logs - top)
    total = shares.sum(-1, keepdims=True)
    return shares / total, (top + np.log(total))[..., 0]


def huber(residuals: np.ndarray, delta: float) -> np.ndarray:
    """The Huber loss of each residual, half a square within delta and a line beyond; summed over the last axis."""
    size = np.abs(residuals)
    return np.where(size <= delta, 0.5 * size**2, delta * (size - 0.5 * delta)).sum(-1)


def starts(problem: Problem) -> np.ndarray:
    """Parameters to begin at, (S, 1 + 2 K): each combination of the grid's exponents, with its best E and A_k."""
    from scipy.optimize import nnls

    loss = np.exp(problem.y)
    low, high = problem.bounds
    found = []
    for exponents in itertools.product(GRID, repeat=problem.x.shape[1]):
        columns = np.column_stack([np.ones(len(loss)), np.exp(-problem.x * exponents)])  # (runs, 1 + K)
        amounts, _ = nnls(columns / loss[:, None], np.ones(len(loss)))  # residuals as shares of the loss
        theta = np.empty(len(low))
        theta[0], theta[1::2], theta[2::2] = (
            np.log(max(amounts[0], 1e-300)),
            np.log(np.maximum(amounts[1:], 1e-300)),
            exponents,
        )
        found.append(np.clip(theta, low, high))
    return np.array(found)


def descend(problem: Problem, theta: np.ndarray, y: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Descends from many points at once.

    Args:
        theta: where to begin, (S, 1 + 2 K).
        y: log L for each of them, (S, runs); the problem's own without.

    Returns:
        Parameters (S, 1 + 2 K) and their summed Huber losses (S,).
    """
    x, delta = problem.x, problem.delta
    low, high = problem.bounds
    target = np.broadcast_to(problem.y if y is None else y, (len(theta), len(x)))
    theta, cost = theta.copy(), huber(predicted(theta, x) - target, delta)
    damping = np.full(len(theta), 1e-2)
    active = np.arange(len(theta))
    idle = np.zeros(len(theta), dtype=int)  # steps in a row that gained next to nothing
    for _ in range(MOST_STEPS):
        if not len(active):
            break
        here = theta[active]
        shares, fitted = _terms(here, x)
        residuals = fitted - target[active]
        slopes = np.empty((len(active), len(x), theta.shape[1]))  # of log L by each parameter
        slopes[:, :, 0], slopes[:, :, 1::2], slopes[:, :, 2::2] = shares[..., 0], shares[..., 1:], -shares[..., 1:] * x
        weighted = slopes * np.minimum(1.0, delta / np.maximum(np.abs(residuals), 1e-300))[..., None]
        turned = weighted.transpose(0, 2, 1)  # (S, parameters, runs)
        gradient = (turned @ residuals[..., None])[..., 0]
        # What stands at a bound and would leave through it rests in this step.
        resting = ((here <= low) & (gradient > 0)) | ((here >= high) & (gradient < 0))
        gradient[resting] = 0.0
        square = turned @ slopes
        square[resting[:, :, None] | resting[:, None, :]] = 0.0
        diagonal = np.einsum("sii->si", square)
        diagonal += damping[active, None] * diagonal + 1e-12 + resting
        tried = np.clip(here - np.linalg.solve(square, gradient[..., None])[..., 0], low, high)
        reached = huber(predicted(tried, x) - target[active], delta)
        better = reached < cost[active]
        gain = cost[active] - reached
        small = gain <= 1e-9 * cost[active] + 1e-18
        idle[active] = np.where(better & ~small, 0, idle[active] + 1)
        theta[active[better]], cost[active[better]] = tried[better], reached[better]
        damping[active] = np.clip(np.where(better, damping[active] / 5, damping[active] * 6), 1e-9, 1e9)
        active = active[idle[active] < 8]
    return theta, cost


def polish(problem: Problem, theta: np.ndarray) -> np.ndarray:
    """One descent by scipy's L-BFGS from (1 + 2 K,) parameters, on the same objective: `descend`'s plain twin."""
    from scipy.optimize import minimize

    low, high = problem.bounds

    def objective(values: np.ndarray) -> tuple[float, np.ndarray]:
        shares, fitted = _terms(values[None], problem.x)
        residuals = fitted[0] - problem.y
        pull = np.clip(residuals, -problem.delta, problem.delta)  # the Huber loss's slope
        gradient = np.empty_like(values)
        gradient[0] = pull @ shares[0, :, 0]
        gradient[1::2] = pull @ shares[0, :, 1:]
        gradient[2::2] = -(pull @ (shares[0, :, 1:] * problem.x))
        scale = 1 / problem.delta**2  # steps are judged by differences: of order 1, not 1e-6
        return float(huber(residuals, problem.delta)) * scale, gradient * scale

    found = minimize(
        objective, theta, jac=True, method="L-BFGS-B", bounds=list(zip(low, high, strict=True)),
        options={"maxiter": 5000, "maxfun": 20000, "ftol": 1e-15, "gtol": 1e-10},
    )  # fmt: skip
    return np.asarray(found.x)


def best(problem: Problem) -> np.ndarray:
    """The parameters of least Huber loss over all starts, (1 + 2 K,)."""
    theta, cost = descend(problem, starts(problem))
    found = theta[np.argmin(cost)]
    polished = polish(problem, found)
    both = np.array([found, polished])
    return both[np.argmin(huber(predicted(both, problem.x) - problem.y, problem.delta))]
