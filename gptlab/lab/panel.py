"""Choosing a config with widgets: every field of it, and what the choice costs while the sliders move.

    >>> from gptlab.lab import ConfigPanel
    >>> panel = ConfigPanel(n_layer=4, n_head=4, n_embd=128)
    >>> panel                        # in a notebook
    >>> panel.config                 # what it says, as a TrainConfig
    >>> handle = panel.launch()      # the button Run

Parameters, memory, FLOPs, predicted time and MFU follow the choice; heads that cannot be are said before they can be
run. Left out on purpose: the single widgets (`choosers.py`), the price (`plan.py`), grids (`sweeppanel.py`).
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from gptlab.config import LIMITS, ConfigError, TrainConfig, did_you_mean, field_types
from gptlab.grid import check_count
from gptlab.lab import plan
from gptlab.lab.choosers import SENSIBLE, Axis, field_widget, read_field, write_field
from gptlab.lab.desk import Part
from gptlab.lab.measuring import Meter
from gptlab.lab.parts import BAD, FONT, CodeBox, button, call, fold, message, row, set_text
from gptlab.runs import default_runs_dir

if TYPE_CHECKING:
    from gptlab.launcher import Handle

SHOWN = (
    "data", "tokenizer", "max_iters", "warmup_iters", "global_batch_size", "block_size", "learning_rate", "nproc",
    "seed",
)  # fmt: skip
"""Settings in front; all others lie folded under "every setting"."""
BASE: dict[str, Any] = {"block_size": 64, "max_iters": 300, "warmup_iters": 30}
"""What a new panel offers: runs of some seconds on a laptop."""


class ConfigPanel(Part):
    """Widgets for every field of a TrainConfig, its price, and a Run button.

    Args:
        base: what the fields begin with.
        runs_dir: where its runs are written; GPTLAB_RUNS, or `runs`, unless told otherwise.
        grid: values of the shape, for a panel that chooses several (`SweepPanel`).
        kind: of several panels of a folder, those of one kind take over from one another.
        choice: as for `choose`.

    Raises:
        ConfigError: a choice that cannot be.
    """

    def __init__(
        self,
        base: TrainConfig | None = None,
        *,
        runs_dir: str | os.PathLike[str] | None = None,
        grid: Mapping[str, Sequence[int]] | None = None,
        kind: str = "config",
        **choice: Any,
    ) -> None:
        super().__init__(kind, Path(runs_dir) if runs_dir is not None else default_runs_dir())
        base = base or TrainConfig(**({"n_layer": 4, "n_head": 4, "n_embd": 128} | BASE))
        self._base = base.to_dict()
        several = grid is not None
        values = grid or {name: [self._base[name]] for name in SENSIBLE}
        self.axes = {name: Axis(name, values[name], several=several) for name in SENSIBLE}
        names = [name for name in field_types(TrainConfig) if name not in (*SENSIBLE, "vocab_size")]
        self.fields = {name: field_widget(name, self._base[name]) for name in names}
        self.code = CodeBox()
        self._priced: Any = None
        self._meter = Meter()
        self._build()
        self.choose(**choice)
        self._opened()

    def _opened(self) -> None:
        """The last step of being made."""
        _warm_launcher()
        self._open()

    def _build(self) -> None:
        post = self.post
        self.plan, self._message = widgets.HTML(), widgets.HTML()
        self.plan.add_class("gptlab-plan")
        self._message.add_class("gptlab-message")
        for widget in [*(axis.text for axis in self.axes.values()), *self.fields.values()]:
            widget.observe(lambda _: post.put("price"), "value")
        shown = [self.fields[name] for name in SHOWN]
        rest = [widget for name, widget in self.fields.items() if name not in SHOWN]
        flow = {"flex_flow": "row wrap", "grid_gap": "2px 4px"}
        self.settings = widgets.Box(rest, layout=flow)
        self.settings.add_class("gptlab-settings")
        self.choices = widgets.VBox([*(axis.widget for axis in self.axes.values()), widgets.Box(shown, layout=flow)])
        self._run = button("Run", "play", "Train the chosen", lambda: post.put("run"), style="primary")
        self._run.layout.width = "110px"
        self.bar = row([self._run, self._message])
        self._fold = fold([("every setting", self.settings), ("code", self.code.widget)])
        self.widget = widgets.VBox([self.choices, self.plan, self.bar, self._fold], layout={"grid_gap": "6px"})
        self.widget.add_class("gptlab-panel")

    # What widgets do, as calls -----------------------------------------------------------------------------------

    @property
    def config(self) -> TrainConfig:
        """What the widgets say.

        Raises:
            ConfigError: a value that cannot be, or a panel whose shape has several values.
        """
        base, grid = self.read()
        if any(len(values) > 1 for values in grid.values()):
            raise ConfigError("The panel's shape has several values: take its base and grid from read().")
        return base.replace(**{name: values[0] for name, values in grid.items()})

    def read(self) -> tuple[TrainConfig, dict[str, list[int]]]:
        """The base and the grid that the widgets say. The base's own shape means nothing: the grid sets it.

        Raises:
            ConfigError: a field or value that cannot be.
        """
        grid = {name: axis.read() for name, axis in self.axes.items()}
        return self._read_fields({}), grid

    def _read_fields(self, choice: Mapping[str, Any]) -> TrainConfig:
        """The base that the fields say, where nothing else is chosen for one."""
        said = {name: read_field(name, widget) for name, widget in self.fields.items() if name not in choice}
        values = {**self._base, **said, **choice}
        # A shape that is valid on its own, whatever the other fields ask of one.
        shared = values["n_kv_head"]
        heads = shared if type(shared) is int and 0 < shared <= LIMITS["n_kv_head"][1] else 1
        values |= {"n_layer": 64, "n_head": heads, "n_embd": 64 * heads, "vocab_size": 0}
        return TrainConfig.from_dict(values)

    def choose(self, **choice: Any) -> None:
        """Sets fields by name; n_layer, n_head and n_embd take several values where the panel does.

        Raises:
            ConfigError: a field or value that cannot be; nothing is changed then.
        """
        grid = {name: choice.pop(name) for name in list(choice) if name in self.axes}
        check_count(max((len(values) for values in grid.values() if isinstance(values, Sequence)), default=0))
        grid = {name: list(values) if isinstance(values, Sequence) else [values] for name, values in grid.items()}
        for name, values in grid.items():
            for value in values:
                # Each on its own: heads that do not divide a width are a matter of the grid, shown before it runs.
                TrainConfig(**{"n_layer": 1, "n_head": 1, "n_embd": value if name == "n_head" else 64, name: value})
            if not values:
                raise ConfigError(f"{name} has no values: give at least one.")
            if len(values) > 1 and not self.axes[name].several:
                raise ConfigError(
                    f"{name} {values} are {len(values)} values: a ConfigPanel takes one, a SweepPanel all."
                )
        for name in choice:
            if name not in self.fields:
                raise ConfigError(f"There is no field {name!r} on this panel{did_you_mean(name, self.fields)}.")
        checked = self._read_fields(choice).to_dict()
        for name in choice:
            write_field(name, self.fields[name], checked[name])
        for name, values in grid.items():
            self.axes[name].write(values)
        self.due = 0.0

    def left(self) -> None:
        """Called when it is off the desk: nothing is measured for it any more."""
        self._meter.stop()

    def launch(self, name: str | None = None) -> Handle:
        """Starts a run of the chosen config and returns; the button Run does it.

        Raises:
            ConfigError: a config that cannot be run.
        """
        from gptlab import launcher

        self.check_open()
        self._meter.stop()
        handle = launcher.launch(self.config, name=name, runs_dir=self.runs_dir)
        self.desk.handles[handle.run.path.absolute()] = handle
        launched = call("gptlab.launch", name=handle.name, runs_dir=str(self.runs_dir))
        self.code.add(f"handle = {launched.replace('launch(', 'launch(config, ', 1)}")
        self.say(f"Training {handle.name} …")
        return handle

    def tell(self, **wanted: Any) -> str:
        """The call that makes a config: what differs from the defaults."""
        usual = TrainConfig().to_dict()
        values = {
            name: value
            for name, value in wanted.items()
            if name in SENSIBLE or (value != usual[name] and name != "vocab_size")
        }
        return call("gptlab.TrainConfig", **values)

    # The desk's thread -------------------------------------------------------------------------------------------

    def do_price(self) -> None:
        """A choice has changed: the desk takes a turn after any command."""

    def do_run(self) -> None:
        """The button Run."""
        self.launch()

    def turn(self) -> float:
        """Says what the choice costs, when it has changed; measures this machine's speed once, where it is unknown."""
        if self._meter.has_news():
            self._priced = None
        try:
            base, grid = self.read()
            if (base, grid) == self._priced:
                return 0.2 if self._meter.is_busy else 0.5
            self._priced = (base, grid)
            cells = plan.cells(base, grid)
            text = plan.describe(cells, measuring=self._meter.begin(cells))
            first = next((cell for cell in cells if cell.config is not None), cells[0])
            self._show_code(base, first.shape, grid)
        except ConfigError as error:
            text = f'<span style="color:{BAD}">{html.escape(str(error))}</span>'
        set_text(self.plan, f'<div style="{FONT}" role="status">{text}</div>')
        return 0.2

    def _show_code(self, base: TrainConfig, shape: dict[str, int], grid: Mapping[str, Sequence[int]]) -> None:
        """The calls behind the choice; `shape` is that of the first cell that can be run."""
        self.code.show(f"import gptlab\nconfig = {self.tell(**(base.to_dict() | shape))}")

    def say(self, text: str, *, bad: bool = False) -> None:
        set_text(self._message, message(text, bad=bad))


def _warm_launcher() -> None:
    """Lets the launcher load torch, in its own process, while the user still chooses."""
    from gptlab import launcher

    launcher.warm()
