"""The drawing process: turns run directories into SVG and HTML text outside the kernel, at low priority.

Drawing in a kernel's thread would break the user's own figures (matplotlib's text parser is global) and take the
kernel's time. So a process of its own (`process.py`) reads the runs and draws; the kernel puts finished text into
widgets.

    $ echo '{"kind": "runs", "view": "one", "runs_dir": "runs"}' | python -m gptlab.lab.drawing

Requests and answers are JSON, one object a line. Every request has a `kind`, `runs_dir`, and `view`, the name under
which the process remembers what was drawn. An answer is `{}` where nothing has changed or the
last picture is too fresh.

    runs      the view of `runsview.py`: `sweep` (null for every run), `x`, `log_x`, `log_y`, `sort`, `descending`,
              `hidden`, `only`, `picked`, `log` (a run's name), `compare` (names), `running`, `save` (a path without
              ending) -> `svg`, `table`, `progress`, `active`, `runs`, `sweeps`, `log`, `compare`, `cost_s`, `saved`
    cluster   the tiles of `clusterview.py`: `run` -> `tiles`, `attempts`, `ranks`, `state`, `runs`
    progress  the bar of a `sweep` -> `progress`
    list      -> `runs`: name, state and whether there is a checkpoint, of each

Left out on purpose: what the picture looks like (`figures.py`, `tables.py`, `tiles.py`).
"""

from __future__ import annotations

import html
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from gptlab.csvfile import write_csv
from gptlab.lab import figures, tables, tiles
from gptlab.lab.comparing import comparison
from gptlab.lab.gathering import Gatherer, marks
from gptlab.lab.naming import sweeps_in
from gptlab.lab.process import serve
from gptlab.runs import ACTIVE, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARE = 0.1
"""Part of one core that this process may take, pictures and mere looks together: it rests until that is true again."""
SHORTEST_S, BUSY_S = 0.5, 1.5
"""Seconds between two pictures, at least: where there is room on the cores, and where all of them are busy. There a
picture, and the browser that shows it, take their time from training: threads in lock-step lose all that one core does.
"""
SPARE = 0.5
"""Idle cores, on average since the last picture, that are room enough."""
LOG_LINES = 200
"""Last lines of a run's log that are shown."""


@dataclass
class _Memory:
    """What a view was shown last."""

    seen: Any = None
    sweep: Any = None
    marks: dict[str, tuple[Any, ...]] | None = None
    asked: dict[str, Any] | None = None
    shown: frozenset[str] = frozenset()
    at: float = -math.inf
    """When the last picture was begun, in `time.monotonic()`."""
    cpu_s: float = 0.0
    """What the process had used until then."""
    idle_s: float = 0.0
    """For how long the machine's cores together had been idle until then."""


