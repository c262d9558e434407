"""The lab's pictures: curves, their words, themes and files."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
from labtools import made_run

from gptlab.lab import figures, tables


def test_styles_are_unique_for_sixteen_runs() -> None:
    assert len({figures.style(index) for index in range(figures.MOST_CURVES)}) == figures.MOST_CURVES == 16
    assert len({figures.style(index)[1] for index in range(8)}) == 8, "without colours the dashes tell eight apart"


def test_svg_is_text_with_the_page_s_colours_and_says_last_values(tmp_path: Path) -> None:
    one = figures.read(made_run(tmp_path), "1 & <2>")
    picture = figures.svg(figures.draw([one], legend=True), figures.describe([one]))
    loss = one.columns["loss"][-1]
    assert picture.startswith("<svg") and 'role="img"' in picture
    assert f"1 &amp; &lt;2&gt; at step 50: loss {loss:.3f}, 40,000 tokens per second, MFU 20.0 %" in picture
    assert "tokens per second</text>" in picture, "text stays text"
    assert "var(--jp-ui-font-color1" in picture and "<script" not in picture
    again = figures.svg(figures.draw([one], legend=True), figures.describe([one]))
    assert picture == again, "an unchanged picture need not be sent"


def test_a_figure_that_is_drawn_anew_is_as_a_new_one(tmp_path: Path) -> None:
    one = figures.read(made_run(tmp_path, rows=300, max_iters=300))
    flat = dataclasses.replace(one, columns=one.columns | {"loss": one.columns["loss"] * 0.01 + 2})
    unknown = dataclasses.replace(one, columns=one.columns | {"mfu": one.columns["mfu"] * float("nan")})
    lost = dataclasses.replace(one, columns=one.columns | {"loss": one.columns["loss"] * float("nan")})
    again = dataclasses.replace(one, restarts=[(21, 30)])
    used = figures.draw([], legend=False)
    asked: list[tuple[list[figures.Series], dict[str, bool]]] = [
        ([one], {}), ([one, again], {"log_x": True}), ([], {}), ([flat], {"log_y": True}), ([lost], {}),
        ([one], {"log_y": True}), ([unknown], {}), ([figures.empty("a", "a")], {"log_x": True}), ([lost], {}),
        ([one], {}),
    ]  # fmt: skip
    for series, axes in asked:
        new = figures.draw(series, legend=False, **axes)  # type: ignore[arg-type]
        assert figures.draw(series, legend=False, onto=used, **axes) is used  # type: ignore[arg-type]
        assert figures.page(used, "") == figures.page(new, ""), (series, axes)


def test_a_user_s_dots_an_inch_move_no_label(tmp_path: Path) -> None:
    one = figures.read(made_run(tmp_path))
    usual = figures.svg(figures.draw([one]), "")
    with matplotlib.rc_context({"figure.dpi": 50}):
        assert figures.svg(figures.draw([one]), "") == usual


def test_a_picture_says_nothing_about_the_rest_of_its_page(tmp_path: Path) -> None:
    one = figures.read(made_run(tmp_path))
    assert "<style" not in figures.page(figures.draw([one], legend=False), "")
    assert "<style" not in tables.table([], {}) and "<style" in tables.STYLE


def test_numbers_on_axes_keep_their_digits(tmp_path: Path) -> None:
    figure = figures.draw([figures.read(made_run(tmp_path))])
    figure.axes[0].set_yticks([2.25, 2.75])
    picture = figures.svg(figure, "")
    assert ">2.25</text>" in picture and ">2.75</text>" in picture


def test_names_are_never_markup_or_mathematics(tmp_path: Path) -> None:
    one = figures.empty("x", "$\\frac{<b>$")
    assert "no points yet" in figures.svg(figures.draw([one]), figures.describe([one]))
    run = figures.read(made_run(tmp_path), "$\\frac{<b>$")
    assert "&lt;b&gt;" in figures.svg(figures.draw([run]), "")
    row = {"name": "x", "n_layer": "<i>", "n_head": 1, "n_embd": 1, "state": "<script>", "reason": "<img>"}
    assert not re.search(r"<(i|script|img)>", tables.table([row], {}))


def test_long_curves_are_thinned_and_keep_their_end(tmp_path: Path) -> None:
    one = figures.read(made_run(tmp_path, rows=2000, max_iters=2000))
    raw, smooth = figures.draw([one]).axes[0].get_lines()[:2]
    assert len(raw.get_xdata()) <= 160 and len(smooth.get_xdata()) <= 80  # type: ignore[arg-type]
    assert smooth.get_xdata()[-1] == 2000  # type: ignore[index]
    late = one.columns["loss"][1000:]
    assert abs(smooth.get_ydata()[-1] - late.mean()) < 0.05  # type: ignore[index]


def test_log_axes_bands_and_places(tmp_path: Path) -> None:
    one = figures.read(made_run(tmp_path))
    again = dataclasses.replace(one, restarts=[(21, 30)])
    assert "50: loss" in figures.describe([again]) and "1 restart" in figures.describe([again])
    plain, banded = figures.draw([one]), figures.draw([again], places=[5])
    assert not plain.axes[0].patches and len(banded.axes[0].patches) == 1, "a restart is a band"
    assert banded.axes[0].get_lines()[1].get_color() == figures.COLOURS[5], "a run keeps its colour"
    left, right = banded.axes[0].patches[0].get_extents().transformed(banded.axes[0].transData.inverted()).intervalx
    assert (round(left), round(right)) == (21, 30)
    for x in figures.X_LABELS:
        figure = figures.draw([one], x=x, log_x=True, log_y=True)
        assert figure.axes[0].get_xscale() == figure.axes[0].get_yscale() == "log"
        assert figures.X_LABELS[x] in figures.svg(figure, "")


def test_the_legend_stands_beside_the_curves_inside_the_picture(tmp_path: Path) -> None:
    one = figures.read(made_run(tmp_path))
    for labels in (["2\N{MULTIPLICATION SIGN}2\N{MULTIPLICATION SIGN}64"] * 9, ["lab-1a2b3c-" + "4x4x128-" * 9, "b"]):
        figure = figures.draw([dataclasses.replace(one, label=label) for label in labels])
        figure.canvas.draw()
        (legend,) = figure.legends
        box = legend.get_window_extent()
        assert box.x1 <= figure.bbox.x1 and box.y0 >= 0
        for axes in figure.axes:
            tight = axes.get_tightbbox()
            assert tight is not None and tight.x1 < box.x0, "nothing of a panel reaches into it"


def test_files_have_a_theme_and_are_whole(tmp_path: Path) -> None:
    one = figures.read(made_run(tmp_path))
    dark = figures.draw([one], theme="dark")
    vector = figures.save(dark, tmp_path / "a.svg", description="said").read_text()
    assert 'aria-label="said"' in vector and "#16181b" in vector and "var(--jp" not in vector
    assert figures.save(dark, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.glob("*a.*")) == ["a.png", "a.svg"]


def test_figure_needs_no_pyplot_and_shows_itself(tmp_path: Path) -> None:
    code = (
        "import sys; from gptlab.lab import figures; p = figures.draw([figures.empty('a', 'a')])._repr_png_();"
        "assert p.startswith(b'\\x89PNG'); assert not {'matplotlib.pyplot', 'torch'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_page_s_picture_is_two_panes_that_together_are_the_whole(tmp_path: Path) -> None:
    one = figures.read(made_run(tmp_path))
    figure = figures.draw([one], legend=False)
    words = figures.describe([one])
    panes, whole = figures.page(figure, words), figures.svg(figure, words)
    left, right = panes.split("<svg ")[1:]
    assert "loss (nats" in left and "loss (nats" not in right and "tokens per second</text>" in right
    for text in re.findall(r"<text.*?</text>", whole, re.DOTALL):
        assert panes.count(text) == whole.count(text), "no text is lost or said twice"
    assert panes.count("aria-label") == 1 and 'aria-hidden="true"' in right
    boxes = [[float(part) for part in box.split()] for box in re.findall(r'viewBox="([^"]*)"', panes)]
    assert boxes[0][2] == pytest.approx(boxes[1][0], abs=0.1)
    assert boxes[1][0] + boxes[1][2] == pytest.approx(720, abs=0.1)
    assert panes.count("</g>") == whole.count("</g>")
    assert "no points yet" in figures.page(figures.draw([], legend=False), "")
