"""The processes of a run as tiles: heartbeats, a Kill button, more and fewer workers, attempts and recovery seconds.

    >>> from gptlab.lab import ClusterView
    >>> cluster = ClusterView("runs", run="first"); cluster
    >>> cluster.kill(1); cluster.scale(3)

It shows any run of the folder; workers are killed and changed of those that this kernel has started.
Left out on purpose: what a kill leads to (`launcher/`), the tiles' look (`tiles.py`).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from gptlab.config import ConfigError
from gptlab.lab import tables, tiles
from gptlab.lab.desk import Part
from gptlab.lab.parts import SMALL, CodeBox, button, call, fold, message, row, set_options, set_text, sheet, wide
from gptlab.launcher import Handle
from gptlab.runs import ACTIVE, Run, default_runs_dir, list_runs

LIVE_S, QUIET_S = 0.3, 2.0
"""Seconds between two looks while the run trains, and while it does not."""


class ClusterView(Part):
    """Tiles of a run's ranks, with buttons that end and change them.

    Args:
        runs_dir: where runs are read; GPTLAB_RUNS, or `runs`, unless told otherwise.
        run: which run is shown: a name, or the handle that `launch` gave; the newest unless told otherwise.
        kind: of several views of a folder, those of one kind take over from one another.
    """

    def __init__(
        self, runs_dir: str | os.PathLike[str] | None = None, *, run: str | Handle | None = None, kind: str = "cluster"
    ) -> None:
        if runs_dir is None:
            runs_dir = run.run.path.parent if isinstance(run, Handle) else default_runs_dir()
        super().__init__(kind, Path(runs_dir))
        self.code = CodeBox()
        self._state, self._mistaken = "", False
        self._wanted: int | None = None
        """Workers that were asked for, until so many are there: a second press counts on from them."""
        self._build()
        if run is not None:
            self.show(run)
        self._show_code()
        self._open()

    def _build(self) -> None:
        post = self.post
        names = [run.name for run in reversed(list_runs(self.runs_dir))]
        self._run = widgets.Dropdown(options=names, value=names[0] if names else None, description="run",
                                     style={"description_width": "auto"}, layout={"width": "300px"})  # fmt: skip
        self._run.add_class("gptlab-cluster-run")
        self._run.observe(lambda _: post.put("look"), "value")
        self._rank = widgets.Dropdown(options=[], description="rank", **SMALL)
        self._rank.add_class("gptlab-rank")
        self._kill = button("Kill", "bolt", "End this rank's process with SIGKILL, as a failing machine would",
                            lambda: post.put("kill"), style="danger")  # fmt: skip
        self._fewer = button("\N{MINUS SIGN}", "", "One worker less", lambda: post.put("scale", -1), name="fewer")
        self._more = button("+", "", "One worker more", lambda: post.put("scale", 1), name="more")
        self._message = widgets.HTML()
        self.tiles, self.attempts = wide("cluster-tiles"), wide("attempts")
        self.widget = widgets.VBox(
            [row([self._run, self._rank, self._kill, widgets.Label("workers"), self._fewer, self._more, self._message]),
             sheet(tables.STYLE + tiles.STYLE), self.tiles, self.attempts, fold([("code", self.code.widget)])],
            layout={"max_width": "1150px", "grid_gap": "6px"},
        )  # fmt: skip
        self.widget.add_class("gptlab-cluster")

    # What widgets do, as calls -----------------------------------------------------------------------------------

    def show(self, run: str | Handle) -> None:
        """Shows another run: a name, or the handle that `launch` gave.

        Raises:
            ConfigError: there is no such run.
        """
        if isinstance(run, Handle):
            self.desk.handles[run.run.path.absolute()] = run
        name = run.name if isinstance(run, Handle) else Run.open(run, self.runs_dir).name
        if name not in self._run.options:
            self._run.options = [name, *self._run.options]
        self._run.value = name
        self._show_code()
        self.due = 0.0

    def kill(self, rank: int) -> None:
        """Ends a rank's process with SIGKILL.

        Raises:
            ConfigError: no such rank, or a run that this kernel did not start.
        """
        self._handle().kill_worker(rank)
        self.code.add(call("handle.kill_worker", rank))
        self.due = 0.0

    def scale(self, workers: int) -> None:
        """Goes on with so many workers, after the step that is being taken.

        Raises:
            ConfigError: a number that cannot work, or a run that this kernel did not start.
        """
        self._handle().scale(workers)
        self._wanted = workers
        self.code.add(call("handle.scale", workers))
        self.due = 0.0

    @property
    def run(self) -> Run:
        """The run that is shown."""
        return Run.open(str(self._run.value), self.runs_dir)

    def _handle(self) -> Handle:
        run = self.run
        handle = self.desk.handle(run.path)
        if handle is None:
            raise ConfigError(
                f"The run {run.name!r} was not started by this kernel, which cannot change its workers: start it here "
                "with gptlab.launch or gptlab.resume, and hand the handle to show()."
            )
        return handle

    # The desk's thread -------------------------------------------------------------------------------------------

    def do_look(self) -> None:
        """Another run was chosen: the desk looks at once after any command."""
        self._wanted = None
        self._show_code()

    def do_kill(self) -> None:
        """The button Kill."""
        if self._rank.value is None:
            raise ConfigError("There is no rank to kill: this run does not train now.")
        self.kill(int(self._rank.value))
        self.say(f"Killed rank {self._rank.value}.")

    def do_scale(self, by: int) -> None:
        """The buttons + and -."""
        workers = (self._wanted or int(self.run.status().get("world_size") or 0)) + by
        if workers < 1:
            raise ConfigError("A run needs one worker at least: stop it instead.")
        self.scale(workers)
        self.say(f"{workers} worker{'s' * (workers > 1)} after this step.")

    def look(self) -> dict[str, Any]:
        self.due = time.monotonic() + (LIVE_S if self._state in ACTIVE else QUIET_S)
        return {"kind": "cluster", "runs_dir": str(self.runs_dir), "run": self._run.value}

    def display(self, answer: dict[str, Any]) -> None:
        if "error" in answer:
            self.say(answer["error"], bad=True)
            self._mistaken = True
            return
        if self._mistaken:
            self.say("")
        set_options(self._run, [name for name, *_ in answer["runs"]])
        set_text(self.tiles, answer["tiles"])
        set_text(self.attempts, answer["attempts"])
        self._state = answer["state"]
        ranks = answer["ranks"] if self._state in ACTIVE else []
        if len(ranks) in (0, self._wanted):
            self._wanted = None
        set_options(self._rank, ranks)
        dead = self._state not in ACTIVE
        if self._kill.disabled != dead:
            self._kill.disabled = self._fewer.disabled = self._more.disabled = dead

    def _show_code(self) -> None:
        if self._run.value is None:  # no run yet
            return
        self.code.show(
            f"import gptlab\nrun = {call('gptlab.Run.open', str(self._run.value), str(self.runs_dir))}\n"
            "print(run.status(), run.attempts_table())"
        )

    def say(self, text: str, *, bad: bool = False) -> None:
        self._mistaken = False
        set_text(self._message, message(text, bad=bad))
