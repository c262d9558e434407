"""Holds what the tests ran to its limits: `python tests/covered.py LINES.json`, a report of `coverage json`.

The exit code is 0 only if the whole and each file are above their limit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

WHOLE_PERCENT = 90.0
FILE_PERCENT = 75.0


def main() -> int:
    report = json.loads(Path(sys.argv[1]).read_text())
    files = sorted(
        (file["summary"]["percent_covered"], name, file["missing_lines"]) for name, file in report["files"].items()
    )
    for percent, name, missing in files:
        if percent < WHOLE_PERCENT:
            print(f"{percent:5.1f} %  {name}  never run: {ranges(missing)}")
    whole, (least, name, _) = report["totals"]["percent_covered"], files[0]
    print(f"{whole:.1f} % of the lines of gptlab/, limit {WHOLE_PERCENT:g}")
    print(f"{least:.1f} % in {name}, the least of a file, limit {FILE_PERCENT:g}")
    return 0 if whole >= WHOLE_PERCENT and least >= FILE_PERCENT else 1


def ranges(lines: list[int]) -> str:
    """Lines as a person reads them: 3-5, 9."""
    runs: list[list[int]] = []
    for line in lines:
        if runs and line == runs[-1][-1] + 1:
            runs[-1].append(line)
        else:
            runs.append([line])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


if __name__ == "__main__":
    sys.exit(main())
