"""The widgets that choose: a range for each swept field, plain fields for the rest, all made from the config's fields.

    >>> panel = ConfigPanel(TrainConfig(max_iters=100), {"n_layer": [2, 4], "n_head": [2], "n_embd": [64]})
    >>> panel.widget, panel.read()

Bounds, choices and tooltips come from `config.py`, so that a new field needs nothing here. Beside each slider stands a
text that says its values: it takes values between the slider's marks, and readers of the screen can use it.
Left out on purpose: what a choice costs (`plan.py`) and running it (`notebook.py`).
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import ipywidgets as widgets

from gptlab.config import LIMITS, ConfigError, TrainConfig, field_docs, field_types

SENSIBLE: dict[str, tuple[int, ...]] = {
    "n_layer": (1, 2, 4, 6, 8, 12, 16, 24),
    "n_head": (1, 2, 3, 4, 6, 8, 12, 16),
    "n_embd": (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
}
"""The marks of the sliders; the texts beside them take every value."""
WORDS = {"n_layer": "depth (n_layer)", "n_head": "heads (n_head)", "n_embd": "width (n_embd)"}
FIELDS = (
    "data", "tokenizer", "max_iters", "warmup_iters", "global_batch_size", "block_size", "learning_rate", "nproc",
    "seed",
)  # fmt: skip
"""Settings that the panel shows; `Lab.choose` takes every other one too."""
SOURCES = ("pysrc", "shakespeare")


class Axis:
    """A slider over the sensible values of one field, and the text with the values that are chosen."""

    def __init__(self, field: str, values: Sequence[int]) -> None:
        doc = field_docs(TrainConfig)[field]
        self.field = field
        options = sorted({*SENSIBLE[field], *values})
        self.slider = widgets.SelectionRangeSlider(
            options=options, value=(min(values), max(values)), description=WORDS[field], readout=False, tooltip=doc,
            continuous_update=True, style={"description_width": "118px"}, layout={"width": "452px"},
        )  # fmt: skip
        self.text = widgets.Text(
            value=_join(values), continuous_update=False, tooltip=f"Values of {field}, with commas. {doc}",
            placeholder=f"values of {field}", layout={"width": "170px"},
        )  # fmt: skip
        self.slider.add_class(f"gptlab-{field}")
        self.text.add_class(f"gptlab-{field}-values")
        self.slider.observe(self._slid, "value")
        self.text.observe(self._typed, "value")
        self.widget = widgets.HBox([self.slider, self.text])

    def _slid(self, change: Any) -> None:
        """The text follows the slider, unless it already says values with these two ends."""
        low, high = change["new"]
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
        ends = (min(values), max(values))
        if not {*ends} <= {*self.slider.options}:
            self.slider.unobserve(self._slid, "value")  # new marks move it, which is nobody's choice
            self.slider.options = sorted({*SENSIBLE[self.field], *ends})
            self.slider.value = ends
            self.slider.observe(self._slid, "value")
        elif self.slider.value != ends:
            self.slider.value = ends

    def read(self) -> list[int]:
        """The chosen values, each once."""
        words = [word for word in re.split(r"[\s,;]+", self.text.value.strip()) if word]
        if not words or not all(re.fullmatch(r"\d{1,7}", word) for word in words):
            raise ConfigError(
                f"{self.field} {self.text.value!r} are not values: give whole numbers with commas, as 2, 4."
            )
        return list(dict.fromkeys(int(word) for word in words))

    def write(self, values: Sequence[int]) -> None:
        """Chooses values."""
        self.text.value = _join(values)


class ConfigPanel:
    """Widgets for a config and a grid over its shape."""

    def __init__(self, base: TrainConfig, grid: Mapping[str, Sequence[int]]) -> None:
        self._base = base.to_dict()
        self.axes = {field: Axis(field, grid[field]) for field in SENSIBLE}
        self.fields = {field: _field(field, self._base[field]) for field in FIELDS}
        self.widget = widgets.VBox([
            *(axis.widget for axis in self.axes.values()),
            widgets.Box([*self.fields.values()], layout={"flex_flow": "row wrap", "grid_gap": "2px 4px"}),
        ])  # fmt: skip

    def on_change(self, callback: Callable[[Any], None]) -> None:
        """Calls back when any choice has changed."""
        for widget in [*(axis.text for axis in self.axes.values()), *self.fields.values()]:
            widget.observe(callback, "value")

    def read(self) -> tuple[TrainConfig, dict[str, list[int]]]:
        """The base and the grid that the widgets say. The base's own shape means nothing: the grid sets it.

        Raises:
            ConfigError: a field or value that cannot be.
        """
        grid = {field: axis.read() for field, axis in self.axes.items()}
        values = self._base | {field: widget.value for field, widget in self.fields.items()}
        values |= {"n_layer": 1, "n_head": 1, "n_embd": 64, "vocab_size": 0}  # a shape that is valid on its own
        return TrainConfig.from_dict(values), grid

    def choose(self, **choice: Any) -> None:
        """Sets fields by name; n_layer, n_head and n_embd take one value or several.

        Raises:
            ConfigError: a field or value that cannot be; nothing is changed then.
        """
        grid = {field: choice.pop(field) for field in list(choice) if field in self.axes}
        grid = {field: list(values) if isinstance(values, Sequence) else [values] for field, values in grid.items()}
        for field, values in grid.items():
            for value in values:
                # Each on its own: heads that do not divide a width are a matter of the grid, shown before it runs.
                TrainConfig(**{"n_layer": 1, "n_head": 1, "n_embd": value if field == "n_head" else 64, field: value})
            if not values:
                raise ConfigError(f"{field} has no values: give at least one.")
        base, _ = self.read()
        checked = base.replace(**choice).to_dict()
        self._base |= {field: checked[field] for field in choice}
        for field in choice:
            if field in self.fields:
                self.fields[field].value = checked[field]
        for field, values in grid.items():
            self.axes[field].write(values)


def _field(name: str, value: Any) -> Any:
    """A widget for a field: its kind from the type, bounds from LIMITS, tooltip from the docstring."""
    kind = field_types(TrainConfig)[name]
    shared: dict[str, Any] = {
        "description": name, "value": value, "tooltip": field_docs(TrainConfig)[name],
        "style": {"description_width": "118px"}, "layout": {"width": "432px" if name == "data" else "212px"},
    }  # fmt: skip
    made: Any
    if typing.get_origin(kind) is Literal:
        made = widgets.Dropdown(options=list(typing.get_args(kind)), **shared)
    elif name == "data":
        made = widgets.Combobox(options=list(SOURCES), continuous_update=False, **shared)
    elif kind is bool:
        made = widgets.Checkbox(**shared)
    elif kind is int:
        low, high = LIMITS[name]
        made = widgets.BoundedIntText(min=int(low), max=int(high), **shared)
    elif kind is float:
        low, high = LIMITS[name]
        made = widgets.BoundedFloatText(min=low, max=high, step=value / 10, **shared)
    else:
        made = widgets.Text(continuous_update=False, **shared)
    made.add_class(f"gptlab-{name}")
    return made


def _join(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
