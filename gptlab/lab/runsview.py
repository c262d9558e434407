"""The view of runs: live curves, a table that sorts, progress, logs; stop, resume, compare and hide.

    >>> from gptlab.lab import RunsView
    >>> view = RunsView("runs")
    >>> view                          # in a notebook
    >>> view.show(x="tokens", log_y=True); view.sort("val_loss"); view.compare("a", "b")

It reads run directories, so it shows runs of this kernel, of another notebook, of a terminal, and those that an earlier
kernel left; several views can watch the same runs. Drawing happens in a process of its own (`drawing.py`). Whatever a
widget does is a method too, and the box under "code" says the call.
Left out on purpose: starting runs (`sweeppanel.py`), what is drawn (`figures.py`, `tables.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from gptlab.config import ConfigError, did_you_mean
from gptlab.lab import scripts, stopping, tables
from gptlab.lab.actions import Actions
from gptlab.lab.curves import XAxis
from gptlab.lab.desk import Part
from gptlab.lab.naming import sweeps_in
from gptlab.lab.parts import CodeBox, call, fold, message, row, set_text, set_value, sheet, wide
from gptlab.lab.reporting import Reports
from gptlab.lab.viewbar import ViewBar
from gptlab.runs import Run, default_runs_dir

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

LIVE_S, QUIET_S = 0.2, 2.0
"""Seconds between two looks at the runs while some train, and while none does."""


class RunsView(Part):
    """Curves and table of the runs in a folder, or of one of its sweeps.

    Args:
        runs_dir: where runs are read; GPTLAB_RUNS, or `runs`, unless told otherwise.
        sweep: which sweep is shown; the newest, and every run where there is none. "" is every run.
        kind: of several views of a folder, those of one kind take over from one another.

    Raises:
        ConfigError: there is no such sweep.
    """

    def __init__(
        self, runs_dir: str | os.PathLike[str] | None = None, *, sweep: str | None = None, kind: str = "runs"
    ) -> None:
        super().__init__(kind, Path(runs_dir) if runs_dir is not None else default_runs_dir())
        self.code = CodeBox()
        self._hidden: set[str] = set()
        self._compared: list[str] = []
        self._log_of: str | None = None
        self.active = False
        """Whether a run of the sweep or the folder trained at the last look, hidden or not."""
        self._mistaken = False
        """Whether the message is that of a look that went wrong: one that goes well takes it away."""
        self.asked_at = self.shown_at = 0.0
        """When the last look began, and when the last one began that is on the page, in `time.monotonic()`."""
        self._build()
        if sweep is not None:
            self._choose(sweep)
        self._tell()
        self._open()

    def _build(self) -> None:
        """The widgets. Their callbacks hold the mailbox and not the view."""
        post = self.post
        self.picture, self.table_html, self.progress = wide("picture"), wide("runs"), wide("progress")
        self._log, self._comparison = wide("log-box"), wide("comparison")
        self._message, self._reports = widgets.HTML(), Reports()
        self._message.add_class("gptlab-view-message")
        self._bar = ViewBar(sweeps_in(self.runs_dir), lambda: post.put("look"))
        self._actions = Actions(post)
        self.bar = self._bar.widget
        acts = widgets.VBox([self._actions.widget, row([self._message, self._reports.link])])
        self.more = [
            ("stop, resume, compare, hide, log, report", acts),
            ("code", self.code.widget),
        ]
        self.below = [self._comparison, self._log]
        self.widget = widgets.VBox(
            [sheet(tables.STYLE), self.bar, self.progress, self.picture, self.table_html, *self.below, fold(self.more)],
            layout={"max_width": "1150px", "grid_gap": "6px"},
        )
        self.widget.add_class("gptlab-view")

    # What widgets do, as calls -----------------------------------------------------------------------------------

    def show(self, sweep: str | None = None, *, x: XAxis | None = None, log_x: bool | None = None,
             log_y: bool | None = None) -> None:  # fmt: skip
        """Shows another sweep of the folder ("" for every run), or draws the axes otherwise.

        Raises:
            ConfigError: a value that cannot be.
        """
        if sweep is not None:
            self._choose(str(sweep))
        for name, widget, value in (
            ("x", self._bar.x, x), ("log_x", self._bar.log_x, log_x), ("log_y", self._bar.log_y, log_y)
        ):  # fmt: skip
            if value is not None:
                set_value(widget, name, value)
        self.due = 0.0

    def sort(self, column: str | None, *, descending: bool = False) -> None:
        """Sorts the table by a column as `table()` names it; None leaves the order in which runs were started.

        Raises:
            ConfigError: there is no such column.
        """
        self._bar.sort_by(column, descending)
        self.due = 0.0

    def stop(self, *names: str) -> None:
        """Asks runs to stop after the step they take, each with a checkpoint; without names all of the sweep or the
        folder that train, hidden ones too, and the queues that would start more."""
        if names:
            calls = stopping.stop_runs(self._runs(names))
        else:
            own = [sweep.name for sweep in self.desk.active_sweeps(self.runs_dir)]
            calls = stopping.stop_all(self.runs_dir, self.sweep_name, own)
        for said in calls:
            self.code.add(said)
        self.due = 0.0

    def resume(self, *names: str) -> None:
        """Goes on with runs from their newest checkpoint; without names with all that are shown and were interrupted.

        Raises:
            ConfigError: a run that is finished, or that another process trains.
        """
        from gptlab import launcher

        runs = self._runs(names) or [run for run in self._shown() if run.state in ("stopped", "failed", "lost")]
        for run in runs:
            handle = launcher.resume(run.name, runs_dir=self.runs_dir)
            self.desk.handles[run.path.absolute()] = handle
            self.code.add(call("gptlab.resume", run.name, runs_dir=str(self.runs_dir)))
        self.due = 0.0

    def hide(self, *names: str) -> None:
        """Leaves runs out of picture and table; `show_all` brings them back."""
        self._hidden |= {run.name for run in self._runs(names)}
        self.due = 0.0

    def compare(self, *names: str) -> pandas.DataFrame:
        """Shows these runs alone, with the settings in which they differ, and gives those, a column a run; without
        names, of all that are shown."""
        import pandas

        from gptlab.lab.comparing import differences

        runs = self._runs(names) or self._shown()
        self._compared = [run.name for run in runs]
        self.due = 0.0
        return pandas.DataFrame.from_dict(differences(runs), orient="index", columns=self._compared)

    def log(self, name: str) -> str:
        """Shows what a run printed, and gives it."""
        (run,) = self._runs([name])
        self._log_of = run.name
        self.due = 0.0
        return run.log()

    def show_all(self) -> None:
        """Takes back `hide`, `compare` and `log`."""
        self._hidden, self._compared, self._log_of = set(), [], None
        self.due = 0.0

    def table(self) -> pandas.DataFrame:
        """What the table shows, a row a run, invalid cells too. Columns as in `gptlab sweep`'s CSV."""
        import pandas

        rows = self._gather()[0]
        table = pandas.DataFrame(tables.ordered(rows, *self._bar.order))
        for column in ("parameters", "non_embedding", "step", "max_iters"):
            if column in table:
                table[column] = table[column].astype("Int64")  # whole numbers, also beside cells without one
        return table

    def figure(self, **drawn: Any) -> Figure:
        """The curves as a matplotlib figure, drawn as the view is unless told otherwise (`figures.draw`). Call it in a
        cell, never in a thread."""
        from gptlab.lab import figures

        _, series, places = self._gather()
        return figures.draw(series, **({"places": places} | self.axes | drawn))

    def save(self) -> list[Path]:
        """Writes picture (PNG, SVG) and table (CSV) to the runs folder; gives their paths."""
        from gptlab.lab.drawing import save

        rows, series, places = self._gather()
        return [Path(path) for path in save(self.stem, series, rows, places=places, **self.axes)]

    def report(self) -> Path:
        """Writes the shown runs as one HTML file, as `gptlab report` does; gives its path. Call it in a cell, never in
        a thread."""
        from gptlab.lab import report

        return report.write(self._shown(), self.report_path, title=self.sweep_name or "")

    @property
    def axes(self) -> dict[str, Any]:
        """How the axes are drawn."""
        return self._bar.axes

    @property
    def sweep_name(self) -> str | None:
        """The sweep that is shown; None where every run is."""
        return self._bar.sweep

    @property
    def stem(self) -> Path:
        """Where the shown is saved, without the ending: beside the sweep's manifest."""
        return self.runs_dir / (f"{self.sweep_name}.sweep" if self.sweep_name else "all-runs")

    @property
    def report_path(self) -> Path:
        """Where the report of the shown is written."""
        return self.stem.with_name(self.stem.name + ".html")

    @property
    def picked(self) -> list[str]:
        """Names of the runs that are picked."""
        return self._actions.picked

    def _gather(self) -> tuple[list[dict[str, Any]], list[Any], list[int]]:
        from gptlab.lab.gathering import Gatherer

        return Gatherer().gather(self.runs_dir, self.sweep_name, hidden=self._hidden, only=self._compared)

    def _shown(self) -> list[Run]:
        """The runs that are shown and were started."""
        from gptlab.lab.gathering import Gatherer

        runs = Gatherer().find(self.runs_dir, self.sweep_name)[1]
        return [run for run in runs if run.name in (self._compared or {run.name} - self._hidden)]

    def _runs(self, names: Sequence[str]) -> list[Run]:
        """The runs of these names."""
        return [Run.open(name, self.runs_dir) for name in names]

    def _choose(self, sweep: str) -> None:
        """Shows a sweep, or every run ("")."""
        known = sweeps_in(self.runs_dir)
        if sweep and sweep not in known:
            raise ConfigError(f"There is no sweep {sweep!r} in {self.runs_dir}{did_you_mean(sweep, known)}.")
        self._bar.choose(sweep)

    # The desk's thread -------------------------------------------------------------------------------------------

    def do_look(self) -> None:
        """Something was chosen: the desk looks at once after any command."""
        self._tell()

    def do_button(self, text: str) -> None:
        """A button over the picked runs."""
        picked = self.picked
        if text == "Stop all":
            self.stop()
            return self.say("Stopping: each run ends with its step and a checkpoint …")
        if text == "Report":
            return self._begin_report(self._runs(picked) if picked else self._shown())
        if text == "Show all":
            self.show_all()
        elif not picked:
            raise ConfigError(f"{text} needs a run: pick one or more in the list, or by a click on their rows.")
        elif text == "Log":
            self._log_of = picked[-1]
        elif text == "Compare":
            self._compared = picked
        else:
            getattr(self, text.lower())(*picked)
        self._tell()
        self.say("")

    def _begin_report(self, runs: Sequence[Run]) -> None:
        """The button Report: the page is written beside the kernel."""
        title = self.sweep_name or ""
        self._reports.begin(runs, self.report_path, title=title)
        self.code.add(scripts.report([run.name for run in runs], self.runs_dir, self.report_path, title))
        self.say(f"Writing a report of {len(runs)} run{'s' * (len(runs) != 1)} …")

    def turn(self) -> float:
        if (news := self._reports.take()) is not None:
            self.say(news.get("error", "The report is written:"), bad="error" in news)
        return 0.1 if self._reports.is_busy else super().turn()

    def look(self) -> dict[str, Any]:
        self.asked_at = time.monotonic()
        # A sweep that was just started has no run at work yet: its first point is looked for as often as any.
        live = self.active or bool(self.desk.active_sweeps(self.runs_dir))
        self.due = self.asked_at + (LIVE_S if live else QUIET_S)
        sort, descending = self._bar.order
        return {
            "kind": "runs", "runs_dir": str(self.runs_dir), "sweep": self.sweep_name, **self.axes,
            "sort": sort, "descending": descending, "hidden": sorted(self._hidden),
            "only": self._compared, "compare": self._compared, "picked": self.picked, "log": self._log_of,
            "running": self.active, "clickable": True,
        }  # fmt: skip

    def display(self, answer: dict[str, Any]) -> None:
        self.shown_at = self.asked_at
        for widget, name in (
            (self.progress, "progress"), (self.table_html, "table"), (self._comparison, "compare"), (self._log, "log"),
            (self.picture, "svg"),
        ):  # fmt: skip
            if name in answer:
                set_text(widget, answer[name])
        if "error" in answer:
            self.say(answer["error"], bad=True)
            self._mistaken = True
        elif self._mistaken:
            self.say("")
        if "runs" in answer:
            self._bar.offer(answer["sweeps"])
            self.active = answer["active"] > 0
            self._actions.offer(dict(answer["runs"]))
            self._tell()

    def left(self) -> None:
        """A report that is on its way is given up."""
        self._reports.close()

    def say(self, text: str, *, bad: bool = False) -> None:
        self._mistaken = False
        set_text(self._message, message(text, bad=bad) if text else "")

    def _tell(self) -> None:
        """The calls that draw the same curves in a script."""
        self.code.show(
            scripts.picture(
                self.sweep_name, self.runs_dir, self.axes, hidden=self._hidden, only=self._compared, log=self._log_of
            )
        )
