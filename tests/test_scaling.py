"""Scaling fits: known laws are found again within their intervals, and tables that determine nothing are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptlab import scaling
from gptlab.config import ConfigError
from gptlab.presets import preset
from gptlab.scaling import laws

TRUE = {"E": 1.69, "A": 406.4, "alpha": 0.34, "B": 410.7, "beta": 0.28}
"""Hoffmann et al. (2022), equation 10."""


def chinchilla(n: np.ndarray, d: np.ndarray) -> np.ndarray:
    return TRUE["E"] + TRUE["A"] / n ** TRUE["alpha"] + TRUE["B"] / d ** TRUE["beta"]


def noisy(seed: int, noise: float = 0.005, grid: int = 5) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Runs over a grid of sizes and tokens, with normal noise on the log of the loss."""
    n, d = (axis.ravel() for axis in np.meshgrid(np.geomspace(1e7, 1e10, grid), np.geomspace(1e9, 1e12, grid)))
    return {"N": n, "D": d}, chinchilla(n, d) * np.exp(np.random.default_rng(seed).normal(0, noise, len(n)))


def test_a_law_without_noise_is_found_exactly() -> None:
    columns, loss = noisy(0, noise=0.0)
    found = scaling.fit(columns, loss)
    for name, value in TRUE.items():
        assert found.values[name] == pytest.approx(value, rel=1e-3), name
    assert np.abs(found.residuals).max() < 1e-6
    assert found.law == "L(N, D) = E + A/N^alpha + B/D^beta"
    assert found.predict({"N": 7e10, "D": 1.4e12})[0] == pytest.approx(
        chinchilla(np.array([7e10]), np.array([1.4e12]))[0], rel=1e-4
    )


def test_known_exponents_lie_in_their_intervals_in_at_least_88_of_100_noisy_tables() -> None:
    hits = {"alpha": 0, "beta": 0, "both": 0}
    for seed in range(100):
        columns, loss = noisy(seed)
        found = scaling.fit(columns, loss, draws=150)
        inside = {
            name: found.intervals[name][0] <= TRUE[name] <= found.intervals[name][1] for name in hits if name in TRUE
        }
        for name, held in inside.items():
            hits[name] += held
        hits["both"] += all(inside.values())
    assert min(hits.values()) >= 88, hits
    assert hits["both"] < 100, "intervals that always hold the truth say nothing"


@pytest.mark.parametrize("variable", ["N", "D", "C"])
def test_one_variable_at_a_time(variable: str) -> None:
    x = np.geomspace(1e8, 1e12, 12)
    hits = 0
    for seed in range(24):
        loss = (1.7 + 300 * x**-0.3) * np.exp(np.random.default_rng(seed).normal(0, 0.005, len(x)))
        found = scaling.fit({variable: x}, loss, draws=150)
        low, high = found.intervals[list(found.values)[2]]
        hits += low <= 0.3 <= high
    assert next(iter(found.values)) == "E" and found.law.startswith(f"L({variable}) = E + ")
    assert hits >= 20


def test_one_bad_run_hardly_moves_the_fit() -> None:
    columns, loss = noisy(1)
    spoilt = loss.copy()
    spoilt[12] *= 1.4
    before, after = scaling.fit(columns, loss, draws=20), scaling.fit(columns, spoilt, draws=20)
    assert after.values["alpha"] == pytest.approx(before.values["alpha"], rel=0.1)
    assert after.residuals[12] > 0.25


def test_all_descents_at_once_reach_what_scipy_reaches_alone() -> None:
    columns, loss = noisy(2, noise=0.01)
    logs = np.log(np.column_stack(list(columns.values())))
    problem = laws.Problem(logs - logs.mean(0), np.log(loss), 1e-3)
    many, cost = laws.descend(problem, laws.starts(problem))
    alone = laws.polish(problem, laws.starts(problem)[24])
    reached = laws.huber(laws.predicted(alone[None], problem.x) - problem.y, problem.delta)[0]
    assert cost.min() == pytest.approx(reached, rel=1e-3)
    assert many[np.argmin(cost)][2::2] == pytest.approx(alone[2::2], abs=0.01)


def test_a_held_back_run_is_predicted_with_an_interval_that_holds_it() -> None:
    inside = 0
    for seed in range(8):
        columns, loss = noisy(seed)
        found = scaling.check(columns, loss, hold_back=1, draws=150)
        assert found.rows == [24] and found.measured[0] == loss[24]
        low, high = found.intervals[0]
        inside += low <= loss[24] <= high
        assert abs(found.errors[0]) < 0.03 and low < found.predicted[0] < high
    assert inside >= 6


def test_the_best_split_is_the_lowest_loss_of_its_compute() -> None:
    columns, loss = noisy(0, noise=0.0)
    found = scaling.fit(columns, loss)
    split = found.best_split(1e21)
    n = np.geomspace(split["N"] / 30, split["N"] * 30, 2001)
    tried = chinchilla(n, 1e21 / 6 / n)
    assert split["loss"] == pytest.approx(tried.min(), rel=1e-5)
    assert split["N"] == pytest.approx(n[tried.argmin()], rel=0.02)
    assert 6 * split["N"] * split["D"] == pytest.approx(1e21)


