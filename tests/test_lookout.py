"""A rank that no supervisor watches leaves when it hangs, or when the next one is silent, and names who is to blame."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gptlab.config import TrainConfig
from gptlab.jsonfile import read_json, write_json
from gptlab.launcher import ending, lookout
from gptlab.launcher.lookout import Lookout
from gptlab.pace import OVER, Pace, Pulse
from gptlab.recording import Claim, RunWriter, create_run
from gptlab.runs import Run

TIMEOUT_S = 0.4
"""Of these lookouts; heartbeats come twice a second, so who is heard gets more."""


class Rank:
    """Rank 0 of two, some steps into its attempt."""

    def __init__(self, folder: Path) -> None:
        self.run = create_run(TrainConfig(), "run", folder)
        with Claim(self.run.path) as claim:
            self.writer = RunWriter(self.run.path, claim.new_attempt())
        self.pace = Pace(0, 2)
        self.pace.begin(5)
        self.pace.done(7)
        self.left: list[int] = []
        self.lookout: Lookout | None = None
        self.pulse: Pulse | None = None

    def look_out(self, timeout_s: float = TIMEOUT_S, *, heard: bool = True) -> None:
        if heard:
            self.pulse = Pulse(self.pace, self.writer.folder)
        self.lookout = Lookout(self.pace, self.writer, timeout_s, patient=False, leave=self.left.append)

    def next_says(self, phase: str, **further: object) -> None:
        said = {"rank": 1, "time": time.time(), "phase": phase, "patience": False, **further}
        write_json(self.writer.folder / "rank-1.json", said)

    def error(self) -> dict[str, object]:
        return read_json(self.writer.folder / "error.json") or {}


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    yield rank
    if rank.lookout is not None:
        rank.lookout.close()
    if rank.pulse is not None:
        rank.pulse.close()


def keep_talking(rank: Rank, over: threading.Event) -> None:
    while not over.wait(0.05):
        rank.next_says("communication")


def until_it_left(rank: Rank) -> None:
    end = time.monotonic() + 60
    while not rank.left:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_rank_that_hangs_names_itself_and_keeps_its_stack(rank: Rank) -> None:
    rank.pace.enter("forward")
    rank.look_out()
    until_it_left(rank)
    error = rank.error()
    assert rank.left == [1] and (error["type"], error["rank"], error["step"]) == ("WorkerHung", 0, 7)
    assert "rank 0 made no progress for" in str(error["message"]) and "after step 7" in str(error["message"])
    stack = (rank.writer.folder / "rank-0.stack").read_text()
    assert "until_it_left" in stack and error["traceback"] == stack
    failure = ending.failure_of(Run(rank.run.path), rank.writer.folder)
    assert failure.type == "WorkerHung" and failure.repeats(failure)  # at the same step again: no more of it


def test_a_rank_whose_next_one_is_silent_leaves_in_its_place(rank: Rank) -> None:
    rank.next_says("backward")
    rank.pace.enter("communication")
    rank.look_out(timeout_s=2.0)  # more than lies between two heartbeats of its own
    until_it_left(rank)
    error = rank.error()
    assert (error["type"], error["rank"], error["step"]) == ("WorkerStopped", 1, 7)
    assert "rank 1 gave no sign of life for 2" in str(error["message"])
    assert "could not be asked" in (rank.writer.folder / "rank-1.stack").read_text()
    assert ending.failure_of(Run(rank.run.path), rank.writer.folder).by_signal  # it may pass


@pytest.mark.parametrize("stopped", [True, False])
def test_one_that_may_take_long_may_not_lie_stopped(rank: Rank, stopped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookout, "_lies_stopped", lambda pid: stopped and pid == 1234567)
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    rank.next_says("saving", patience=True, pid=1234567)
    rank.pace.enter("communication")
    rank.look_out(timeout_s=1.0)
    time.sleep(2.5)
    assert rank.left == ([1] if stopped else [])


def test_who_waits_for_one_that_lives_stays(rank: Rank) -> None:
    over = threading.Event()
    talker = threading.Thread(target=keep_talking, args=(rank, over))
    rank.next_says("communication")
    talker.start()
    rank.pace.enter("communication")
    rank.look_out()
    time.sleep(4 * TIMEOUT_S)
    over.set()
    talker.join()
    assert rank.left == []


@pytest.mark.parametrize(("phase", "heard"), [(OVER, True), ("backward", False)])
def test_nobody_is_blamed_who_is_done_or_while_no_heartbeat_can_be_written(rank: Rank, phase: str, heard: bool) -> None:
    rank.next_says(phase)
    rank.pace.enter("communication")
    rank.look_out(heard=heard)
    time.sleep(4 * TIMEOUT_S)
    assert rank.left == []


def test_a_timeout_of_0_watches_nobody(rank: Rank) -> None:
    rank.pace.enter("forward")
    rank.look_out(timeout_s=0.0)
    time.sleep(0.3)
    assert rank.left == [] and not any(thread.name == "lookout" for thread in threading.enumerate())
