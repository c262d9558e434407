"""Figures of scaling studies: what stands in them is what was measured and fitted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
import pytest

from gptlab import scaling
from gptlab.lab import figures, plots, rendering

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

HELD = {"N": 7e10, "D": 1.4e12, "loss": 1.93}
STAR = "measured, not in the fit"
PREDICTED = "predicted, 95 % interval"


def loss_of(n: np.ndarray, d: np.ndarray, seed: int = 0) -> np.ndarray:
    """Hoffmann et al. (2022), equation 10, with half a percent of noise."""
    noise = np.random.default_rng(seed).normal(0, 0.005, len(n))
    return np.asarray((1.69 + 406.4 / n**0.34 + 410.7 / d**0.28) * np.exp(noise))


def grid(sizes: int = 5) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Runs of some sizes over five amounts of text, and their losses."""
    n, d = (axis.ravel() for axis in np.meshgrid(np.geomspace(1e7, 1e10, sizes), np.geomspace(1e9, 1e12, 5)))
    return {"N": n, "D": d}, loss_of(n, d)


@pytest.fixture(scope="module")
def fit() -> scaling.Fit:
    columns, loss = grid()
    return scaling.fit(columns, loss, draws=100)


@pytest.fixture(scope="module")
def isoflop() -> tuple[scaling.IsoFlop, np.ndarray, np.ndarray]:
    """Parabolas of four budgets, and sizes and losses of their runs."""
    compute = np.repeat([1e18, 1e19, 1e20, 1e21], 7)
    best = 0.1 * compute**0.47
    n = best * np.tile(np.geomspace(0.3, 3, 7), 4)
    loss = 2 + 1e3 * compute**-0.16 + 0.08 * np.log(n / best) ** 2
    loss *= np.exp(np.random.default_rng(0).normal(0, 0.001, 28))
    return scaling.isoflop(n, loss, compute, draws=100), n, loss


def named(axes: Axes) -> dict[str, Line2D]:
    """Lines that have a name of their own, by it."""
    return {str(line.get_label()): line for line in axes.lines if not str(line.get_label()).startswith("_")}


def legend(axes: Axes) -> list[str]:
    found = axes.get_legend()
    return [text.get_text() for text in found.get_texts()] if found else []


def points(line: Line2D) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())]


def curves(axes: Axes) -> list[Line2D]:
    """Drawn lines of many points: fitted ones, not runs."""
    return [line for line in axes.lines if len(points(line)) == 100]


def written(figure: Figure, path: Path) -> str:
    """The texts of the picture as an SVG, which must be sound."""
    rendering.save(figure, path, description="What it shows & says")
    root = ElementTree.parse(path).getroot()  # noqa: S314 - our own file
    assert root.tag.endswith("}svg") and root.get("aria-label") == "What it shows & says"
    assert not re.search(r"\bNaN\b|\binf\b", path.read_text())
    return "\n".join("".join(element.itertext()) for element in root.iter() if element.tag.endswith("}text"))


def test_a_law_shows_each_size_with_its_runs_on_its_own_curve(fit: scaling.Fit, tmp_path: Path) -> None:
    columns, loss = grid()
    figure = plots.law(fit, columns, loss)
    left, _ = figure.axes
    assert legend(left) == ["N = 10M", "N = 56.2M", "N = 316M", "N = 1.78G", "N = 10G"]
    drawn = list(named(left).values())
    for n, line in zip(np.unique(columns["N"]), drawn, strict=True):
        mine = columns["N"] == n
        assert points(line) == list(zip(columns["D"][mine], loss[mine], strict=True))
        (curve,) = [one for one in curves(left) if one.get_color() == line.get_color()]
        xs, ys = np.array(points(curve)).T
        assert ys == pytest.approx(fit.predict({"N": n, "D": xs}))
        assert xs[0] < 1e9 and 1e12 < xs[-1] < 2e12, "the curve reaches a little beyond the runs"
    assert len({(line.get_color(), line.get_marker()) for line in drawn}) == 5
    assert left.get_xlabel() == "training tokens D" and (left.get_xscale(), left.get_yscale()) == ("log", "log")
    assert left.get_title(loc="left") == "loss (nats per token) and the fitted law"
    texts = written(figure, tmp_path / "law.svg")
    assert {"training tokens D", "N = 56.2M", "1G", "1T", "fitted loss"} <= set(texts.split("\n"))
    assert repr(figure) == "Figure of losses and the law through them"


def test_the_residuals_of_a_law_are_in_percent_and_above_zero_where_a_run_is_worse(fit: scaling.Fit) -> None:
    columns, loss = grid()
    _, right = plots.law(fit, columns, loss).axes
    zero, runs = right.lines
    assert points(zero) == [(0, 0), (1, 0)]
    fitted, percent = np.array(points(runs)).T
    assert fitted == pytest.approx(fit.predict(columns))
    assert percent == pytest.approx(100 * np.log(loss / fitted))
    assert (percent > 0).tolist() == (loss > fitted).tolist()
    assert right.get_title(loc="left") == "measured above the law (%)"