def _few(columns: dict[str, np.ndarray], loss: np.ndarray) -> Any:
    return {name: column[:6] for name, column in columns.items()}, loss[:6]


def _one_size(columns: dict[str, np.ndarray], loss: np.ndarray) -> Any:
    return columns | {"N": np.full_like(loss, 1e8)}, loss


def _together(columns: dict[str, np.ndarray], loss: np.ndarray) -> Any:
    n = np.geomspace(1e7, 1e10, 25)
    return {"N": n, "D": 20 * n}, chinchilla(n, 20 * n)


def _noise_alone(columns: dict[str, np.ndarray], loss: np.ndarray) -> Any:
    return columns, 3.0 * np.exp(np.random.default_rng(0).normal(0, 0.02, len(loss)))


def _negative(columns: dict[str, np.ndarray], loss: np.ndarray) -> Any:
    return columns, np.where(np.arange(len(loss)) == 3, -1.0, loss)


def _diverged(columns: dict[str, np.ndarray], loss: np.ndarray) -> Any:
    return columns, np.where(np.arange(len(loss)) == 3, np.nan, loss)


def _narrow(columns: dict[str, np.ndarray], loss: np.ndarray) -> Any:
    n, d = columns["N"] ** 0.02 * 1e9, columns["D"] ** 0.02 * 1e11
    return {"N": n, "D": d}, chinchilla(n, d) * np.exp(np.random.default_rng(0).normal(0, 0.005, len(loss)))


@pytest.mark.parametrize(
    ("spoil", "word"),
    [(_few, "6 runs cannot determine"), (_one_size, "N takes 1 value"), (_together, "N and D move together"),
     (_noise_alone, "not determined"), (_negative, "loss -1"), (_diverged, "loss nan"), (_narrow, "value")],
)  # fmt: skip
def test_a_table_that_determines_nothing_is_refused(spoil: Callable[..., Any], word: str) -> None:
    columns, loss = spoil(*noisy(0))
    with pytest.raises(scaling.Undetermined, match=word) as refused:
        scaling.fit(columns, loss, draws=100)
    assert str(refused.value).count(". ") == 0  # one sentence


def test_iso_flop_parabolas_find_the_best_sizes() -> None:
    exponent = TRUE["beta"] / (TRUE["alpha"] + TRUE["beta"])  # Hoffmann et al. (2022), equation 4
    compute = np.repeat([1e18, 1e19, 1e20, 1e21], 7)
    best = np.array([scaling_best(c) for c in compute])
    n = best * np.tile(np.geomspace(0.4, 2.5, 7), 4)
    hits = 0
    for seed in range(30):
        loss = chinchilla(n, compute / 6 / n) * np.exp(np.random.default_rng(seed).normal(0, 0.001, len(n)))
        found = scaling.isoflop(n, loss, compute, draws=200)
        assert [len(budget.rows) for budget in found.budgets] == [7] * 4 and not found.skipped
        assert found.exponent == pytest.approx(exponent, abs=0.05)
        assert found.n_opt(1e22) * found.d_opt(1e22) * 6 == pytest.approx(1e22)
        hits += found.interval[0] <= exponent <= found.interval[1]
    assert hits >= 26


def scaling_best(compute: float) -> float:
    """N_opt of the law above."""
    a, b = TRUE["alpha"], TRUE["beta"]
    return float((a * TRUE["A"] / (b * TRUE["B"])) ** (1 / (a + b)) * (compute / 6) ** (b / (a + b)))


def test_iso_flop_budgets_without_a_lowest_point_are_refused() -> None:
    compute = np.repeat([1e18, 1e19, 1e20], 5)
    n = np.array([scaling_best(c) for c in compute]) * np.tile(np.geomspace(3, 30, 5), 3)  # all too large
    with pytest.raises(scaling.Undetermined, match="smaller size than any"):
        scaling.isoflop(n, chinchilla(n, compute / 6 / n), compute)


def test_three_ways_to_count_n() -> None:
    assert scaling.sizes(preset("gpt2")) == {"all": 124439808, "non_embedding": 85056000, "matmul": 123568128}
    assert set(scaling.sizes(preset("tiny"))) == set(scaling.CONVENTIONS)


def test_any_table_is_read_and_compute_gives_tokens(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text('params,FLOPs,final,note\n"1,000,000",6e14,3.1,ok\n2e6,1.2e15,,diverged\n3e6,1.8e16,2.5,ok\n')
    points = scaling.read_csv(path, n="params", c="FLOPs", loss="final")
    assert points.left_out == 1 and list(points.loss) == [3.1, 2.5]
    assert list(points.columns["D"]) == [1e8, 1e9]
    with pytest.raises(ConfigError, match="did you mean 'params'"):
        scaling.read_csv(path, n="param", loss="final")
    with pytest.raises(ConfigError, match="There is no file"):
        scaling.read_csv(tmp_path / "none.csv", n="params", loss="final")
