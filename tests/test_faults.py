"""The short form of the fault campaign (`make faults` is all of it)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gptlab

CAMPAIGN = Path(__file__).parent / "faults"


def test_the_short_form_of_the_fault_campaign_passes(tmp_path: Path) -> None:
    home = str(Path(gptlab.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), "--quick"], capture_output=True, text=True, timeout=1200, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((home, os.environ.get("PYTHONPATH", "")))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert " 0 failed" in done.stdout and "bit for bit" in done.stdout


def test_a_case_that_fails_fails_the_campaign(tmp_path: Path) -> None:
    code = """
import sys
sys.argv = ["faults", "--only", "exception"]
sys.path.insert(0, {campaign!r})
import hangs, runpy
from verdicts import Case, Outcome
def wrong(arena):
    raise AssertionError("it went wrong")
hangs.CASES = (Case("exception", "a wrong one", wrong),)
runpy.run_path({campaign!r}, run_name="__main__")
"""
    home = str(Path(gptlab.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", code.format(campaign=str(CAMPAIGN))], capture_output=True, text=True, timeout=600,
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": home},
    )  # fmt: skip
    assert done.returncode == 1 and "FAILED: it went wrong" in done.stdout, done.stderr + done.stdout
    assert "0 passed, 1 failed, 0 skipped" in done.stdout
