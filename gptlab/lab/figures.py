"""Curves of runs: one drawing code for the live view, saved pictures, reports and the demo.

Loss, tokens per second and MFU of up to 16 runs, raw values faint and smoothed ones clear, a colour and a dash
pattern to each run, restarts as bands. The live view, files and reports call the same functions, so they never
disagree.

    >>> from gptlab.lab import figures
    >>> from gptlab.runs import list_runs
    >>> figures.draw([figures.read(run) for run in list_runs()], x="tokens", log_y=True).savefig("runs.png")

Nothing here uses pyplot: matplotlib's global state belongs to the user. matplotlib is not safe in two threads at once
(its text parser is global), so a kernel calls this on its main thread alone; the live view is drawn in a process of its
own (`drawing.py`). Left out on purpose: reading runs (`curves.py`), files and themes (`rendering.py`), which runs to
show, and when (`drawing.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gptlab.lab.curves import TIMES as TIMES
from gptlab.lab.curves import X_LABELS, Series, XAxis, describe, empty, furthest, read, short, smooth, thin
from gptlab.lab.rendering import Theme, canvas, panes, save, settings, svg

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "DASHES", "MOST_CURVES", "TIMES", "X_LABELS", "Series", "XAxis", "describe", "draw", "empty",
           "page", "read", "save", "short", "style", "svg"]  # fmt: skip

# Okabe and Ito's palette for the colour-blind (2008), its yellow and black replaced by an olive and a violet that can
# be seen on white and on black pages alike.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8f8f1f", "#7a5fc0")
DASHES: tuple[tuple[float, ...], ...] = (
    (), (5, 2), (1.5, 1.5), (7, 2, 1.5, 2), (11, 3), (1.5, 4), (7, 2, 1.5, 2, 1.5, 2), (3, 3),
)  # fmt: skip
"""On, off, ... in line widths: as many as there are colours, so that eight lines can be told apart without any."""
MOST_CURVES = len(COLOURS) * 2
"""More curves than this in one picture cannot be told apart."""
_RAW_POINTS, _SMOOTH_POINTS = 160, 80  # of a curve, at most: what a panel 500 pixels wide can show
_LONGEST_LABEL = 30
_TICKS = 0.045  # of the width: what the numbers beside an axis take
_LEAST_BAND = 0.004  # of the axis: a restart that lost no step is still to be seen


def style(index: int) -> tuple[str, tuple[float, ...]]:
    """Colour and dash pattern (on, off, ... in line widths; empty is solid) of the index-th run: unique up to 16."""
    return COLOURS[index % 8], DASHES[(index + index // 8) % 8]


def draw(
    series: Sequence[Series],
    *,
    x: XAxis = "step",
    log_x: bool = False,
    log_y: bool = False,
    places: Sequence[int] | None = None,
    legend: bool = True,
    theme: Theme = "light",
    width: float = 10.0,
    height: float = 4.4,
    onto: Figure | None = None,
) -> Figure:
    """Loss on the left, tokens per second and MFU on the right.

    Args:
        series: at most `MOST_CURVES`.
        log_x, log_y: logarithmic axes, the second for the loss alone: speeds begin at zero.
        places: what `style` each curve has; its place in the list unless told otherwise.
        legend: whether names stand beside the curves; the live view's table shows them instead.
        theme: of a file; an SVG for a page takes the page's own colours.
        width, height: inches, at 100 dots each in a PNG shown on a page.
        onto: a figure that this function made without a legend and with the same theme and size: it is drawn anew and
            given back. The same picture for half the work, most of which is making axes and ticks.
    """
    import matplotlib

    places = list(range(len(series))) if places is None else places
    labels = [_shortened(one.label) for one in series]
    heading = f"layers {TIMES}\nheads {TIMES} width" if all(TIMES in label for label in labels) else None
    letters = max([len("heads x width") if heading else 0, *(len(label) for label in labels)])
    right = 1 - ((0.058 + 0.0076 * letters) * 10 / width if legend and labels else 0.02)
    with matplotlib.rc_context(settings(theme)):
        figure = onto or _panels(width, height, right, theme)
        panels = loss, speed, mfu = figure.axes
        for axes in panels:
            _wipe(axes)
        loss.set_xlabel(X_LABELS[x])
        mfu.set_xlabel(X_LABELS[x])
        if not any(len(one.columns["loss"]) for one in series):
            _say_empty(panels)
            return figure
        lines = _draw_loss(loss, series, places, x, log_x, log_y)
        _draw_rate(speed, series, places, x, log_x, "tokens_per_s", 1.0)
        _draw_rate(mfu, series, places, x, log_x, "mfu", 100.0)
        for axes in panels:
            _frame_x(axes, series, x, log_x)
            _draw_restarts(axes, series, places, x)
        shown = [
            (line, label) for line, label, one in zip(lines, labels, series, strict=True) if len(one.columns["loss"])
        ]
        if legend and shown:
            figure.legend(
                *zip(*shown, strict=True), loc="upper left", bbox_to_anchor=(right + 0.014, 0.95),
                title=heading, frameon=False, handlelength=2.4, borderaxespad=0, alignment="left",
            )  # fmt: skip
    return figure


def _panels(width: float, height: float, right: float, theme: Theme) -> Figure:
    """A figure with three empty axes that are titled: loss, tokens per second, MFU."""
    from matplotlib.gridspec import GridSpec

    figure = canvas(width, height, "loss, tokens per second and MFU", theme)
    # Fixed margins: tight and constrained layouts draw everything twice.
    grid = GridSpec(2, 2, figure, width_ratios=(1.55, 1), left=0.06, right=right, top=0.93, bottom=0.12,
                    wspace=0.17, hspace=0.34)  # fmt: skip
    titles = ("loss (nats per token; dots: validation)", "tokens per second", "MFU (% of the peak rate)")
    for place, title in zip((grid[:, 0], grid[0, 1], grid[1, 1]), titles, strict=True):
        axes = figure.add_subplot(place)
        # Where titles and labels stand is said, and the grid's lines mark the ticks: to look for a place that is free,
        # and to draw the marks, is half of the work of each picture.
        axes.set_title(title, loc="left", y=1.0)
        axes.xaxis.set_label_coords(0.5, -0.28 * figure.dpi / axes.bbox.height)  # inches
        axes.yaxis.set_label_coords(0, 0.5)
        axes.tick_params(which="both", bottom=False, left=False)
    return figure


def _wipe(axes: Axes) -> None:
    """Leaves of axes what new ones are: frame, title and automatic ticks on linear scales."""
    for artist in (*axes.lines, *axes.patches, *axes.texts):
        artist.remove()
    axes.set_xscale("linear")
    axes.set_yscale("linear")
    axes.relim()
    axes.autoscale()


def page(figure: Figure, description: str) -> str:
    """What `draw` has drawn, without a legend, for a page: loss and speeds, side by side where there is room."""
    speed = figure.axes[1].get_position()
    return panes(figure, description, cut=speed.x0 - _TICKS)


def _shortened(label: str) -> str:
    """A label that leaves room for the curves: names of one sweep differ at their ends."""
    half = _LONGEST_LABEL // 2
    return label if len(label) <= _LONGEST_LABEL else f"{label[: half - 1]}\N{HORIZONTAL ELLIPSIS}{label[-half:]}"


def _say_empty(panels: Sequence[Axes]) -> None:
    """Axes without values, so that no made-up ticks stand on them."""
    for axes in panels:
        axes.set_xticks([])
        axes.set_yticks([])
    panels[0].text(0.5, 0.5, "no points yet", transform=panels[0].transAxes, ha="center", va="center")


def _draw_loss(
    axes: Axes, series: Sequence[Series], places: Sequence[int], x: XAxis, log_x: bool, log_y: bool
) -> list[object]:
    """Draws the losses; gives the smoothed lines, one a run."""
    import numpy as np
    from matplotlib.ticker import FuncFormatter, NullFormatter

    late: list[np.ndarray] = []
    lines: list[object] = []
    begin = furthest(series, x) * (0.01 if log_x else 0.2)
    for place, one in zip(places, series, strict=True):
        line, smooth_at, smoothed = _plot(axes, place, one.columns[x], one.columns["loss"], log_x)
        lines.append(line)
        late += [smoothed[smooth_at >= begin], one.columns["val_loss"][-1:]]
    # The first steep fall would press the differences between runs into one line: it may leave at the top.
    seen = np.concatenate([*late, np.empty(0)])
    seen = seen[np.isfinite(seen)]
    if len(seen):
        margin = 0.06 * (seen.max() - seen.min()) + 0.01
        low, high = seen.min() - margin, seen.max() + margin
        if log_y and seen.min() > 0:
            axes.set_yscale("log", subs=(1, 1.5, 2, 3, 4, 5, 6, 8))
            axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: short(value)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
            if high / low < 1.6:  # too little of a decade for its marks
                axes.set_yticks(np.round(np.geomspace(low, high, 6)[1:-1], 2))
                axes.yaxis.set_minor_formatter(NullFormatter())
            low = max(low, 0.9 * seen.min())
        axes.set_ylim(low, high)
    top = axes.get_ylim()[1]
    for place, one in zip(places, series, strict=True):
        seen = one.columns["val_loss"] <= top  # the last ones stand on the frame, so they are not cut by it
        axes.plot(one.columns[f"val_{x}"][seen], one.columns["val_loss"][seen], "o", color=style(place)[0],
                  markersize=4.5, markeredgewidth=0, zorder=3, clip_on=False)  # fmt: skip
    return lines


def _draw_rate(
    axes: Axes, series: Sequence[Series], places: Sequence[int], x: XAxis, log_x: bool, name: str, factor: float
) -> None:
    import numpy as np
    from matplotlib.ticker import FuncFormatter

    highest = 0.0
    for place, one in zip(places, series, strict=True):
        keep = np.isfinite(one.columns[name])
        _, _, smoothed = _plot(axes, place, one.columns[x][keep], one.columns[name][keep] * factor, log_x)
        highest = max(highest, float(smoothed.max(initial=0.0)))
    axes.set_ylim(0, highest * 1.12 or 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    if not highest and any(len(one.columns["loss"]) for one in series):
        axes.text(0.5, 0.5, "the peak rate of this device is unknown" if name == "mfu" else "not measured",
                  transform=axes.transAxes, ha="center", va="center")  # fmt: skip


def _draw_restarts(axes: Axes, series: Sequence[Series], places: Sequence[int], x: XAxis) -> None:
    """A band for each restart, in the run's colour: from the step it went on with to the last that had been done."""
    import numpy as np

    low, high = axes.get_xlim()
    for place, one in zip(places, series, strict=True):
        steps, at = one.columns["step"], one.columns[x]
        for first, last in one.restarts:
            begin, end = np.interp([min(first, last), max(first, last)], steps, at)
            if axes.get_xscale() == "log":
                wide = max(end, begin * (high / max(low, 1e-12)) ** _LEAST_BAND)
            else:
                wide = max(end, begin + _LEAST_BAND * (high - low))
            axes.axvspan(begin, wide, color=style(place)[0], alpha=0.22, linewidth=0, zorder=0)


def _frame_x(axes: Axes, series: Sequence[Series], x: XAxis, log_x: bool) -> None:
    import numpy as np
    from matplotlib.ticker import FuncFormatter, NullFormatter

    end = furthest(series, x) or 1
    if log_x:
        positive = np.concatenate([one.columns[x] for one in series])
        positive = positive[positive > 0]
        axes.set_xscale("log")
        axes.set_xlim(positive.min() if len(positive) and positive.min() < end else end / 10, end)
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(0, end)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.margins(x=0)


def _plot(
    axes: Axes, place: int, at: np.ndarray, raw: np.ndarray, log_x: bool
) -> tuple[object, np.ndarray, np.ndarray]:
    """Draws a run's raw values faint and smoothed ones clear; gives the line and the smoothed curve, (points,) each."""
    colour, dashes = style(place)
    axes.plot(*thin(at, raw, _RAW_POINTS, log_x), color=colour, linewidth=0.6, alpha=0.25)
    points = thin(at, smooth(raw), _SMOOTH_POINTS, log_x)
    (line,) = axes.plot(*points, color=colour, linewidth=1.5, linestyle=(0, dashes) if dashes else "-")
    return line, *points
