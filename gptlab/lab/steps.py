"""Figures of a step's time: where it goes, setting by setting, and how near each part comes to what the machine can do.

    >>> from gptlab.lab import steps
    >>> steps.bars({"float32": breakdown.measure(config)}).savefig("step.png")

Left out on purpose: measuring (`breakdown.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gptlab.breakdown import PARTS, Step
from gptlab.lab.figures import COLOURS
from gptlab.lab.plots import decades
from gptlab.lab.rendering import canvas, settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORDS = {
    "products": "matrix products",
    "attention": "attention",
    "between": "between products",
    "update": "update of the weights",
    "compiled": "compiled (fused)",
    "native": "our own kernel (fused)",
    "rest": "Python, starting operations",
}
_COLOUR = {
    "products": COLOURS[0], "attention": COLOURS[1], "between": COLOURS[2], "update": COLOURS[4],
    "compiled": COLOURS[5], "native": COLOURS[3], "rest": "#9aa0a6",
}  # fmt: skip
_HATCH = {"attention": "//", "update": "..", "between": "", "compiled": "xx", "native": "\\\\", "rest": ""}


def bars(measured: Mapping[str, Step], *, predicted: bool = True, width: float = 10.0) -> Figure:
    """A bar for each measurement, cut into its parts, in milliseconds a step; under it, paler, what was predicted.

    Args:
        predicted: whether the cost model's bar stands under each.
    """
    import matplotlib

    rows = len(measured) * (2 if predicted else 1)
    with matplotlib.rc_context(settings()):
        figure = canvas(width, 0.95 + 0.36 * rows + 0.12 * len(measured), "where the time of a step goes")
        height = figure.get_size_inches()[1]
        axes = figure.add_axes((0.185, 0.5 / height, 0.57, 1 - 0.75 / height))
        axes.grid(False, axis="y")
        place, places, names = 0.0, [], []
        drawn: dict[str, Any] = {}
        longest = max(
            max(step.seconds, step.predicted_s or 0) if predicted else step.seconds for step in measured.values()
        )
        for name, step in measured.items():
            for seconds, solid in ((step.parts, True), (step.predicted if predicted else None, False)):
                if seconds is None:
                    continue
                left = 0.0
                for part in (*PARTS[:4], "compiled", "native", "rest"):
                    if not (own := seconds.get(part, 0.0)):
                        continue
                    (bar,) = axes.barh([place], [1e3 * own], left=1e3 * left, height=0.78, color=_COLOUR[part],
                                       alpha=1.0 if solid else 0.35, hatch=_HATCH.get(part, ""), edgecolor="white",
                                       linewidth=0.6)  # fmt: skip
                    drawn.setdefault(part, bar)
                    left += own
                axes.text(1e3 * (left + 0.01 * longest), place, f"{1e3 * left:.3g} ms", va="center", fontsize=8)
                places.append(place)
                names.append(name if solid else "predicted")
                place -= 0.86
            place -= 0.35
        axes.set_yticks(places, names)
        for label, name in zip(axes.get_yticklabels(), names, strict=True):
            label.set_fontstyle("italic" if name == "predicted" else "normal")
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, 1e3 * longest * 1.13)
        axes.set_xlabel("milliseconds a step")
        order = [part for part in WORDS if part in drawn]
        figure.legend([drawn[part] for part in order], [WORDS[part] for part in order], loc="upper left",
                      bbox_to_anchor=(0.765, 1 - 0.2 / height), frameon=False)  # fmt: skip
    return figure


def roofline(measured: Mapping[str, Step], *, width: float = 10.0, height: float = 4.4) -> Figure:
    """Each part of a step as a point: FLOPs it does for each byte it moves, and FLOP/s it reaches, under the roofs that
    memory and multipliers set (Williams et al. 2009). The roofs are the rates behind the prediction."""
    import matplotlib
    import numpy as np

    with matplotlib.rc_context(settings()):
        figure = canvas(width, height, "a roofline")
        axes = figure.add_axes((0.075, 0.12, 0.66, 0.79))
        lows, highs = [], []
        for index, (name, step) in enumerate(measured.items()):
            if not step.predicted or not step.peak_flops:
                continue
            colour = COLOURS[index % len(COLOURS)]
            memory = step.bytes["between"] / step.predicted["between"]
            ridge = step.peak_flops / memory
            intensity = sum(step.flops.values()) / sum(step.bytes.values())
            x = np.geomspace(min(ridge, intensity) / 12, max(ridge, intensity) * 6, 200)
            axes.plot(x, np.minimum(step.peak_flops, memory * x), color=colour, linewidth=1.4)
            reached = sum(step.flops.values()) / step.seconds
            promised = sum(step.flops.values()) / sum(step.predicted.values())
            axes.plot([intensity, intensity], [reached, promised], color=colour, linewidth=0.8, linestyle=(0, (2, 2)))
            axes.plot([intensity], [promised], "o", markerfacecolor="none", color=colour, markersize=9,
                      label=f"{name}: predicted")  # fmt: skip
            axes.plot([intensity], [reached], "o", color=colour, markersize=7, label=f"{name}: measured")
            lows += [reached, promised]
            highs.append(step.peak_flops)
        if lows:
            axes.set_ylim(min(lows) / 3, max(highs) * 1.6)
        decades(axes, "xy")
        axes.set_title(
            "FLOP/s that a step reaches, under the roofs of memory (slope) and multipliers (flat)", loc="left"
        )
        axes.set_xlabel("FLOPs for each byte moved between matrix products")
        figure.legend(*axes.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(0.745, 0.93), frameon=False)
    return figure
