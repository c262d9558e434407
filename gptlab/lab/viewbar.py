"""How a view of runs is shown: which sweep, what the axes count, how the table is sorted.

    >>> bar = ViewBar(["lab-1a2b3c"], changed=print)
    >>> bar.widget, bar.axes, bar.order

Left out on purpose: what is shown (`runsview.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets

from gptlab.config import ConfigError, did_you_mean
from gptlab.lab.parts import SMALL, row, set_options, set_value
from gptlab.lab.tables import COLUMNS

ALL = "every run in the folder"
AS_STARTED = "as started"
_KEYS: dict[str, str | None] = {AS_STARTED: None, "run": "name"} | {title: key for key, (title, _) in COLUMNS.items()}
_AXES = [("steps", "step"), ("tokens", "tokens"), ("FLOPs", "flops"), ("seconds", "time_s")]


class ViewBar:
    """Dropdowns and boxes above a view.

    Args:
        sweeps: names that can be shown, the newest first.
        changed: called when something was chosen; it should hold no view, for ipywidgets keeps it.
    """

    def __init__(self, sweeps: Sequence[str], changed: Callable[[], None]) -> None:
        found = [*sweeps, ALL]
        self.shown = widgets.Dropdown(options=found, value=found[0], description="show", **SMALL)
        self.x = widgets.Dropdown(options=_AXES, description="against", tooltip="What the x axis counts", **SMALL)
        self.log_x, self.log_y = (_check(f"log {axis}", f"Logarithmic {axis} axis") for axis in "xy")
        self.sort = widgets.Dropdown(options=list(_KEYS), description="sort by", **SMALL)
        self.down = widgets.ToggleButton(icon="sort-amount-desc", tooltip="Greatest first", layout={"width": "40px"})
        named = {"show": self.shown, "x": self.x, "log-x": self.log_x, "log-y": self.log_y, "sort": self.sort}
        for name, widget in (named | {"down": self.down}).items():
            widget.add_class(f"gptlab-{name}")
            widget.observe(lambda _: changed(), "value")
        self.widget = row([*named.values(), self.down])

    @property
    def sweep(self) -> str | None:
        """The sweep that is shown; None where every run is."""
        return None if self.shown.value == ALL else str(self.shown.value)

    @property
    def axes(self) -> dict[str, Any]:
        """How the axes are drawn, as `figures.draw` takes it."""
        return {"x": self.x.value, "log_x": self.log_x.value, "log_y": self.log_y.value}

    @property
    def order(self) -> tuple[str | None, bool]:
        """The column that the table is sorted by (None: as started), and whether the greatest comes first."""
        return _KEYS[self.sort.value], self.down.value

    def choose(self, sweep: str) -> None:
        """Chooses what is shown ("" for every run); a sweep that is new joins the list."""
        self.offer([sweep] if sweep else [])
        self.shown.value = sweep or ALL

    def offer(self, sweeps: Sequence[str]) -> None:
        """Adds sweeps to the list, which nobody's choice is lost by."""
        new = [name for name in sweeps if name not in self.shown.options]
        set_options(self.shown, [*new, *self.shown.options])

    def sort_by(self, column: str | None, descending: bool) -> None:
        """Sorts the table.

        Raises:
            ConfigError: there is no such column.
        """
        names = {key: title for title, key in _KEYS.items()}
        if column not in names:
            known = [key for key in names if key]
            hint = did_you_mean(str(column), known)
            raise ConfigError(f"There is no column {column!r}{hint}: choose one of {', '.join(known)}.")
        self.sort.value = names[column]
        set_value(self.down, "descending", descending)


def _check(description: str, tooltip: str) -> Any:
    return widgets.Checkbox(description=description, indent=False, tooltip=tooltip, layout={"width": "auto"})
