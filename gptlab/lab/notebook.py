"""The Lab: choose shapes of a GPT, press Run, watch real training draw itself, press Stop.

    >>> from gptlab.lab import Lab
    >>> lab = Lab()
    >>> lab                     # in a notebook: sliders, buttons, live curves, the table
    >>> lab.choose(n_layer=[2, 4], n_head=2, n_embd=[64, 128], max_iters=200)
    >>> lab.run()
    >>> await lab.done()        # the buttons stay alive meanwhile

Whatever a button does is a method too. Training happens in the launcher's processes and drawing in one of its own
(`drawing.py`), so the kernel stays free. One thread owns the state: buttons only queue commands for it, since Jupyter
calls them on several threads (`owner.py`). A Lab that is made again, as by running its cell twice, takes over from the
one before, its running sweep included.
Left out on purpose: choosing (`panel.py`), prices (`plan.py`), the queue of runs (`sweeps.py`).
"""

from __future__ import annotations

import asyncio
import html
import os
import queue
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from gptlab import sweeps
from gptlab.config import ConfigError, TrainConfig
from gptlab.lab import plan
from gptlab.lab.drawing import Artist, Painter, save
from gptlab.lab.naming import sweep_name, sweeps_in
from gptlab.lab.owner import Owner, take_over
from gptlab.lab.panel import ConfigPanel
from gptlab.runs import default_runs_dir, list_runs

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from gptlab.lab.figures import Series, XAxis

LIVE_S, QUIET_S = 0.2, 2.0
"""Seconds between two looks at the runs while some train, and while none does."""
ALL = "every run in the folder"
GRID: dict[str, list[int]] = {"n_layer": [1, 2, 4], "n_head": [2, 3], "n_embd": [64, 96]}
BASE: dict[str, Any] = {"block_size": 64, "max_iters": 300, "warmup_iters": 30}
"""What a new Lab offers: runs of some seconds on a laptop."""
_FONT = "font-family:var(--jp-ui-font-family,sans-serif);font-size:13px;line-height:1.5"


