"""Widgets for single settings, made from the config's fields: a new field needs nothing here.

    >>> field_widget("learning_rate", 1e-3), Axis("n_layer", [2, 4], several=True).widget

Types, bounds and tooltips come from `config.py`. Beside a slider stands a text that says its value: it takes values
between the slider's marks, and readers of the screen can use it. Left out on purpose: which are shown (`panel.py`).
"""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence
from typing import Any, Literal

import ipywidgets as widgets

from gptlab.config import LIMITS, ConfigError, TrainConfig, field_docs, field_types
from gptlab.sources import NAMES

SENSIBLE: dict[str, tuple[int, ...]] = {
    "n_layer": (1, 2, 4, 6, 8, 12, 16, 24),
    "n_head": (1, 2, 3, 4, 6, 8, 12, 16),
    "n_embd": (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
}
"""The marks of the sliders; the texts beside them take every value."""
WORDS = {"n_layer": "depth (n_layer)", "n_head": "heads (n_head)", "n_embd": "width (n_embd)"}


class Axis:
    """A slider over the sensible values of one field, and the text that says what is chosen: one value, or several."""

    def __init__(self, field: str, values: Sequence[int], *, several: bool) -> None:
        doc = field_docs(TrainConfig)[field]
        self.field, self.several = field, several
        kind = widgets.SelectionRangeSlider if several else widgets.SelectionSlider
        self.slider = kind(
            options=sorted({*SENSIBLE[field], *values}), value=self._ends(values), description=WORDS[field],
            readout=False, tooltip=doc, continuous_update=True, style={"description_width": "118px"},
            layout={"width": "auto", "flex": "1 1 300px", "max_width": "452px"},
        )  # fmt: skip
        hint = f"Values of {field}, with commas." if several else f"Value of {field}."
        self.text = widgets.Text(
            value=_join(values), continuous_update=False, tooltip=f"{hint} {doc}",
            placeholder=f"value{'s' * several} of {field}",
            layout={"width": "auto", "flex": "0 1 170px", "min_width": "0"},
        )  # fmt: skip
        self.slider.add_class(f"gptlab-{field}")
        self.text.add_class(f"gptlab-{field}-values")
        self.slider.observe(self._slid, "value")
        self.text.observe(self._typed, "value")
        self.widget = widgets.HBox([self.slider, self.text])

    def _slid(self, change: Any) -> None:
        """The text follows the slider, unless it already says values with these two ends."""
        low, high = change["new"] if self.several else (change["new"], change["new"])
        try:
            typed = self.read()
        except ConfigError:
            typed = []
        if not typed or (min(typed), max(typed)) != (low, high):
            self.text.value = _join([option for option in SENSIBLE[self.field] if low <= option <= high] or [low, high])

    def _typed(self, _: Any) -> None:
        """The slider follows the text as far as it can."""
        try:
            values = self.read()
        except ConfigError:
            return  # said where the choice is read
        ends = self._ends(values)
        if not {min(values), max(values)} <= {*self.slider.options}:
            self.slider.unobserve(self._slid, "value")  # new marks move it, which is nobody's choice
            self.slider.options = sorted({*SENSIBLE[self.field], min(values), max(values)})
            self.slider.value = ends
            self.slider.observe(self._slid, "value")
        elif self.slider.value != ends:
            self.slider.value = ends

    def _ends(self, values: Sequence[int]) -> Any:
        """What the slider is set to."""
        return (min(values), max(values)) if self.several else values[0]

    def read(self) -> list[int]:
        """The chosen values, each once."""
        words = [word for word in re.split(r"[\s,;]+", self.text.value.strip()) if word]
        if not words or not all(re.fullmatch(r"\d{1,7}", word) for word in words):
            raise ConfigError(
                f"{self.field} {self.text.value!r} are not values: give whole numbers with commas, as 2, 4."
            )
        if not self.several and len(words) > 1:
            raise ConfigError(f"{self.field} {self.text.value!r} are {len(words)} values: give one.")
        return list(dict.fromkeys(int(word) for word in words))

    def write(self, values: Sequence[int]) -> None:
        """Chooses values."""
        self.text.value = _join(values)


def field_widget(name: str, value: Any) -> Any:
    """A widget for a field: its kind from the type, bounds from LIMITS, tooltip from the docstring."""
    kind = field_types(TrainConfig)[name]
    optional = type(None) in typing.get_args(kind)
    shared: dict[str, Any] = {
        "description": name, "value": value, "tooltip": field_docs(TrainConfig)[name],
        "style": {"description_width": "118px"}, "layout": {"width": "432px" if name == "data" else "212px"},
    }  # fmt: skip
    made: Any
    if typing.get_origin(kind) is Literal:
        made = widgets.Dropdown(options=list(typing.get_args(kind)), **shared)
    elif name == "data":
        made = widgets.Combobox(options=list(NAMES), continuous_update=False, **shared)
    elif kind is bool:
        made = widgets.Checkbox(**shared, indent=True)
    elif optional:  # an empty text is none
        made = widgets.Text(**(shared | {"value": _said(value)}), continuous_update=False, placeholder="none")
    elif kind is int:
        low, high = LIMITS[name]
        made = widgets.BoundedIntText(min=int(low), max=int(high), **shared)
    elif kind is float:
        low, high = LIMITS[name]
        made = widgets.BoundedFloatText(min=low, max=high, step=value / 10 or 0.01, **shared)
    else:
        made = widgets.Text(continuous_update=False, **shared)
    made.add_class(f"gptlab-{name}")
    return made


def read_field(name: str, widget: Any) -> Any:
    """What a field's widget says.

    Raises:
        ConfigError: a text that is no number where one is asked for.
    """
    kind, value = field_types(TrainConfig)[name], widget.value
    if type(None) not in typing.get_args(kind):
        return value
    text = value.strip()
    if text in ("", "none"):
        return None
    wanted = next(one for one in typing.get_args(kind) if one is not type(None))
    try:
        return wanted(text)
    except ValueError:
        raise ConfigError(f"{name} {text!r} is not a number: give one, or nothing.") from None


def write_field(name: str, widget: Any, value: Any) -> None:
    """Sets a field's widget."""
    widget.value = _said(value) if type(None) in typing.get_args(field_types(TrainConfig)[name]) else value


def _said(value: Any) -> str:
    return "" if value is None else str(value)


def _join(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
