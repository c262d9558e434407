"""A pipeline's passes in time, predicted above and measured below: a row a process, a box a pass, gaps are the bubble.

    >>> from gptlab.lab import gantt
    >>> gantt.draw(run.pipeline())

Colours and hatches tell the kinds of pass, numbers the micro-batches. Left out on purpose: measuring and predicting
(`parallel/pipeline/`), the same as text (`timelines.py`), other curves (`figures.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gptlab.lab.rendering import Theme, canvas, settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = {
    "F": ("forward", "#56b4e9", ""),
    "B": ("backward", "#e69f00", ""),
    "I": ("backward, of inputs", "#e69f00", "///"),
    "W": ("backward, of weights", "#009e73", "..."),
}
"""By the letter of a pass: its name, colour (Okabe and Ito 2008) and hatch."""
_NUMBERED = 0.018
"""Least share of the width that a box with its number has."""


def draw(
    record: Mapping[str, Any], *, theme: Theme = "light", width: float = 10.0, height: float | None = None
) -> Figure:
    """Both timelines, each on its own scale in milliseconds.

    Args:
        record: as `Run.pipeline` gives it.
        theme, width, height: as `figures.draw` has them.
    """
    import matplotlib
    from matplotlib.patches import Patch

    processes = int(record["processes"])
    height = height or 1.5 + 2 * 0.36 * processes
    with matplotlib.rc_context(settings(theme) | {"axes.grid": False, "hatch.linewidth": 0.5}):
        figure = canvas(width, height, "a pipeline's passes, predicted and measured", theme)
        top = figure.subplots(2, 1, gridspec_kw={"left": 0.075, "right": 0.985, "top": 1 - 0.32 / height,
                                                 "bottom": 0.72 / height, "hspace": 0.62})  # fmt: skip
        seen: set[str] = set()
        for axes, name in zip(top, ("predicted", "measured"), strict=True):
            timeline = record[name]
            seen |= _draw(axes, timeline["spans"], processes)
            said = f"{1000 * timeline['seconds']:.1f} ms, bubble {timeline['bubble']:.0%}"
            axes.set_title(f"{record['schedule']}, {name}: {said}", loc="left")
        handles = [
            Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=name)
            for kind, (name, colour, hatch) in KINDS.items()
            if kind in seen
        ]
        figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.065, 0.0), ncols=4, frameon=False)
        figure.text(0.985, 0.1 / height, "milliseconds of one pass of the micro-batches", ha="right", va="bottom")
    return figure


def _draw(axes: Axes, spans: Any, processes: int) -> set[str]:
    """One timeline; gives the kinds of pass in it."""
    begin, end = min(span[4] for span in spans), max(span[5] for span in spans)
    for process, kind, _, index, start, stop in spans:
        _, colour, hatch = KINDS[kind]
        left, wide = 1000 * (start - begin), 1000 * (stop - start)
        axes.barh(process, wide, 0.82, left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
        if wide > _NUMBERED * 1000 * (end - begin):
            axes.text(left + wide / 2, process, str(index), ha="center", va="center", fontsize=7, color="#16181b")
    axes.set_ylim(processes - 0.5, -0.5)
    axes.set_xlim(0, 1000 * (end - begin))
    axes.set_yticks(range(processes), [f"process {process}" for process in range(processes)])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return {span[1] for span in spans}


def describe(record: Mapping[str, Any]) -> str:
    """The picture in words."""
    said = ", ".join(
        f"{name} {1000 * record[name]['seconds']:.1f} ms with a bubble of {record[name]['bubble']:.0%}"
        for name in ("predicted", "measured")
    )
    return f"Timelines of {record['schedule']} over {record['processes']} processes: {said}."
