"""Pieces that the parts share: buttons, messages, and the box that shows the calls behind them.

    >>> box = CodeBox(); box.show("handle.stop()"); box.widget

Left out on purpose: the parts themselves.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets
from traitlets import TraitError

from gptlab.config import ConfigError

FONT = "font-family:var(--jp-ui-font-family,sans-serif);font-size:13px;line-height:1.5"
BAD, QUIET = "var(--jp-error-color1,#b3261e)", "var(--jp-ui-font-color2,#586069)"
SMALL: dict[str, Any] = {"style": {"description_width": "auto"}, "layout": {"width": "auto"}}
"""For dropdowns that are as wide as what they say."""
MOST_CALLS = 12


def button(text: str, icon: str, tooltip: str, pressed: Callable[[], None], *, name: str = "", style: str = "") -> Any:
    """A button; `name` becomes its class, with gptlab- before it."""
    made = widgets.Button(description=text, icon=icon, tooltip=tooltip, button_style=style)
    made.layout.width = "auto"
    made.add_class(f"gptlab-{name or text.lower()}")
    made.on_click(lambda _: pressed())
    return made


def message(text: str, *, bad: bool = False) -> str:
    """A message as HTML."""
    return f'<span role="status" style="{FONT};color:{BAD if bad else QUIET}">{html.escape(text)}</span>'


def row(children: Sequence[Any]) -> Any:
    """Widgets in a row that wraps where it is narrow."""
    return widgets.HBox(list(children), layout={"align_items": "center", "grid_gap": "8px", "flex_flow": "row wrap"})


def wide(name: str) -> Any:
    """Text over the whole width, with a class of that name."""
    made = widgets.HTML()
    made.layout.width = "calc(100% - 4px)"  # ipywidgets adds a margin
    made.add_class(f"gptlab-{name}")
    return made


def sheet(style: str) -> Any:
    """A style sheet, as a widget that takes no room."""
    return widgets.HTML(style, layout={"display": "none"})


def fold(titles_and_children: Sequence[tuple[str, Any]]) -> Any:
    """Folded sections, all closed."""
    made = widgets.Accordion([child for _, child in titles_and_children], selected_index=None)
    for index, (title, _) in enumerate(titles_and_children):
        made.set_title(index, title)
    return made


def set_text(widget: Any, text: str) -> None:
    """Changes a text where it differs: what is equal need not be sent."""
    if widget.value != text:
        widget.value = text


class CodeBox:
    """The Python calls behind what the widgets say and did, to be copied into a script."""

    def __init__(self) -> None:
        self.state = ""
        """Calls that make what is shown now."""
        self.calls: list[str] = []
        """Calls that did what was done, oldest first."""
        self._text = widgets.HTML()
        self._text.add_class("gptlab-code")
        self.widget = self._text

    def show(self, state: str) -> None:
        """Sets the calls that make what is shown now."""
        if state != self.state:
            self.state = state
            self._write()

    def add(self, call: str) -> None:
        """Adds what was done."""
        self.calls = [*self.calls, call][-MOST_CALLS:]
        self._write()

    @property
    def text(self) -> str:
        """All of it, as a script."""
        return "\n".join(part for part in (self.state, *self.calls) if part)

    def _write(self) -> None:
        self._text.value = (
            '<pre tabindex="0" aria-label="Python calls" style="font-family:var(--jp-code-font-family,monospace);'
            "font-size:12px;line-height:1.45;margin:0;white-space:pre-wrap;user-select:text;"
            f'color:var(--jp-ui-font-color1,#24292e)">{html.escape(self.text)}</pre>'
        )


def call(function: str, /, *values: Any, **named: Any) -> str:
    """A call as it is typed."""
    inside = [repr(value) for value in values] + [f"{key}={value!r}" for key, value in named.items()]
    return f"{function}({', '.join(inside)})"


def set_value(widget: Any, name: str, value: Any) -> None:
    """Sets what a widget says, as a call from a cell does.

    Raises:
        ConfigError: a value that it cannot have; it keeps the one it had.
    """
    low, high = getattr(widget, "min", None), getattr(widget, "max", None)
    if low is not None and high is not None:
        whole = type(widget.value) is int  # ipywidgets would cut off what is behind the point
        legal = f"give a {'whole ' * whole}number from {low:g} to {high:g}"
        if type(value) not in ((int,) if whole else (int, float)) or not low <= value <= high:
            raise ConfigError(f"{name} {value!r} cannot be chosen: {legal}.")
    elif hasattr(widget, "options"):
        legal = "choose one of " + ", ".join(str(one[1] if isinstance(one, tuple) else one) for one in widget.options)
    else:
        legal = "give true or false" if isinstance(widget.value, bool) else "give a text"
    try:
        widget.value = value
    except TraitError:
        raise ConfigError(f"{name} {value!r} cannot be chosen: {legal}.") from None


def set_options(widget: Any, options: Sequence[Any]) -> None:
    """Changes what can be chosen, and keeps what is chosen: ipywidgets takes the first one otherwise."""
    if list(widget.options) == list(options):
        return
    kept = widget.value
    widget.options = list(options)
    values = [option[1] if isinstance(option, tuple) else option for option in options]
    if isinstance(kept, tuple):  # a list from which several can be chosen
        widget.value = [value for value in kept if value in values]
    elif kept in values:
        widget.value = kept