def test_a_held_back_run_is_a_star_beside_its_interval_and_within_the_axes(fit: scaling.Fit, tmp_path: Path) -> None:
    columns, loss = grid()
    figure = plots.law(fit, columns, loss, held=HELD)
    left, right = figure.axes
    assert legend(left)[-2:] == [STAR, PREDICTED] and len(legend(left)) == 7
    star = named(left)[STAR]
    assert points(star) == [(1.4e12, 1.93)] and star.get_marker() == "*" and star.get_color() == plots.HELD
    (bars,) = left.containers
    low, high = fit.interval({"N": [7e10], "D": [1.4e12]})[0]
    (bar,) = bars[2][0].get_segments()
    assert np.asarray(bar) == pytest.approx(np.array([[1.4e12, low], [1.4e12, high]]))
    assert len(curves(left)) == 6, "its size has a curve too"
    dashed = [curve for curve in curves(left) if curve.get_linestyle() == "--"]
    xs, ys = np.array(points(dashed[0])).T
    assert len(dashed) == 1 and ys == pytest.approx(fit.predict({"N": 7e10, "D": xs}))
    least, most = left.get_xlim()
    assert least < 1e9 and most > 1.4e12
    assert len(points(right.lines[1])) == 25, "the fit has not seen it: no residual"
    assert STAR in written(figure, tmp_path / "held.svg")


def test_an_interval_that_leaves_out_its_prediction_is_drawn_to_where_it_ends(fit: scaling.Fit) -> None:
    columns, loss = grid()
    at = {"N": HELD["N"], "D": HELD["D"]}
    shift = np.array([0.1, 0, 0.1, 0, 0.1])  # refits that all lie to one side, as two or three of them may
    for sign in (-1, 1):
        odd = replace(fit, draws=fit.theta + sign * shift + np.zeros((3, 5)), residuals=fit.residuals / 100)
        low, high = odd.interval(at)[0]
        predicted = odd.predict(at)[0]
        assert not low <= predicted <= high
        (bars,) = plots.law(odd, columns, loss, held=HELD).axes[0].containers
        (bar,) = bars[2][0].get_segments()
        assert sorted(np.asarray(bar)[:, 1]) == pytest.approx([min(low, predicted), max(high, predicted)])


def test_no_two_of_many_sizes_look_alike() -> None:
    columns, loss = grid(sizes=20)
    found = scaling.fit(columns, loss, draws=20)
    left, _ = plots.law(found, columns, loss).axes
    assert len(named(left)) == 20
    assert len({(line.get_color(), line.get_marker()) for line in named(left).values()}) == 20


@pytest.mark.parametrize(
    ("variable", "label"), [("C", "training compute C (FLOPs)"), ("D", "training tokens D"), ("width", "width")]
)
def test_a_law_of_one_variable_is_one_curve_through_its_runs(variable: str, label: str, tmp_path: Path) -> None:
    x = np.geomspace(1e8, 1e12, 12)
    loss = (1.7 + 300 * x**-0.3) * np.exp(np.random.default_rng(0).normal(0, 0.005, 12))
    found = scaling.fit({variable: x}, loss, draws=100)
    held: Mapping[str, Any] = {variable: 1e14, "loss": 1.71}
    figure = plots.law(found, {variable: x}, loss, held=held)
    left, _ = figure.axes
    assert legend(left) == ["runs", STAR, PREDICTED]
    assert points(named(left)["runs"]) == list(zip(x, loss, strict=True))
    (curve,) = curves(left)
    assert max(points(curve))[0] > 1e14, "one curve, as far as the run that was held back"
    assert left.get_xlabel() == label and label in written(figure, tmp_path / "one.svg")


