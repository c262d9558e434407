"""The fault campaign: runs that are killed, hung, cut off and resized, each against an unbroken run of the same seed.

    make faults                             all of it, one table
    python tests/faults --quick             the short form
    python tests/faults --only kill-07      one; a beginning of a name takes all that begin so
    python tests/faults --list

The exit code is 0 only if every case passed; a case that this machine cannot run is skipped, with its reason.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import disks
import hangs
import kills
import places
from arena import Arena, Skipped, temporary
from rich.console import Console
from rich.table import Table
from verdicts import Case

CASES = (*kills.CASES, *disks.CASES, *hangs.CASES, *places.CASES)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/faults", description="The fault campaign.")
    parser.add_argument("--only", action="append", metavar="NAME", help="cases whose name begins so; may be repeated")
    parser.add_argument("--quick", action="store_true", help="the short form, a handful of cases")
    parser.add_argument("--list", action="store_true", help="names the cases")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leaves the runs there")
    arguments = parser.parse_args()
    chosen = [case for case in CASES if not arguments.quick or case.quick]
    if arguments.only:
        names = {case.name for case in CASES}
        chosen = [
            case for case in CASES
            if any(case.name == name if name in names else case.name.startswith(name) for name in arguments.only)
        ]  # fmt: skip
    if arguments.list or not chosen:
        print("\n".join(f"{case.name:18} {case.what}" for case in CASES))
        return 0 if arguments.list else 2
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored, by all that follow
    with contextlib.ExitStack() as ending:
        folder = arguments.keep or Path(ending.enter_context(temporary()))
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        return campaign(Arena(folder.absolute()), chosen)


def campaign(arena: Arena, cases: list[Case]) -> int:
    """Runs the cases one after the other, and prints the table."""
    began = time.monotonic()
    arena.unbroken()  # also warms up
    table = Table("fault", "what happened", "s", "equal", title=None, box=None, pad_edge=False)
    failures, skipped = [], 0
    for case in cases:
        start = time.monotonic()
        try:
            outcome = case.run(arena)
            left = arena.left_over()
            assert not left, f"left over: {', '.join(left)}"
            row = (outcome.happened, outcome.equal)
        except Skipped as reason:
            skipped += 1
            row = (f"skipped: {reason}", "skipped")
        except Exception as error:
            failures.append((case, traceback.format_exc()))
            row = (f"FAILED: {str(error)[:200]}", "no")
            arena.clear()
        seconds = time.monotonic() - start
        table.add_row(case.what, row[0], f"{seconds:.1f}", row[1])
        print(f"{case.name:18} {seconds:6.1f} s  {row[1]:12}  {row[0]}", file=sys.stderr, flush=True)
    for case, text in failures:
        print(f"\n{case.name}: {case.what}\n{text}", file=sys.stderr)
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False, markup=False)
    console.print(table)
    verdict = f"{len(cases) - len(failures) - skipped} passed, {len(failures)} failed, {skipped} skipped"
    print(f"{verdict} in {time.monotonic() - began:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
