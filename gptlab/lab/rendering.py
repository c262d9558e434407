"""How a drawn figure leaves: as an SVG that wears its page's theme, as a file, as the PNG that a notebook keeps.

    >>> from gptlab.lab import figures, rendering
    >>> rendering.save(figures.draw(series), "runs.svg")

Text stays text in an SVG, and the same curves give the same bytes. Left out on purpose: what is drawn (`figures.py`).
"""

from __future__ import annotations

import html
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gptlab.jsonfile import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Theme = Literal["light", "dark"]
INKS: dict[Theme, tuple[str, str, str]] = {
    "light": ("#24292e", "#d8dce1", "#ffffff"),
    "dark": ("#e3e6ea", "#40464d", "#16181b"),
}
"""Text, grid lines and page of a theme. In a page's own SVG the first two become the page's colours."""
INK, RULE, _ = INKS["light"]
DOTS = {"screen": 100, "file": 200}
"""Dots an inch of a PNG."""


def settings(theme: Theme = "light") -> Any:
    """What matplotlib is told while something is drawn or written: nothing of the user's settings changes."""
    ink, rule, page = INKS[theme]
    return {
        "font.family": "sans-serif", "font.size": 9.0, "axes.titlesize": 9.5, "axes.labelsize": 9.0,
        "text.color": ink, "axes.labelcolor": ink, "axes.titlecolor": ink, "xtick.color": ink, "ytick.color": ink,
        "axes.edgecolor": ink, "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
        "axes.facecolor": "none", "figure.facecolor": page, "savefig.facecolor": page, "legend.facecolor": page,
        "grid.color": rule, "grid.linewidth": 0.6, "axes.formatter.use_mathtext": False, "text.parse_math": False,
        "text.usetex": False, "svg.fonttype": "none", "svg.hashsalt": "gptlab", "path.simplify": True,
        "figure.autolayout": False, "figure.constrained_layout.use": False,
        "legend.fontsize": 8.5, "legend.title_fontsize": 8.5,
    }  # fmt: skip


def canvas(width: float, height: float, title: str, theme: Theme = "light") -> Figure:
    """An empty figure that a notebook shows as PNG without pyplot and its backends. Make it within `settings`."""
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            import matplotlib

            data = io.BytesIO()
            with matplotlib.rc_context(settings(theme)):
                self.savefig(data, format="png", dpi=DOTS["screen"], facecolor=self.get_facecolor())
            return data.getvalue()

        def __repr__(self) -> str:
            return f"Figure of {title}"

    return Picture(figsize=(width, height), facecolor=INKS[theme][2])


def svg(figure: Figure, description: str) -> str:
    """The picture as an SVG element for a page: text as text, the page's own colours and fonts, and a description."""
    body = _element(figure, description, transparent=True)
    body = body.replace(INK, f"var(--jp-ui-font-color1, {INK})").replace(RULE, f"var(--jp-border-color2, {RULE})")
    return re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--jp-ui-font-family, sans-serif)", body)


def panes(figure: Figure, description: str, cut: float) -> str:
    """The picture in two panes, as HTML: beside each other where there is room, under each other where there is not, so
    that its text stays as large as the page's in a narrow window and under the browser's zoom.

    Args:
        cut: where the left pane ends and the right one begins, as a share of the width. No axes may lie over it.
    """
    whole = svg(figure, description)
    head, inside = whole.split(">", 1)
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', head)
    assert box is not None
    width, height = map(float, box.groups())
    moved = []
    for place, axes in reversed(list(enumerate(figure.axes, start=1))):
        if axes.get_position().x0 > cut:
            begin, end = _group(inside, f"axes_{place}")
            moved.append(inside[begin:end])
            inside = inside[:begin] + inside[end:]
    left, right = (head.replace(box.group(), f'viewBox="{at:g} 0 {share * width:g} {height:g}"')
                   for at, share in ((0, cut), (cut * width, 1 - cut)))  # fmt: skip
    right = re.sub('role="img" aria-label="[^"]*"', 'aria-hidden="true"', right)  # the left one says it all
    shown = ""
    for share, pane in ((cut, f"{left}>{inside}"), (1 - cut, f"{right}>{''.join(reversed(moved))}</svg>")):
        least = share * width  # a point of the drawing to a pixel; at most it grows as the whole does on a wide page
        shown += f'<div style="flex:{100 * share:g} 1 {least:g}px;max-width:{1.6 * least:g}px">{pane}</div>'
    return f'<div style="display:flex;flex-wrap:wrap">{shown}</div>'


def _group(text: str, name: str) -> tuple[int, int]:
    """Where a group of an SVG begins and ends."""
    begin = text.index(f'<g id="{name}"')
    depth = 0
    for tag in re.finditer(r"<g(?:\s[^>]*[^>/])?>|</g>", text[begin:]):  # an empty group is one tag, which ends itself
        depth += -1 if tag.group() == "</g>" else 1
        if not depth:
            return begin, begin + tag.end()
    raise AssertionError(f"{name} has no end")


def save(figure: Figure, path: str | Path, *, description: str = "") -> Path:
    """Writes the picture as PNG (200 dots an inch) or SVG, by the ending; the file is whole or not there."""
    import matplotlib

    path = Path(path)
    with replacing(path) as beside:
        if path.suffix == ".svg":
            beside.write_text(_element(figure, description, transparent=False), encoding="utf-8")
        else:
            with matplotlib.rc_context(settings()):
                figure.savefig(beside, format="png", dpi=DOTS["file"], facecolor=figure.get_facecolor())
    return path


def _element(figure: Figure, description: str, *, transparent: bool) -> str:
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context(settings()):
        # A fixed salt and no date: the same curves give the same text, and an unchanged picture need not be sent.
        face = {} if transparent else {"facecolor": figure.get_facecolor()}
        figure.savefig(text, format="svg", metadata={"Date": None}, transparent=transparent, **face)
    body = text.getvalue()
    body = body[body.index("<svg") :]
    box = re.search(r'viewBox="[^"]*"', body)
    assert box is not None
    # matplotlib's style sheet is for every element of whatever page the picture stands in, which would look at all of
    # them again with each picture: the picture's own element says it instead.
    body = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
    # A tenth of a point is finer than a pixel. Within tags only: a text may be a number too.
    body = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d+\.\d)\d+", r"\1", tag.group()), body)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box.group()} role="img" '
        f'aria-label="{html.escape(description)}" style="width:100%;height:auto;display:block;stroke-linejoin:round;'
        'stroke-linecap:butt">'
    )
    return re.sub(r"\n\s*", "\n", head + body[body.index(">") + 1 :])