class Lab:
    """Choices, buttons, live curves and the table of a sweep.

    Args:
        runs_dir: where runs are written and read; GPTLAB_RUNS, or `runs`, unless told otherwise.
        name: what its sweeps' names begin with. Runs with the same settings share a sweep: what is finished is not run
            again, however often Run is pressed or the kernel restarted.
        choice: as for `choose`.

    Raises:
        ConfigError: a choice that cannot be.
    """

    def __init__(self, runs_dir: str | os.PathLike[str] | None = None, *, name: str = "lab", **choice: Any) -> None:
        self.runs_dir = Path(runs_dir) if runs_dir is not None else default_runs_dir()
        self.name = name
        self.panel = ConfigPanel(TrainConfig(**BASE), GRID)
        self.panel.choose(**choice)
        self._commands: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._idle, self._closed, self._starting = threading.Event(), threading.Event(), threading.Lock()
        self._idle.set()
        self._sweep: sweeps.Sweep | None = None
        self._artist = Artist()
        self._saving = False
        self._next_look = 0.0
        self._priced: Any = None
        self._build()
        key = f"gptlab lab {self.runs_dir.resolve()} {name}"
        adopted = take_over(key)
        self._artist.start()
        _warm_launcher()
        if adopted is not None:
            self._idle.clear()
            self._commands.put(("watch", adopted))
        self._thread = Owner(key, self, self._commands, self._artist, self.widget, self._closed)
        self._thread.start()

    def _build(self) -> None:
        """The widgets. Their callbacks hold the queue and no Lab: ipywidgets keeps every widget for ever."""
        commands, idle = self._commands, self._idle
        self._plan, self._message = widgets.HTML(), widgets.HTML()
        self._progress, self._picture, self._table = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self._run = widgets.Button(
            description="Run", button_style="primary", icon="play", tooltip="Train the chosen runs, one after another"
        )
        self._stop = widgets.Button(
            description="Stop", icon="stop", disabled=True, tooltip="Stop the training runs, each with a checkpoint"
        )
        self._run.layout.width = self._stop.layout.width = "110px"
        self._run.add_class("gptlab-run")
        self._stop.add_class("gptlab-stop")
        for widget, word in ((self._picture, "picture"), (self._table, "runs"), (self._progress, "progress")):
            widget.layout.width = "calc(100% - 4px)"  # ipywidgets adds a margin
            widget.add_class(f"gptlab-{word}")
        self._plan.add_class("gptlab-plan")
        self._message.add_class("gptlab-message")

        def pressed(_: Any) -> None:
            idle.clear()
            commands.put(("run",))

        self._run.on_click(pressed)
        self._stop.on_click(lambda _: commands.put(("stop",)))
        self.panel.on_change(lambda _: commands.put(("price",)))
        small = {"style": {"description_width": "auto"}, "layout": {"width": "auto"}}
        self._x = widgets.Dropdown(
            options=[("steps", "step"), ("tokens", "tokens"), ("FLOPs", "flops"), ("seconds", "time_s")],
            description="against", **small,
        )  # fmt: skip
        found = sweeps_in(self.runs_dir)
        self._shown = widgets.Dropdown(options=[*found, ALL], value=[*found, ALL][0], description="show", **small)
        for choice in (self._x, self._shown):
            choice.observe(lambda _: commands.put(("look",)), "value")
        bar = widgets.HBox(
            [self._run, self._stop, self._x, self._shown, self._message],
            layout={"align_items": "center", "grid_gap": "10px", "flex_flow": "row wrap"},
        )
        self.widget = widgets.VBox(
            [self.panel.widget, self._plan, bar, self._progress, self._picture, self._table],
            layout={"max_width": "1150px", "grid_gap": "6px"},
        )
        self.widget.add_class("gptlab-lab")

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The widgets, and a text that is always the same, so that executed notebooks can be compared."""
        return {**(self.widget._repr_mimebundle_() or {}), "text/plain": "Lab"}

    # What buttons do, as calls ---------------------------------------------------------------------------------------

    def choose(self, **choice: Any) -> None:
        """Sets what the widgets say: n_layer, n_head, n_embd to one value or several, any other field to one.

        Raises:
            ConfigError: an unknown field or a value that cannot be; nothing is changed then.
        """
        self.panel.choose(**choice)

    def run(self, *, at_once: int = 1) -> None:
        """Starts the chosen sweep and returns; what is finished already is not run again.

        Raises:
            ConfigError: nothing that could be run, or a sweep of this Lab is still running.
        """
        self._check_open()
        self._commands.put(("watch", self._start(at_once)))

    def stop(self) -> None:
        """Asks the running runs to stop, each with a checkpoint, and starts no more. `done` waits for the end."""
        self._check_open()
        self._commands.put(("stop",))

    async def done(self) -> None:
        """Waits until nothing trains and picture and table are saved. Buttons and other widgets work meanwhile."""
        while not self._idle.is_set():
            self._check_open()
            await asyncio.sleep(0.05)

    def show(self, sweep: str | None = None, *, x: XAxis | None = None) -> None:
        """Shows another sweep of the folder ("" for every run), or counts x in step, tokens, flops or time_s."""
        if x is not None:
            self._x.value = x
        if sweep is not None:
            self._offer(sweep or ALL)

    @property
    def sweep(self) -> sweeps.Sweep | None:
        """The sweep that is shown, or None where every run of the folder is."""
        shown = self._shown.value
        if self._sweep is not None and self._sweep.name == shown:
            return self._sweep
        return None if shown == ALL else sweeps.Sweep.open(shown, self.runs_dir)

    def table(self) -> pandas.DataFrame:
        """What the table shows, a row a run, invalid cells too. Columns as in `gptlab sweep`'s CSV."""
        import pandas

        table = pandas.DataFrame(self._gather()[0])
        for column in ("parameters", "non_embedding", "step", "max_iters"):
            if column in table:
                table[column] = table[column].astype("Int64")  # whole numbers, also beside cells without one
        return table

    def figure(self, *, x: XAxis | None = None) -> Figure:
        """The curves as a matplotlib figure. Call it in a cell, never in a thread."""
        from gptlab.lab import figures

        return figures.draw(self._gather()[1], x=x or self._x.value)

    def save(self) -> list[Path]:
        """Writes the picture and the table to the runs folder; gives both paths. A sweep's end does it too."""
        rows, series = self._gather()
        return [Path(path) for path in save(self._stem(), series, rows, self._x.value)]

    def close(self) -> None:
        """Stops the training that this Lab started, and ends its thread, its drawing process and its widgets."""
        if self._sweep is not None:
            self._sweep.stop()
        self._thread.retire()

    # The owner thread's part -----------------------------------------------------------------------------------------

    def _obey(self, command: str, *values: Any) -> None:
        """Does what was queued."""
        if command == "run":
            try:
                self._watch(self._start(1))
            except ConfigError as error:
                if self._sweep is None or not self._sweep.is_active:
                    self._idle.set()
                self._say(str(error), bad=True)
        elif command == "watch":
            self._watch(values[0])
        elif command == "stop":
            self._say("Stopping: each run ends with its step and a checkpoint …")
            if self._sweep is not None and self._sweep.is_active:
                self._sweep.stop()
            else:  # another process trains what is shown
                for run in self.sweep.runs if self.sweep else list_runs(self.runs_dir):
                    if run.is_active:
                        run.request_stop()
        self._next_look = 0.0

    def _tick(self) -> float:
        """Takes a finished picture, asks for the next, notices a sweep's end; gives the seconds until its next turn."""
        self._price()
        if self._artist.busy:
            answer = self._artist.answer(timeout=0.03)
            if answer is not None:
                self._display(answer)
            return 0.02
        running = self._sweep is not None and self._sweep.is_active
        if not running and self._sweep is not None and not self._idle.is_set() and not self._saving:
            self._saving, self._next_look = True, 0.0
        now = time.monotonic()
        if now < self._next_look:
            return min(0.1 if not self._idle.is_set() else 0.5, self._next_look - now)
        shown = self._shown.value
        request = {
            "runs_dir": str(self.runs_dir),
            "sweep": None if shown == ALL else shown,
            "x": self._x.value,
            "running": running,
        }
        if self._saving:
            request["save"] = str(self._stem())
        self._artist.ask(request)
        self._next_look = now + (LIVE_S if running or not self._stop.disabled else QUIET_S)
        return 0.02

    def _display(self, answer: dict[str, Any]) -> None:
        """Puts text into widgets, where it differs; the last one of a sweep ends it."""
        for widget, name in ((self._picture, "svg"), (self._table, "table"), (self._progress, "progress")):
            if name in answer and widget.value != answer[name]:
                widget.value = answer[name]
        if "error" in answer:
            self._say(answer["error"], bad=True)
        running = self._sweep is not None and self._sweep.is_active
        if "active" in answer:
            self._buttons(running or answer["active"] > 0, running)
        if self._saving and ("saved" in answer or "error" in answer):
            self._saving = False
            if "saved" in answer:
                self._say("Saved " + " and ".join(os.path.relpath(path) for path in answer["saved"]) + ".")
            self._priced = None  # rates may have been measured meanwhile
            self._buttons(answer.get("active", 0) > 0, False)
            self._idle.set()

    def _watch(self, sweep: sweeps.Sweep) -> None:
        self._sweep, self._saving = sweep, False
        self._idle.clear()
        self._offer(sweep.name)
        self._buttons(True, True)
        self._say(f"Training {sweep.name} …")

    def _price(self) -> None:
        """Says what the choice costs, when it has changed."""
        try:
            base, grid = self.panel.read()
            if (base, grid) == self._priced:
                return
            self._priced = (base, grid)
            text = plan.describe(base, grid)
        except ConfigError as error:
            text = f'<span style="color:var(--jp-error-color1,#b3261e)">{html.escape(str(error))}</span>'
        text = f'<div style="{_FONT}">{text}</div>'
        if self._plan.value != text:
            self._plan.value = text

    def _buttons(self, can_stop: bool, running: bool) -> None:
        if (self._stop.disabled, self._run.disabled) != (not can_stop, running):
            self._stop.disabled, self._run.disabled = not can_stop, running

    def _say(self, text: str, *, bad: bool = False) -> None:
        colour = "var(--jp-error-color1,#b3261e)" if bad else "var(--jp-ui-font-color2,#586069)"
        self._message.value = f'<span role="status" style="{_FONT};color:{colour}">{html.escape(text)}</span>'

    # Shared ----------------------------------------------------------------------------------------------------------

    def _start(self, at_once: int) -> sweeps.Sweep:
        """Starts the sweep that the widgets say. Any thread may call it."""
        with self._starting:
            if self._sweep is not None and self._sweep.is_active:
                raise ConfigError(f"The sweep {self._sweep.name} is still running: stop it first.")
            base, grid = self.panel.read()
            found = sweeps.sweep(base, grid, name=sweep_name(self.name, base), runs_dir=self.runs_dir, at_once=at_once)
            self._sweep = found
            self._idle.clear()
            return found

    def _offer(self, name: str) -> None:
        """Shows a sweep, and offers those that came since."""
        options = (*sweeps_in(self.runs_dir), ALL)
        if self._shown.options != options:
            self._shown.options = options
        self._shown.value = name

    def _gather(self) -> tuple[list[dict[str, Any]], list[Series]]:
        """Rows and curves of what is shown, read anew."""
        shown = self._shown.value
        return Painter().gather(self.runs_dir, None if shown == ALL else shown)

    def _stem(self) -> Path:
        """Where the shown is saved, without the ending: beside the sweep's manifest."""
        shown = self._shown.value
        return self.runs_dir / ("all-runs" if shown == ALL else f"{shown}.sweep")

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("This Lab is closed, or one that was made later has taken over: use that one.")


def _warm_launcher() -> None:
    """Lets the launcher load torch, in its own process, while the user still chooses."""
    from gptlab import launcher

    launcher.warm()