def test_parabolas_show_each_budget_with_its_lowest_point(
    isoflop: tuple[scaling.IsoFlop, np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    found, n, loss = isoflop
    figure = plots.parabolas(found, n, loss)
    left, _ = figure.axes
    assert legend(left) == ["C = 1e+18", "C = 1e+19", "C = 1e+20", "C = 1e+21"]
    crosses = [line for line in left.lines if line.get_marker() == "x"]
    assert len(crosses) == len(curves(left)) == 4
    for budget, cross, curve, line in zip(found.budgets, crosses, curves(left), named(left).values(), strict=True):
        assert points(line) == list(zip(n[budget.rows], loss[budget.rows], strict=True))
        assert points(cross) == [(budget.n_opt, budget.floor)]
        assert cross.get_color() == curve.get_color() == line.get_color()
        assert min(y for _, y in points(curve)) == pytest.approx(budget.floor, rel=1e-3), "it touches its cross"
    assert left.get_xscale() == "log" and left.get_yscale() == "linear"
    assert left.get_xlabel() == "parameters N"
    assert "crosses: lowest points" in written(figure, tmp_path / "parabolas.svg")


def test_the_best_sizes_lie_on_a_line_whose_slope_the_title_says(
    isoflop: tuple[scaling.IsoFlop, np.ndarray, np.ndarray],
) -> None:
    found, n, loss = isoflop
    _, right = plots.parabolas(found, n, loss).axes
    assert len(right.containers) == 4, "a bar for each budget"
    line = right.lines[-1]
    (x0, y0), (x1, y1) = points(line)
    assert np.log(y1 / y0) / np.log(x1 / x0) == pytest.approx(found.exponent) == pytest.approx(0.47, abs=0.02)
    assert x0 < found.budgets[0].compute and x1 > found.budgets[-1].compute
    low, high = found.interval
    said = f"best size: N grows as C^{found.exponent:.2f} (95 %: {low:.2f} to {high:.2f})"
    assert right.get_title(loc="left") == said
    assert right.get_xlabel() == "training compute C (FLOPs)"
    assert (right.get_xscale(), right.get_yscale()) == ("log", "log")


def test_what_compute_buys_is_the_best_split_with_its_band_runs_and_floor(fit: scaling.Fit, tmp_path: Path) -> None:
    columns, loss = grid()
    compute = np.geomspace(1e18, 1e24, 13)
    figure = plots.frontier(fit, list(compute), columns | {"loss": loss}, held=HELD)
    left, right = figure.axes
    assert legend(left) == [
        "95 % interval", "best split, by the fit", "runs of the fit", "E: what stays", "held back, measured"
    ]  # fmt: skip
    lines = named(left)
    best = points(lines["best split, by the fit"])
    assert best == [(c, fit.best_split(c)["loss"]) for c in compute]
    assert points(lines["runs of the fit"]) == list(zip(6 * columns["N"] * columns["D"], loss, strict=True))
    assert {y for _, y in points(lines["E: what stays"])} == {fit.values["E"]}
    assert points(lines["held back, measured"]) == [(6 * 7e10 * 1.4e12, 1.93)]
    (band,) = left.collections
    corners = np.asarray(band.get_paths()[0].vertices)
    for c, y in best:
        around = corners[np.isclose(corners[:, 0], c), 1]
        assert around.min() <= y <= around.max()
    size, text = named(right)["parameters N"], named(right)["tokens D"]
    for (c, n), (_, d) in zip(points(size), points(text), strict=True):
        assert 6 * n * d == pytest.approx(c), "the split spends its compute"
    assert {axes.get_xlabel() for axes in figure.axes} == {"training compute C (FLOPs)"}
    assert "held back, measured" in written(figure, tmp_path / "frontier.svg")
    without, _ = plots.frontier(fit, list(compute), columns | {"loss": loss}).axes
    assert "held back, measured" not in legend(without)


def test_the_same_study_gives_the_same_picture_on_a_page_and_in_a_file(fit: scaling.Fit, tmp_path: Path) -> None:
    columns, loss = grid()
    made = [plots.law(fit, columns, loss, held=HELD, width=8, height=3) for _ in range(2)]
    pages = [figures.svg(figure, "A law") for figure in made]
    assert pages[0] == pages[1] and 'viewBox="0 0 576 216"' in pages[0], "8 by 3 inches"
    assert "var(--jp-ui-font-color1" in pages[0] and 'aria-label="A law"' in pages[0]
    path = figures.save(made[0], tmp_path / "law.png")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(2, 100, ["2", "5", "10", "20", "50", "100"]), (1.1, 7, ["1.5", "2", "3", "4", "5", "7"]),
     (1, 2.5, ["1", "1.2", "1.4", "1.6", "1.8", "2", "2.2", "2.4"]), (2.51, 2.99, ["2.6", "2.7", "2.8", "2.9"]),
     (9e5, 2e9, ["1M", "10M", "100M", "1G"]), (8e16, 1.5e18, ["100P", "200P", "500P", "1e+18"])],
)  # fmt: skip
def test_ticks_of_logarithmic_axes_are_numbers_to_read_aloud(low: float, high: float, ticks: list[str]) -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    axes.plot([low, high], [0.01, 10])
    axes.set_xlim(low, high)
    assert axes.get_ylim()[0] < 0, "room below the curve"
    plots.decades(axes, "x")
    labels = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
    assert [label.get_text() for place, label in labels if low <= place <= high] == ticks
    assert axes.get_yscale() == "linear", "only the axis that was asked for"
    plots.decades(axes, "y")
    assert 0 < axes.get_ylim()[0] < 0.01, "no logarithm below zero"
    assert {"0.01", "0.1", "1", "10"} <= {label.get_text() for label in axes.get_yticklabels()}
