"""The Lab: choose shapes of a GPT, press Run, watch real training draw itself, let it write, press Stop.

    >>> from gptlab.lab import Lab
    >>> lab = Lab()
    >>> lab                     # in a notebook: sliders, buttons, live curves, the table
    >>> lab.choose(n_layer=[2, 4], n_head=2, n_embd=[64, 128], max_iters=200)
    >>> lab.run()
    >>> await lab.done()        # the buttons stay alive meanwhile

It is four parts that stand alone as well: `SweepPanel` chooses and runs, `RunsView` watches, `SampleBox` lets a run
write, `ClusterView` shows its processes. Whatever a button does is a method too. Training happens in the launcher's
processes, drawing and sampling in processes of their own, so the kernel stays free. `Lab(runs_dir)` shows the runs that
are there, also after the kernel has been restarted, and those that another process still trains.
Left out on purpose: what the parts do.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from gptlab import sweeps
from gptlab.lab.clusterview import ClusterView
from gptlab.lab.parts import fold
from gptlab.lab.runsview import RunsView
from gptlab.lab.samplebox import SampleBox
from gptlab.lab.sweeppanel import SweepPanel
from gptlab.runs import default_runs_dir

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from gptlab.lab.curves import XAxis


class Lab:
    """Choices, buttons, live curves and the table of a sweep, and folded under them text, processes and code.

    Args:
        runs_dir: where runs are written and read; GPTLAB_RUNS, or `runs`, unless told otherwise.
        name: what its sweeps' names begin with.
        choice: as for `choose`.

    Raises:
        ConfigError: a choice that cannot be.
    """

    def __init__(self, runs_dir: str | os.PathLike[str] | None = None, *, name: str = "lab", **choice: Any) -> None:
        self.runs_dir = Path(runs_dir) if runs_dir is not None else default_runs_dir()
        self.name = name
        self.panel = SweepPanel(self.runs_dir, name=name, kind="lab's sweep", **choice)
        self.runs = RunsView(self.runs_dir, kind=f"lab's runs {name}")
        self.samples = SampleBox(self.runs_dir, kind=f"lab's samples {name}")
        self.cluster = ClusterView(self.runs_dir, kind=f"lab's cluster {name}")
        view = self.runs
        self.panel.started = lambda sweep: view.show(sweep)
        self.panel.drawn = lambda: view.axes  # type: ignore[method-assign]
        self.panel.progress.layout.display = "none"  # the view has one
        self.panel.widget.children = [self.panel.choices, self.panel.plan, self.panel.bar]
        view.widget.children = [view.bar, view.progress, view.picture, view.table_html, *view.below]
        code = widgets.VBox([self.panel.code.widget, view.code.widget], layout={"grid_gap": "10px"})
        folded = fold([
            ("every setting", self.panel.settings),
            *view.more[:1],
            ("let a run write", self.samples.widget),
            ("processes: heartbeats, kill, add and take workers", self.cluster.widget),
            ("code", code),
        ])  # fmt: skip
        folded.add_class("gptlab-fold")
        self.widget = widgets.VBox(
            [self.panel.widget, view.widget, folded], layout={"max_width": "1150px", "grid_gap": "6px"}
        )
        self.widget.add_class("gptlab-lab")
        if self.panel.sweep is not None:
            view.show(self.panel.sweep.name)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The widgets, and a text that is always the same, so that executed notebooks can be compared."""
        return {**(self.widget._repr_mimebundle_() or {}), "text/plain": "Lab"}

    def choose(self, **choice: Any) -> None:
        """Sets what the widgets say: n_layer, n_head, n_embd to one value or several, any other field to one.

        Raises:
            ConfigError: an unknown field or a value that cannot be; nothing is changed then.
        """
        self.panel.choose(**choice)

    def run(self, *, at_once: int | None = None) -> None:
        """Starts the chosen sweep and returns; what is finished already is not run again.

        Raises:
            ConfigError: nothing that could be run, or a sweep of this Lab is still running.
        """
        self.panel.run(at_once=at_once)

    def stop(self) -> None:
        """Asks the running runs to stop, each with a checkpoint, and starts no more. `done` waits for the end."""
        self.panel.stop()

    async def done(self) -> None:
        """Waits until nothing trains, picture and table are saved, and the end is on the page. Buttons work
        meanwhile."""
        await self.panel.done()
        ended, self.runs.due = time.monotonic(), 0.0
        while self.runs.shown_at < ended:
            self.runs.check_open()
            await asyncio.sleep(0.05)

    def show(self, sweep: str | None = None, *, x: XAxis | None = None, **axes: bool) -> None:
        """Shows another sweep of the folder ("" for every run), or draws the axes otherwise: `RunsView.show`."""
        self.runs.show(sweep, x=x, **axes)

    @property
    def sweep(self) -> sweeps.Sweep | None:
        """The sweep that is shown, or None where every run of the folder is."""
        name = self.runs.sweep_name
        if self.panel.sweep is not None and self.panel.sweep.name == name:
            return self.panel.sweep
        return None if name is None else sweeps.Sweep.open(name, self.runs_dir)

    def table(self) -> pandas.DataFrame:
        """What the table shows, a row a run, invalid cells too. Columns as in `gptlab sweep`'s CSV."""
        return self.runs.table()

    def figure(self, **drawn: Any) -> Figure:
        """The curves as a matplotlib figure. Call it in a cell, never in a thread."""
        return self.runs.figure(**drawn)

    def save(self) -> list[Path]:
        """Writes picture (PNG, SVG) and table (CSV) to the runs folder; gives their paths, as a sweep's end does."""
        return self.runs.save()

    def report(self) -> Path:
        """Writes the shown runs as one HTML file: `RunsView.report`."""
        return self.runs.report()

    @property
    def code(self) -> str:
        """The calls behind what the widgets say and did."""
        return f"{self.panel.code.text}\n{self.runs.code.text}"

    def close(self) -> None:
        """Stops the training that this Lab started, and takes its parts off the page."""
        for part in (self.panel, self.runs, self.samples, self.cluster):
            part.close()
        self.widget.close()
