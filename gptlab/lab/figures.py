"""Curves of runs: one drawing code for the live view, the saved picture and the demo.

Loss, tokens per second and MFU of up to 16 runs, raw values faint and smoothed ones clear, a colour and a dash
pattern to each run. The live view, PNG files and reports call the same functions, so they never disagree.

    >>> from gptlab.lab import figures
    >>> from gptlab.runs import list_runs
    >>> figures.draw([figures.read(run) for run in list_runs()]).savefig("runs.png")

Nothing here uses pyplot: matplotlib's global state belongs to the user. matplotlib is not safe in two threads at once
(its text parser is global), so a kernel calls this on its main thread alone; the live view is drawn in a process of its
own (`drawing.py`). Left out on purpose: which runs to show, and when (`drawing.py`).
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gptlab.runs import Run

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

XAxis = Literal["step", "tokens", "flops", "time_s"]
X_LABELS: dict[XAxis, str] = {
    "step": "optimizer steps",
    "tokens": "tokens seen",
    "flops": "FLOPs spent",
    "time_s": "seconds of training",
}
"""What the horizontal axis can count."""

# Okabe and Ito's palette for the colour-blind (2008), its yellow and black replaced by an olive and a violet that can
# be seen on white and on black pages alike.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8f8f1f", "#7a5fc0")
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (7, 2, 1.5, 2))
MOST_CURVES = len(COLOURS) * 2
"""More curves than this in one picture cannot be told apart."""

TIMES = "\N{MULTIPLICATION SIGN}"
INK, RULE = "#24292e", "#d8dce1"
"""Text and grid lines. On a notebook page they become the theme's own colours, see `svg`."""
_RAW_POINTS, _SMOOTH_POINTS = 160, 80  # of a curve, at most: what a panel 500 pixels wide can show


@dataclass(frozen=True)
class Series:
    """What a run measured, a float64 array a column; NaN where a row lacks it."""

    name: str
    label: str
    columns: dict[str, np.ndarray]
    """step, tokens, flops, time_s, loss, tokens_per_s, mfu, each (rows,); val_step and val_loss, each (looks,)."""


