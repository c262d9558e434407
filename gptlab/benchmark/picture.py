"""A grid's speed-ups with their intervals, as a picture.

    >>> from gptlab.benchmark.picture import draw  # doctest: +SKIP
    >>> draw(rows, "bench.png")

Left out on purpose: everything but the ratio; the table has the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gptlab.benchmark.table import Row, right

AXES = ("kind", "name", "backend", "dtype", "attention", "nproc", "strategy", "batch_size", "block_size")


def draw(rows: Sequence[Row], path: str | Path) -> Path:
    """Writes a PNG, SVG or PDF, by the path's ending: a bar a row, hatched where the row is not right."""
    from matplotlib.figure import Figure

    path = Path(path)
    varied = [name for name in AXES if len({row.get(name) for row in rows}) > 1] or ["name"]
    labels = [" ".join(str(row.get(name)) for name in varied) for row in rows]
    figure = Figure(figsize=(8, 1.2 + 0.35 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        ratio = row.get("speedup")
        if not ratio:
            axes.text(0.02, place, str(row.get("accuracy")), va="center", fontsize=8)
            continue
        reach = [[ratio - row["speedup_low"]], [row["speedup_high"] - ratio]]
        hatch = None if right(row) else "//"
        axes.barh(place, ratio, xerr=reach, height=0.6, color="#4477aa", hatch=hatch, ecolor="black", capsize=2)
        axes.text(row["speedup_high"], place, f"  {ratio:.2f}x", va="center", fontsize=8)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(f"times as fast as {', '.join(sorted({str(row.get('against')) for row in rows}))} (95 % interval)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
