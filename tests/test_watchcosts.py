"""The measures of what watching costs: that their arithmetic is right, and that each still runs."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "watchcosts"))
sys.path.insert(0, str(Path(__file__).parent / "browser"))
import costs
import jupyter
import measure
from live import Live

import gptlab
from gptlab.runs import list_runs


class Screen:
    """What a page says it has shown."""

    def __init__(self, **seen: list[list[float]]) -> None:
        self._seen = {name.replace("_", "-"): pictures for name, pictures in seen.items()}

    def seen(self) -> dict[str, list[list[float]]]:
        return self._seen


def test_live_runs_seem_to_train_and_remember_when(tmp_path: Path) -> None:
    with Live(tmp_path, runs=2, points=30, every_s=0.05) as live:
        time.sleep(0.3)
        runs = list_runs(tmp_path)
        assert [run.state for run in runs] == ["running", "running"]
        at = live.written["live-1", 32]
        assert runs[0].step() >= 32 and time.time() - 5 < at < time.time()
    assert [run.state for run in list_runs(tmp_path)] == ["stopped", "stopped"]


def test_a_row_is_on_the_screen_with_the_first_picture_that_has_come_so_far(tmp_path: Path) -> None:
    live = Live(tmp_path, runs=1, points=0)
    live.written = {("live-1", 1): 10.0, ("live-1", 2): 10.5, ("live-1", 3): 11.0, ("live-1", 9): 99.0}
    screen: Any = Screen(live_1=[[2, 10.8], [3, 11.6]])
    assert costs.delays(live, screen, 10.0, 12.0) == pytest.approx([0.8, 0.3, 0.6])
    assert costs.delays(live, screen, 90.0, 100.0) == [math.inf], "what was never shown is over every limit"


def test_growth_is_a_slope_that_one_high_reading_does_not_make() -> None:
    flat: list[tuple[float, ...]] = [(float(shown), 100.0) for shown in range(20)]
    assert costs.slope(flat, 1) == pytest.approx(0)
    assert costs.slope([(shown, value + 0.5 * shown) for shown, value in flat], 1) == pytest.approx(0.5)


@pytest.mark.parametrize(("value", "code"), [(1.4, 0), (1.6, 1), (math.nan, 1)])
def test_a_limit_that_is_broken_fails_the_command(
    value: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [costs.Cost("delay", value, "s", 1.5), costs.Cost("told", 9.0, "s", None)]
    monkeypatch.setattr(measure, "MEASURES", {"one": ("a delay", lambda _: found, lambda _: [])})
    monkeypatch.setattr(sys, "argv", ["measure.py"])
    assert measure.main() == code
    assert ("OVER" in capsys.readouterr().out) == bool(code)


@pytest.mark.slow
@pytest.mark.skipif(jupyter.chromium() is None, reason="no chromium on the PATH (apt-get install chromium)")
def test_every_measure_runs(tmp_path: Path) -> None:
    home = str(Path(gptlab.__file__).parent.parent)
    script = Path(__file__).parent / "watchcosts" / "measure.py"
    done = subprocess.run(
        [sys.executable, str(script), "--quick"], capture_output=True, text=True, timeout=1800, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((home, os.environ.get("PYTHONPATH", "")))},
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr  # a busy machine may break a limit
    for what in (
        "row on the screen",
        "kernel, 4 live",
        "drawing process",
        "grows",
        "watched",
        "sweep",
        "first point",
        "MB",
    ):
        assert what in done.stdout, done.stdout