class Painter:
    """The process's side: answers requests, remembers what it drew for each view."""

    def __init__(self) -> None:
        self._gatherer = Gatherer()
        self._views: dict[str, _Memory] = {}
        self._canvas: Figure | None = None
        """Drawn on again and again."""

    def look(self, request: dict[str, Any]) -> dict[str, Any]:
        """One answer to one request."""
        answer: dict[str, Any] = getattr(self, f"_{request['kind']}")(request)
        return answer

    def _runs(self, request: dict[str, Any]) -> dict[str, Any]:
        at, cpu_s = time.monotonic(), time.process_time()
        runs_dir, name = Path(request["runs_dir"]), request.get("sweep")
        view = self._views.setdefault(request["view"], _Memory())
        sweep, runs = self._gatherer.find(runs_dir, name)
        asked = {key: value for key, value in request.items() if key != "save"}
        names = sweeps_in(runs_dir)
        now = marks(runs)
        seen = (now, names, sweep, _log_mark(runs_dir, request.get("log")))  # a manifest that changed is another sweep
        points = frozenset(run for run, mark in now.items() if mark[0] and mark[0][1])
        # A first point, a question or a sweep that changed, or the end is worth a picture at once; more of the same can
        # wait.
        urgent = view.asked != asked or sweep is not view.sweep or not points <= view.shown or view.marks is None
        urgent = urgent or [mark[-1] for mark in now.values()] != [mark[-1] for mark in (view.marks or {}).values()]
        same = seen == view.seen and view.asked == asked
        idle_s, passed = _idle_s(), at - view.at
        least = SHORTEST_S if idle_s - view.idle_s >= SPARE * passed else BUSY_S
        rested = passed >= least and cpu_s - view.cpu_s <= SHARE * passed
        if "save" not in request and (same or not (urgent or rested)):
            return {}
        rows, series, places = self._gatherer.gather(
            runs_dir, name, hidden=request.get("hidden", ()), only=request.get("only", ())
        )
        axes = {key: request[key] for key in ("x", "log_x", "log_y") if key in request}
        answer: dict[str, Any] = {}
        if "save" in request:
            answer["saved"] = save(Path(request["save"]), series, rows, places=places, **axes)
        self._canvas = figures.draw(series, places=places, legend=False, onto=self._canvas, **axes)
        answer["svg"] = figures.page(self._canvas, figures.describe(series))
        sort, descending = request.get("sort"), bool(request.get("descending"))
        answer["table"] = tables.table(
            tables.ordered(rows, sort, descending),
            dict(zip((one.name for one in series), places, strict=True)),
            names=sweep is None, sorted_by=sort, descending=descending, picked=request.get("picked", ()),
            clickable=bool(request.get("clickable")),
        )  # fmt: skip
        answer["progress"] = tables.progress(rows, bool(request.get("running")))
        answer["active"] = sum(mark[-1] in ACTIVE for mark in now.values())  # hidden ones too: they can be stopped
        answer["runs"] = [[run, mark[-1]] for run, mark in now.items()]
        answer["sweeps"] = names
        answer["log"] = self._log(runs_dir, request.get("log"))
        compared = [run for run in runs if run.name in request.get("compare", ())]
        answer["compare"] = comparison(compared) if compared else ""
        view.seen, view.sweep, view.marks, view.asked, view.shown = seen, sweep, now, asked, points
        view.at, view.cpu_s, view.idle_s = at, cpu_s, idle_s
        answer["cost_s"] = time.process_time() - cpu_s
        return answer

    def _log(self, runs_dir: Path, name: str | None) -> str:
        """The end of what a run printed, and its error, as HTML."""
        run = self._gatherer.run(runs_dir, name) if name else None
        if run is None:
            return ""
        lines = run.log().splitlines()[-LOG_LINES:]
        if (error := run.error()) is not None and run.state not in ACTIVE:
            lines += ["", *str(error.get("traceback") or error.get("message")).splitlines()[-LOG_LINES:]]
        text = html.escape("\n".join(lines) or "nothing was printed yet")
        return (
            f'<pre class="gptlab-log" tabindex="0" aria-label="Log of {html.escape(run.name)}" style="max-height:16em;'
            "overflow:auto;font-size:12px;line-height:1.4;margin:0;padding:6px 8px;border:1px solid "
            f'var(--jp-border-color2,#ddd);color:var(--jp-ui-font-color1,#24292e)">{text}</pre>'
        )

    def _cluster(self, request: dict[str, Any]) -> dict[str, Any]:
        runs_dir = Path(request["runs_dir"])
        run = self._gatherer.run(runs_dir, request["run"]) if request.get("run") else None
        answer = self._list(request)
        if run is None:
            return answer | {"tiles": "", "attempts": "", "ranks": [], "state": ""}
        status = run.status()
        return answer | {
            "tiles": tiles.tiles(run, status),
            "attempts": tiles.attempts(run.attempts_table()),
            "ranks": list(range(int(status.get("world_size") or 0))),
            "state": status["state"],
        }

    def _progress(self, request: dict[str, Any]) -> dict[str, Any]:
        sweep, runs = self._gatherer.find(Path(request["runs_dir"]), request.get("sweep"))
        view = self._views.setdefault(request["view"], _Memory())
        now = (marks(runs), sweep, request.get("running"))
        if now == view.seen:
            return {}
        view.seen = now
        rows = sweep.rows() if sweep is not None else tables.run_rows(runs)
        return {"progress": tables.progress(rows, bool(request.get("running")))}

    def _list(self, request: dict[str, Any]) -> dict[str, Any]:
        _, runs = self._gatherer.find(Path(request["runs_dir"]), None)
        return {"runs": [[run.name, run.state, bool(run.checkpoints())] for run in reversed(runs)]}


def _idle_s() -> float:
    """For how many seconds the machine's cores, added up, have been idle since it started."""
    return float(psutil.cpu_times().idle)


def _log_mark(runs_dir: Path, name: str | None) -> Any:
    """What changes when a log that is shown has grown."""
    run = Run(runs_dir / name) if name else None
    return len(run.log()) if run is not None else None


def save(stem: Path, series: Sequence[figures.Series], rows: Sequence[dict[str, Any]], **drawn: Any) -> list[str]:
    """Writes the picture (PNG, SVG) and the table beside each other, each whole or not at all; gives their paths."""
    picture, vector = (stem.with_name(stem.name + ending) for ending in (".png", ".svg"))
    figure = figures.draw(series, **drawn)
    figures.save(figure, picture)
    figures.save(figure, vector, description=figures.describe(series))
    if not rows:
        return [str(picture), str(vector)]
    table = stem.with_name(stem.name + ".csv")
    write_csv(table, list(dict.fromkeys(name for row in rows for name in row)), rows)
    return [str(picture), str(vector), str(table)]


def main() -> None:
    """Answers requests until standard input ends."""
    os.nice(10)  # training and the user's cells come first
    painter = Painter()
    # A picture of nothing loads fonts and backends before anyone waits for them.
    figures.svg(figures.draw([]), "")
    serve(painter.look)


if __name__ == "__main__":
    main()
