"""What watching costs, measured: each figure beside the limit it is held to.

    make watchcosts                                 all of it, some twelve minutes; nothing else should run meanwhile
    python tests/watchcosts/measure.py --quick      a look at each, some two minutes: no measure
    python tests/watchcosts/measure.py --only sweep one; may be repeated
    python tests/watchcosts/measure.py --list

The exit code is 0 only if no limit is broken. Wants Chromium on the PATH, as the browser tests do.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "browser"))

import costs
from rich.console import Console
from rich.table import Table

NOTEBOOKS = ["01", "02", "03", "04", "05"]
MEASURES: dict[str, tuple[str, Callable[[Path], list[costs.Cost]], Callable[[Path], list[costs.Cost]]]] = {
    "watching": (
        "delay, shares of a core, growth (6 minutes)",
        lambda folder: costs.watching(folder, 60, 300),
        lambda folder: costs.watching(folder, 8, 10),
    ),
    "slowdown": (
        "training watched against unwatched (3 minutes)",
        lambda folder: costs.slowdown(folder, 10, 7),
        lambda folder: costs.slowdown(folder, 4, 2),
    ),
    "sweep": (
        "12 runs of 8 s, one at a time (2 minutes)",
        lambda folder: costs.sweep(folder, 12),
        lambda folder: costs.sweep(folder, 2, 3.0),
    ),
    "first": (
        "from Run to the first point (half a minute)",
        lambda folder: costs.first_point(folder, 7),
        lambda folder: costs.first_point(folder, 2),
    ),
    "notebooks": (
        "sizes of executed notebooks (3 minutes)",
        lambda folder: costs.notebooks(folder, "test", NOTEBOOKS),
        lambda folder: costs.notebooks(folder, "test", NOTEBOOKS[:1]),
    ),
}
"""By name what is measured, in full and in the short form."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/watchcosts/measure.py", description="What watching costs.")
    parser.add_argument("--only", action="append", choices=list(MEASURES), help="may be repeated")
    parser.add_argument("--quick", action="store_true", help="the short form")
    parser.add_argument("--list", action="store_true", help="names the measures")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{name:10} {what}" for name, (what, _, _) in MEASURES.items()))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ended so, it still ends JupyterLab and the browser
    found: list[costs.Cost] = []
    for name in arguments.only or MEASURES:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="gptlab-watchcosts-", ignore_cleanup_errors=True) as folder:
            os.environ["GPTLAB_RUNS"] = str(Path(folder) / "runs")
            (Path(folder) / "runs").mkdir()
            _, full, short = MEASURES[name]
            found += (short if arguments.quick else full)(Path(folder))
        print(f"{name:10} {time.monotonic() - began:6.1f} s", file=sys.stderr, flush=True)
    table = Table("what", "measured", "limit", "", "", box=None, pad_edge=False)
    for cost in found:
        limit = "" if cost.limit is None else f"{cost.limit:g}"
        verdict = "" if cost.limit is None else "OVER" if cost.is_over else "within"
        table.add_row(cost.what, f"{cost.value:.3g} {cost.unit}", limit, verdict, cost.said)
    Console(width=None if sys.stdout.isatty() else 180, highlight=False, markup=False).print(table)
    return 1 if any(cost.is_over for cost in found) else 0


if __name__ == "__main__":
    sys.exit(main())