def style(index: int) -> tuple[str, tuple[float, ...]]:
    """Colour and dash pattern (on, off, ... in line widths; empty is solid) of the index-th run: unique up to 16."""
    return COLOURS[index % 8], DASHES[(index + index // 8) % 4]


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
    return Series(run.name, label or TIMES.join(map(str, (config.n_layer, config.n_head, config.n_embd))), columns)


def empty(name: str, label: str) -> Series:
    """The curves of a run that has not begun: its colour is kept for it."""
    import numpy as np

    names = [*X_LABELS, "loss", "tokens_per_s", "mfu", "val_loss", *(f"val_{x}" for x in X_LABELS)]
    return Series(name, label, {name: np.empty(0) for name in names})


def draw(
    series: Sequence[Series], *, x: XAxis = "step", legend: bool = True, width: float = 10.0, height: float = 4.4
) -> Figure:
    """Loss on the left, tokens per second and MFU on the right.

    Args:
        series: at most `MOST_CURVES`; each keeps the colour of its place in the list.
        legend: whether names stand beside the curves; the live view's table shows them instead.
        width, height: inches, at 100 dots each in a PNG shown on a page.
    """
    import matplotlib
    from matplotlib.gridspec import GridSpec

    right = 0.865 if legend else 0.98
    with matplotlib.rc_context(_RC):
        figure = _picture(width, height)
        # Fixed margins: tight and constrained layouts draw everything twice.
        grid = GridSpec(2, 2, figure, width_ratios=(1.55, 1), left=0.06, right=right, top=0.93, bottom=0.12,
                        wspace=0.17, hspace=0.34)  # fmt: skip
        loss = figure.add_subplot(grid[:, 0])
        speed, mfu = figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[1, 1])
        for axes, title in (
            (loss, "loss (nats per token; dots: validation)"),
            (speed, "tokens per second"),
            (mfu, "MFU (% of the peak rate)"),
        ):
            axes.set_title(title, loc="left")
        loss.set_xlabel(X_LABELS[x])
        mfu.set_xlabel(X_LABELS[x])
        if not any(len(one.columns["loss"]) for one in series):
            _say_empty((loss, speed, mfu))
            return figure
        _draw_loss(loss, series, x)
        _draw_rate(speed, series, x, "tokens_per_s", 1.0)
        _draw_rate(mfu, series, x, "mfu", 100.0)
        # Raw curves and dots carry matplotlib's hidden labels, which begin with an underscore.
        lines = [line for line in loss.get_lines() if not str(line.get_label()).startswith("_")]
        lines = [line for line, one in zip(lines, series, strict=True) if len(one.columns["loss"])]
        if legend and lines:
            figure.legend(
                lines, [str(line.get_label()) for line in lines], loc="upper left", bbox_to_anchor=(right, 0.95),
                title=f"layers {TIMES}\nheads {TIMES} width", frameon=False, handlelength=2.4,
            )  # fmt: skip
    return figure


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
        said.append(f"{one.label} at step {last['step']:.0f}: loss {last['loss']:.3f}{speed}{mfu}")
    return "Curves of loss, tokens per second and MFU. " + ("; ".join(said) or "No runs yet") + "."


def svg(figure: Figure, description: str) -> str:
    """The picture as an SVG element for a page: text as text, the page's own colours and fonts, and a description."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context(_RC):
        # A fixed salt and no date: the same curves give the same text, and an unchanged picture need not be sent.
        figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    body = text.getvalue()
    body = body[body.index("<svg") :]
    box = re.search(r'viewBox="[^"]*"', body)
    assert box is not None
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    # A tenth of a point is finer than a pixel. Within tags only: a text may be a number too.
    body = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d+\.\d)\d+", r"\1", tag.group()), body)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box.group()} role="img" '
        f'aria-label="{html.escape(description)}" style="width:100%;height:auto;display:block">'
    )
    body = head + body[body.index(">") + 1 :]
    body = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--jp-ui-font-family, sans-serif)", body)
    body = body.replace(INK, f"var(--jp-ui-font-color1, {INK})").replace(RULE, f"var(--jp-border-color2, {RULE})")
    return re.sub(r"\n\s*", "\n", body)


def save_png(figure: Figure, path: str) -> None:
    """Writes the picture on white, at 200 dots an inch."""
    import matplotlib

    with matplotlib.rc_context(_RC):
        figure.savefig(path, format="png", dpi=200, facecolor="white")


_RC: Any = {
    "font.family": "sans-serif", "font.size": 9.0, "axes.titlesize": 9.5, "axes.labelsize": 9.0,
    "text.color": INK, "axes.labelcolor": INK, "axes.titlecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.edgecolor": INK, "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": RULE, "grid.linewidth": 0.6, "axes.formatter.use_mathtext": False, "text.parse_math": False,
    "text.usetex": False, "svg.fonttype": "none", "svg.hashsalt": "gptlab", "path.simplify": True,
    "figure.autolayout": False, "figure.constrained_layout.use": False,
    "legend.fontsize": 8.5, "legend.title_fontsize": 8.5,
}  # fmt: skip


def _picture(width: float, height: float) -> Figure:
    """A Figure that a notebook shows as PNG without pyplot and its backends."""
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            import matplotlib

            data = io.BytesIO()
            with matplotlib.rc_context(_RC):
                self.savefig(data, format="png", dpi=100, facecolor="white")
            return data.getvalue()

        def __repr__(self) -> str:
            return "Figure of loss, tokens per second and MFU"

    return Picture(figsize=(width, height))


def _say_empty(panels: Sequence[Axes]) -> None:
    """Axes without values, so that no made-up ticks stand on them."""
    for axes in panels:
        axes.set_xticks([])
        axes.set_yticks([])
    panels[0].text(0.5, 0.5, "no points yet", transform=panels[0].transAxes, ha="center", va="center")


def _draw_loss(axes: Axes, series: Sequence[Series], x: XAxis) -> None:
    import numpy as np

    late: list[np.ndarray] = []
    furthest = _furthest(series, x)
    for index, one in enumerate(series):
        smooth_at, smooth = _plot(axes, index, one.columns[x], one.columns["loss"], one.label)
        axes.plot(one.columns[f"val_{x}"], one.columns["val_loss"], "o", color=style(index)[0], markersize=4.5,
                  markeredgewidth=0, zorder=3, clip_on=False)  # fmt: skip
        late += [smooth[smooth_at >= 0.2 * furthest], one.columns["val_loss"][-1:]]
    # The first steep fall would press the differences between runs into one line: it may leave at the top.
    seen = np.concatenate([*late, np.empty(0)])
    seen = seen[np.isfinite(seen)]
    if len(seen):
        margin = 0.06 * (seen.max() - seen.min()) + 0.01
        axes.set_ylim(seen.min() - margin, seen.max() + margin)
    _frame_x(axes, furthest)


def _draw_rate(axes: Axes, series: Sequence[Series], x: XAxis, name: str, factor: float) -> None:
    import numpy as np
    from matplotlib.ticker import FuncFormatter

    highest = 0.0
    for index, one in enumerate(series):
        keep = np.isfinite(one.columns[name])
        _, smooth = _plot(axes, index, one.columns[x][keep], one.columns[name][keep] * factor, one.label)
        highest = max(highest, float(smooth.max(initial=0.0)))
    axes.set_ylim(0, highest * 1.12 or 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    _frame_x(axes, _furthest(series, x))
    if not highest and any(len(one.columns["loss"]) for one in series):
        axes.text(0.5, 0.5, "the peak rate of this device is unknown" if name == "mfu" else "not measured",
                  transform=axes.transAxes, ha="center", va="center")  # fmt: skip


def _frame_x(axes: Axes, furthest: float) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.set_xlim(0, furthest or 1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.margins(x=0)


def _furthest(series: Sequence[Series], x: XAxis) -> float:
    return max((float(one.columns[x][-1]) for one in series if len(one.columns[x])), default=0.0)


def _plot(axes: Axes, index: int, at: np.ndarray, raw: np.ndarray, label: str) -> tuple[np.ndarray, np.ndarray]:
    """Draws a run's raw values faint and smoothed ones clear; gives the smoothed curve, two arrays (points,)."""
    colour, dashes = style(index)
    smooth = _smooth(raw)
    axes.plot(*_thin(at, raw, _RAW_POINTS), color=colour, linewidth=0.6, alpha=0.2)
    points = _thin(at, smooth, _SMOOTH_POINTS)
    axes.plot(*points, color=colour, linewidth=1.5, linestyle=(0, dashes) if dashes else "-", label=label)
    return points


def _thin(at: np.ndarray, values: np.ndarray, points: int) -> tuple[np.ndarray, np.ndarray]:
    """At most so many points, each the mean of its neighbours; the last one stays. Both (rows,) -> (points,)."""
    import numpy as np

    rows = len(values)
    if rows <= points:
        return at, values
    starts = np.linspace(0, rows - 1, points - 1, endpoint=False).astype(int)
    counts = np.diff(np.append(starts, rows - 1))
    means = [np.add.reduceat(column[:-1], starts) / counts for column in (at, values)]
    return np.append(means[0], at[-1]), np.append(means[1], values[-1])


def _smooth(values: np.ndarray) -> np.ndarray:
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
    """A number for an axis or a cell: 950, 12.5k, 3.2M, 1.1G, 4T, 2P."""
    if not math.isfinite(value):
        return "?"
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
