"""Where a rank's time goes, who waits for whom, and what the heartbeats say."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from gptlab import pace as pacing
from gptlab.pace import Pace, Pulse


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def step(clock: Clock, paces: list[Pace], seconds: list[float], portions: list[int], transfer: float = 1.0) -> None:
    """One step of several ranks: half of each one's seconds is forward; they leave the closing sum together."""
    begin, longest = clock.now, max(seconds)
    told = []
    for pace, own in zip(paces, seconds, strict=True):
        clock.now = begin
        pace.enter("forward")
        clock.now = begin + own / 2
        pace.enter("backward")
        clock.now = begin + own
        told.append(pace.busy())
        pace.enter("communication")
    clock.now = begin + longest + transfer
    for pace in paces:
        pace.enter("other")
        pace.compare([sum(column) for column in zip(*told, strict=True)], portions)


def begin(clock: Clock, count: int) -> list[Pace]:
    paces = [Pace(rank, count) for rank in range(count)]
    clock.now += 50.0  # starting is no part of a step
    for pace in paces:
        pace.begin(3)
    return paces


def test_waiting_is_told_from_communication(clock: Clock) -> None:
    paces = begin(clock, 2)
    step(clock, paces, [4.0, 7.0], [1, 1])
    assert paces[0].shares() == pytest.approx(
        {"forward": 2 / 8, "backward": 2 / 8, "communication": 1 / 8, "wait": 3 / 8}
    )
    assert paces[1].shares() == pytest.approx(
        {"forward": 3.5 / 8, "backward": 3.5 / 8, "communication": 1 / 8, "wait": 0.0}
    )


def test_a_straggler_is_named_on_every_rank(clock: Clock) -> None:
    paces = begin(clock, 3)
    for _ in range(4):
        step(clock, paces, [2.0, 3.5, 2.1], [1, 1, 1])
    assert [pace.straggler for pace in paces] == [1, 1, 1]


@pytest.mark.parametrize(
    ("seconds", "portions"),
    [
        ([[6.0, 6.0, 4.0]] * 6, [3, 3, 2]),  # more to do
        ([[2.0, 2.0, 2.0]] * 5 + [[20.0, 2.0, 2.0]], [1, 1, 1]),  # a save
        ([[2.0, 2.8, 2.0]] * 6, [1, 1, 1]),  # a little slower
        ([[2.0, 2.0, 0.0]] * 6, [1, 1, 0]),  # nothing to do
        ([[2.0, 9.0, 2.0]] * 3, [1, 1, 1]),  # too early to say
    ],
)
def test_a_rank_that_is_not_slow_is_no_straggler(clock: Clock, seconds: list[list[float]], portions: list[int]) -> None:
    paces = begin(clock, 3)
    for each in seconds:
        step(clock, paces, each, portions)
    assert [pace.straggler for pace in paces] == [None] * 3


def test_a_rank_alone_waits_for_nobody(clock: Clock) -> None:
    (pace,) = begin(clock, 1)
    for _ in range(6):
        step(clock, [pace], [4.0], [2], transfer=0.0)
    assert pace.straggler is None and pace.shares() == pytest.approx(
        {"forward": 0.5, "backward": 0.5, "communication": 0, "wait": 0}
    )


def test_reports_have_patience_with_what_takes_long_at_first() -> None:
    pace = Pace(1, 2)
    pace.begin(10)
    pace.enter("forward")
    assert pace.report()["patience"] and pace.report()["from_step"] == 10
    pace.done(11)
    pace.done(12)
    report = pace.report()
    assert not report["patience"] and (report["phase"], report["step"]) == ("forward", 12)
    with pace.within("saving"):
        assert pace.report()["patience"]
    assert pace.report()["phase"] == "forward" and pace.report()["marks"] > report["marks"]


def test_a_pulse_beats_at_once_at_the_first_step_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "PULSE_S", 600.0)
    pace, file = Pace(1, 2), tmp_path / "rank-1.json"
    pulse = Pulse(pace, tmp_path)

    def until_step(step: int) -> None:
        deadline = time.monotonic() + 30
        while not file.exists() or json.loads(file.read_text())["step"] != step:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    until_step(0)
    pace.done(1)
    until_step(1)
    assert json.loads(file.read_text())["first_step"] is not None
    pace.done(2)
    pulse.close()
    assert json.loads(file.read_text())["step"] == 2 and not pulse._thread.is_alive()


def test_a_pulse_survives_a_folder_that_is_gone(tmp_path: Path) -> None:
    pulse = Pulse(Pace(), tmp_path / "gone")
    time.sleep(0.05)
    assert pulse._thread.is_alive()
    pulse.close()
