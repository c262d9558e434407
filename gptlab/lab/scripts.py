"""What a view of runs shows, as Python calls: a script that draws the same curves, the same report.

    >>> print(scripts.picture("lab-1a2b3c", Path("runs"), {"x": "tokens"}))

Left out on purpose: the box that they stand in (`parts.py`), the calls of what was done to runs (`runsview.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from gptlab.lab.parts import call


def picture(
    sweep: str | None,
    runs_dir: Path,
    axes: Mapping[str, Any],
    *,
    hidden: Collection[str] = (),
    only: Sequence[str] = (),
    log: str | None = None,
) -> str:
    """The calls that draw a view's curves, in colours that are counted from the first of them.

    Args:
        sweep: whose runs are shown; None for all of the folder.
        axes: how they are drawn (`figures.draw`).
        hidden, only: names that are left out, or that alone are shown.
        log: a run whose log is shown too.
    """
    folder = str(runs_dir)
    runs = f"{call('gptlab.sweeps.Sweep.open', sweep, folder)}.runs" if sweep else call("gptlab.list_runs", folder)
    if only:
        runs = opened(only, runs_dir)
    elif hidden:
        runs = f"[run for run in {runs} if run.name not in {sorted(hidden)!r}]"
    drawn = "".join(f", {key}={value!r}" for key, value in axes.items() if value not in (False, "step"))
    lines = [
        "import gptlab, gptlab.sweeps", "from gptlab.lab import figures, report", f"runs = {runs}",
        f"figures.save(figures.draw([figures.read(run) for run in runs]{drawn}), 'runs.png')",
    ]  # fmt: skip
    if log:
        lines.append(f"print({call('gptlab.Run.open', log, folder)}.log())")
    return "\n".join(lines)


def report(names: Sequence[str], runs_dir: Path, path: Path, title: str) -> str:
    """The call that writes runs as a page."""
    written = call("report.write", str(path), title=title)
    return written.replace("write(", f"write({opened(names, runs_dir)}, ", 1)


def opened(names: Sequence[str], runs_dir: Path) -> str:
    """Runs by name."""
    return f"[gptlab.Run.open(name, {str(runs_dir)!r}) for name in {list(names)!r}]"
