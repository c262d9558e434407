"""Choosing a grid of shapes, running it as a sweep, stopping it.

    >>> from gptlab.lab import SweepPanel
    >>> panel = SweepPanel(n_layer=[2, 4], n_head=2, n_embd=[64, 128], max_iters=200)
    >>> panel                        # in a notebook: ranges, the price, Run and Stop, progress
    >>> panel.run(); await panel.done()

A sweep is named by its settings: what is finished is not run again, however often Run is pressed or the kernel
restarted. A panel that is made again, as by running its cell twice, takes over from the one before, its running sweep
included. Left out on purpose: the curves (`runsview.py`), the queue of runs (`sweeps.py`).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as widgets

from gptlab import sweeps
from gptlab.config import ConfigError, TrainConfig
from gptlab.lab import stopping
from gptlab.lab.naming import sweep_name
from gptlab.lab.panel import BASE, ConfigPanel, _warm_launcher
from gptlab.lab.parts import button, call, fold, row, set_text, set_value, wide

GRID: dict[str, list[int]] = {"n_layer": [1, 2, 4], "n_head": [2, 3], "n_embd": [64, 96]}
LIVE_S = 0.3
"""Seconds between two looks while its sweep is at work."""


class SweepPanel(ConfigPanel):
    """A ConfigPanel whose shape takes ranges, with the sweep that they make.

    Args:
        runs_dir: where runs are written; GPTLAB_RUNS, or `runs`, unless told otherwise.
        name: what its sweeps' names begin with.
        kind: of several panels of a folder and name, those of one kind take over from one another.
        choice: as for `choose`.

    Raises:
        ConfigError: a choice that cannot be.
    """

    def __init__(
        self, runs_dir: str | os.PathLike[str] | None = None, *, name: str = "lab", kind: str = "sweep", **choice: Any
    ) -> None:
        self.name = name
        self.sweep: sweeps.Sweep | None = None
        """The sweep that this panel started or took over."""
        self.started: Callable[[str], None] | None = None
        """Told the name of each sweep that begins, on whatever thread."""
        self._idle, self._starting, self._saving = threading.Event(), threading.Lock(), False
        self._idle.set()
        super().__init__(TrainConfig(**BASE), runs_dir=runs_dir, grid=GRID, kind=f"{kind} {name}", **choice)

    def _opened(self) -> None:
        before = self._open()
        _warm_launcher()
        if isinstance(before, SweepPanel) and before.sweep is not None and before.sweep.is_active:
            self._idle.clear()
            self.post.put("watch", before.sweep)

    def _build(self) -> None:
        super()._build()
        post, idle = self.post, self._idle
        self.progress = wide("panel-progress")

        def pressed() -> None:
            idle.clear()
            post.put("run")

        self._run = button("Run", "play", "Train the chosen runs, one after another", pressed, style="primary")
        self._stop = button("Stop", "stop", "Stop the training runs, each with a checkpoint", lambda: post.put("stop"))
        self._stop.disabled = True
        self._run.layout.width = self._stop.layout.width = "110px"
        self._at_once = widgets.BoundedIntText(
            1, min=1, max=64, description="at once", tooltip="Runs that train at the same time; they share the cores",
            style={"description_width": "auto"}, layout={"width": "115px"},
        )  # fmt: skip
        self._at_once.add_class("gptlab-at-once")
        self._at_once.observe(lambda _: post.put("price"), "value")
        self.bar = row([self._run, self._stop, self._at_once, self._message])
        self._fold = fold([("every setting", self.settings), ("code", self.code.widget)])
        self.widget.children = [self.choices, self.plan, self.bar, self.progress, self._fold]

    # What widgets do, as calls -----------------------------------------------------------------------------------

    def run(self, *, at_once: int | None = None) -> None:
        """Starts the chosen sweep and returns; what is finished already is not run again.

        Raises:
            ConfigError: nothing that could be run, or a sweep of this panel is still running.
        """
        self.check_open()
        if at_once is not None:
            set_value(self._at_once, "at_once", at_once)
        self.post.put("watch", self._start())

    def stop(self) -> None:
        """Asks the running runs to stop, each with a checkpoint, and starts no more. `done` waits for the end."""
        self.check_open()
        self.post.put("stop")

    async def done(self) -> None:
        """Waits until nothing trains and picture and table are saved. Buttons and other widgets work meanwhile."""
        while not self._idle.is_set():
            self.check_open()
            await asyncio.sleep(0.05)

    def close(self) -> None:
        """Stops the training that this panel started, and leaves the page."""
        if self.sweep is not None:
            self.sweep.stop()
        super().close()

    def _start(self) -> sweeps.Sweep:
        """Begins the sweep that the widgets say."""
        with self._starting:
            if self.sweep is not None and self.sweep.is_active:
                raise ConfigError(f"The sweep {self.sweep.name} is still running: stop it first, or wait.")
            base, grid = self.read()
            self._meter.stop()
            self.sweep = sweeps.sweep(
                base, grid, name=sweep_name(self.name, base), runs_dir=self.runs_dir, at_once=self._at_once.value
            )
            self.desk.sweeps.append(self.sweep)
            self._idle.clear()
            return self.sweep

    # The desk's thread -------------------------------------------------------------------------------------------

    def do_price(self) -> None:
        """A choice has changed, perhaps one that no config has: how many runs train at once."""
        self._priced = None

    def do_run(self) -> None:
        try:
            self.do_watch(self._start())
        except Exception:
            if self.sweep is None or not self.sweep.is_active:
                self._idle.set()
            raise

    def do_watch(self, sweep: sweeps.Sweep) -> None:
        """A sweep has begun."""
        self.sweep, self._saving = sweep, False
        self._idle.clear()
        self._run.disabled, self._stop.disabled = True, False
        self.say(f"Training {sweep.name} …")
        if self.started is not None:
            self.started(sweep.name)

    def do_stop(self) -> None:
        """The button Stop."""
        self.say("Stopping: each run ends with its step and a checkpoint …")
        if self.sweep is not None and self.sweep.is_active:
            self.sweep.stop()
            self.code.add("sweep.stop()")
            return
        own = [sweep.name for sweep in self.desk.active_sweeps(self.runs_dir)]
        for said in stopping.stop_all(self.runs_dir, own=own):  # another process trains what is shown
            self.code.add(said)

    def turn(self) -> float:
        wait = super().turn()
        if not self._idle.is_set() and not self._saving and self.sweep is not None and not self.sweep.is_active:
            self._saving, self.due = True, 0.0
        return min(wait, 0.1) if not self._idle.is_set() else wait

    def look(self) -> dict[str, Any] | None:
        self.due = time.monotonic() + (LIVE_S if not self._idle.is_set() else 5.0)
        if self.sweep is None or self._idle.is_set():
            return None
        asked = {"runs_dir": str(self.runs_dir), "sweep": self.sweep.name, "running": self.sweep.is_active}
        if not self._saving:
            return asked | {"kind": "progress"}
        return asked | {"kind": "runs", "save": str(self.runs_dir / f"{self.sweep.name}.sweep"), **self.drawn()}

    def drawn(self) -> dict[str, Any]:
        """How the saved picture's axes are drawn: a view beside the panel says it."""
        return {}

    def display(self, answer: dict[str, Any]) -> None:
        if "progress" in answer:
            set_text(self.progress, answer["progress"])
        if "error" in answer:
            self.say(answer["error"], bad=True)
        if self._saving and ("saved" in answer or "error" in answer):
            self._saving = False
            if "saved" in answer:
                self.say("Saved " + " and ".join(os.path.relpath(path) for path in answer["saved"]) + ".")
            self._priced = None  # rates may have been measured meanwhile
            self._run.disabled, self._stop.disabled = False, True
            self._idle.set()

    def _show_code(self, base: TrainConfig, shape: dict[str, int], grid: Mapping[str, Sequence[int]]) -> None:
        at_once = {"at_once": self._at_once.value} if self._at_once.value > 1 else {}
        sweep = call("sweep = gptlab.sweep", name=sweep_name(self.name, base), runs_dir=str(self.runs_dir), **at_once)
        self.code.show(
            f"import gptlab\nbase = {self.tell(**(base.to_dict() | shape))}\ngrid = {dict(grid)!r}\n"
            f"{sweep.replace('sweep(', 'sweep(base, grid, ', 1)}\nsweep.wait()\nprint(sweep.table())"
        )
