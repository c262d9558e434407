"""Which worker is to blame when an attempt makes no progress."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gptlab.jsonfile import write_json
from gptlab.launcher import watch as watching
from gptlab.launcher.watch import Stuck, Watch


class Ranks:
    """Workers that say what a test has them say, and a clock that it moves."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.now, self.stopped = folder, 0.0, set[int]()
        self.said: dict[int, dict[str, Any]] = {}
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(watching, "is_stopped", lambda pid: pid in self.stopped)

    def says(self, rank: int, phase: str, *, patience: bool = False) -> None:
        marks = self.said.get(rank, {"marks": 0})["marks"] + 1
        self.said[rank] = {"rank": rank, "phase": phase, "marks": marks, "patience": patience}
        write_json(self.folder / f"rank-{rank}.json", self.said[rank])

    def look(self, watch: Watch, seconds: float, *, gap: float = 0.5) -> Stuck | None:
        """Looks every half a second, until someone is to blame or so many seconds are over."""
        for _ in range(int(seconds / gap)):
            self.now += gap
            if (stuck := watch.look(set(watch.pids))) is not None:
                return stuck
        return None


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(tmp_path, monkeypatch)


def over(ranks: Ranks, *, patient: bool = False, timeout_s: float = 10.0) -> Watch:
    return Watch(ranks.folder, {0: 0, 1: 1}, timeout_s, patient=patient)


def test_the_one_that_others_wait_for_is_to_blame(ranks: Ranks) -> None:
    watch = over(ranks)
    ranks.says(0, "communication")
    ranks.says(1, "forward")
    assert ranks.look(watch, 9.0) is None
    stuck = ranks.look(watch, 2.0)
    assert stuck is not None and (stuck.rank, stuck.phase, stuck.stopped) == (1, "forward", False)
    assert 10.0 <= stuck.seconds <= 11.0 and "made no progress" in stuck.what


def test_who_goes_on_is_left_alone(ranks: Ranks) -> None:
    watch = over(ranks)
    for _ in range(10):
        ranks.says(0, "forward")
        ranks.says(1, "backward")
        assert ranks.look(watch, 8.0) is None


def test_starting_saving_and_compiling_may_take_ten_times_as_long(ranks: Ranks) -> None:
    for watch, patience in ((over(ranks), True), (over(ranks, patient=True), False)):
        ranks.says(0, "saving", patience=patience)
        ranks.says(1, "communication")
        assert ranks.look(watch, 95.0) is None
        stuck = ranks.look(watch, 10.0)
        assert stuck is not None and stuck.rank == 0


def test_who_said_nothing_yet_is_starting(ranks: Ranks) -> None:
    watch = over(ranks)
    assert ranks.look(watch, 95.0) is None
    stuck = ranks.look(watch, 10.0)
    assert stuck is not None and stuck.phase == "starting"


def test_when_all_wait_for_each_other_none_goes_on(ranks: Ranks) -> None:
    watch = over(ranks)
    ranks.says(0, "communication")
    ranks.says(1, "communication")
    assert ranks.look(watch, 9.0) is None
    assert ranks.look(watch, 2.0) is not None


def test_a_stopped_process_is_known_as_such_whatever_it_does(ranks: Ranks) -> None:
    watch = over(ranks)
    ranks.says(0, "saving", patience=True)
    ranks.says(1, "communication")
    ranks.stopped = {1}
    stuck = ranks.look(watch, 11.0)
    assert stuck is not None and stuck.stopped and stuck.rank == 1 and "SIGSTOP" in stuck.what
    watch = over(ranks)
    assert ranks.look(watch, 5.0) is None
    ranks.stopped = set()  # it goes on
    ranks.says(1, "communication")
    assert ranks.look(watch, 9.0) is None


def test_a_machine_that_slept_condemns_nobody(ranks: Ranks) -> None:
    watch = over(ranks)
    ranks.says(0, "forward")
    ranks.says(1, "forward")
    assert ranks.look(watch, 7200.0, gap=3600.0) is None


def test_slow_steps_stretch_the_limit(ranks: Ranks) -> None:
    watch = over(ranks)
    for _ in range(3):
        ranks.says(0, "communication")
        ranks.says(1, "forward")
        assert ranks.look(watch, 8.0) is None
    assert ranks.look(watch, 25.0) is None  # five times 7.5 s are not over, with the 8 s before
    assert ranks.look(watch, 10.0) is not None


def test_the_first_steps_tell_how_slow_the_others_may_be(ranks: Ranks) -> None:
    watch = over(ranks)
    ranks.says(1, "starting", patience=True)
    assert ranks.look(watch, 60.0) is None
    for patience in (True, False):
        ranks.says(0, "communication")
        ranks.says(1, "forward", patience=patience)
        assert ranks.look(watch, 40.0) is None  # four times the limit, as the step before, whose patience it had
    ranks.says(1, "communication")
    ranks.says(0, "backward")
    assert ranks.look(watch, 11.0) is not None  # what starting took is no measure


def test_zero_waits_for_ever(ranks: Ranks) -> None:
    watch = over(ranks, timeout_s=0.0)
    assert watch.every_s is None and ranks.look(watch, 1e4) is None


def test_stacks_are_kept_and_a_stopped_process_has_none(tmp_path: Path) -> None:
    code = """
import faulthandler, signal, time
faulthandler.register(signal.SIGUSR2, file=2)
def dozes(): time.sleep(600)
print("ready", flush=True)
dozes()
"""
    family = []
    for rank in (0, 1):
        with open(tmp_path / f"rank-{rank}.err", "wb") as err:
            err.write(b"earlier words\n")
            process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=err)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        family.append(process)
    try:
        os.kill(family[1].pid, signal.SIGSTOP)
        while not watching.is_stopped(family[1].pid):
            time.sleep(0.01)
        watch = Watch(tmp_path, {rank: process.pid for rank, process in enumerate(family)}, 1.0, patient=False)
        watch.keep_stacks({0, 1})
    finally:
        for process in family:
            process.kill()
            process.wait()
    assert "in dozes" in (tmp_path / "rank-0.stack").read_text()
    assert "earlier" not in (tmp_path / "rank-0.stack").read_text()
    assert "stopped by a signal" in (tmp_path / "rank-1.stack").read_text()
