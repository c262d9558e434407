"""What a run says of its attempts, and of why it is where it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptlab.config import TrainConfig
from gptlab.jsonfile import read_json, write_json
from gptlab.lab import tiles
from gptlab.pace import Pace
from gptlab.recording import Claim, RunWriter, create_run
from gptlab.runs import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_run(TrainConfig(), "told", tmp_path / "runs")


def an_attempt(run: Run, claim: Claim, steps: range, *, world_size: int) -> RunWriter:
    """One that does these steps, as its trainer would."""
    writer = RunWriter(run.path, claim.new_attempt())
    writer.status("running", pids=[1] * world_size, world_size=world_size, straggler=None)
    for step in steps:
        writer.log({"step": step, "loss": 1.0})
    for rank in range(world_size):
        pace = Pace(rank, world_size)
        pace.begin(steps.start - 1)
        pace.done(steps[-1])
        write_json(writer.folder / f"rank-{rank}.json", pace.report())
    return writer


def fail(writer: RunWriter, rank: int, step: int) -> None:
    try:
        raise ValueError("bad luck")
    except ValueError as error:
        writer.error(rank, step, error, "Traceback\n  in the_culprit\nValueError: bad luck\n")


def test_attempts_tell_who_failed_where_and_how_long_the_next_took(run: Run) -> None:
    with Claim(run.path) as claim:
        fail(an_attempt(run, claim, range(1, 8), world_size=2), rank=1, step=7)
        first = claim.path / "attempts" / "01" / "error.json"
        error = read_json(first) or {}
        write_json(first, error | {"time": error["time"] - 0.25})
        writer = an_attempt(run, claim, range(6, 10), world_size=2)
        writer.paused(9)
        an_attempt(run, claim, range(10, 11), world_size=3)
        one, two, three = run.attempts_table()
    assert (one["rank"], one["error"], one["from_step"], one["to_step"]) == (1, "ValueError on rank 1: bad luck", 0, 7)
    assert (two["rank"], two["error"], two["from_step"], two["to_step"]) == (None, None, 5, 9)
    assert [row["world_size"] for row in (one, two, three)] == [2, 2, 3]
    assert one["recovery_s"] is None and two["recovery_s"] == pytest.approx(0.25, abs=0.2)
    assert one["began"] <= two["began"] <= three["began"] and one["ended"] <= two["ended"] and three["ended"] is None
    assert run.attempts_table()[-1]["ended"] is not None  # nobody holds the run any more
    assert [row["step"] for row in run.metrics()] == list(range(1, 11))


def test_an_attempt_that_ended_before_its_first_step_began_nowhere(run: Run) -> None:
    with Claim(run.path) as claim:
        an_attempt(run, claim, range(1, 8), world_size=1)
        writer = RunWriter(run.path, claim.new_attempt())
        writer.status("running", pids=[1], world_size=1)
        write_json(writer.folder / "rank-0.json", Pace(0, 1).report())  # the checkpoint was not read yet
        fail(writer, rank=0, step=0)
        an_attempt(run, claim, range(8, 9), world_size=1)
        rows = run.attempts_table()
    assert [row["from_step"] for row in rows] == [0, None, 7]
    assert "0 on" not in tiles.attempts(rows)


def test_a_status_has_what_each_rank_says_of_itself(run: Run) -> None:
    with Claim(run.path) as claim:
        writer = an_attempt(run, claim, range(1, 4), world_size=2)
        (writer.folder / "rank-1.json").unlink()
        status = run.status()
        assert status["rank_steps"] == [3, None] and status["phases"] == ["other", None]
        assert status["heartbeats"][0] > 0 and set(status["shares"][0]) == {
            "forward",
            "backward",
            "communication",
            "wait",
        }
        writer.status("finished", pids=[], world_size=2)
        assert "phases" not in run.status()


def test_a_failed_run_says_why_on_which_rank_after_which_step_and_how_to_go_on(run: Run) -> None:
    with Claim(run.path) as claim:
        for _ in range(2):
            writer = an_attempt(run, claim, range(1, 8), world_size=2)
            fail(writer, rank=1, step=7)
            (writer.folder / "rank-0.out").write_text("checkpoint step-00000005 is passed over: no checksum\niter 1\n")
        message = "ValueError on rank 1: bad luck (the same error came twice at the same step)"
        writer.result("failed", step=7, message=message)
        writer.status("failed", pids=[], step=7)
    lines = run.why()
    assert lines[0] == f"failed: {message}"
    assert "    in the_culprit" in lines
    assert any("attempt 2: 2 workers, steps 1 to 7" in line and "ValueError on rank 1" in line for line in lines)
    assert any(line.startswith(f"output of its ranks in {writer.folder}: rank-0.out") for line in lines)
    assert "checkpoint step-00000005 is passed over: no checksum" in lines
    assert lines[-1] == "to go on from its newest good checkpoint: gptlab train --resume told"


def test_a_lost_run_says_when_it_was_last_heard_of(run: Run) -> None:
    with Claim(run.path) as claim:
        writer = an_attempt(run, claim, range(1, 4), world_size=1)
        writer.status("running", step=3, pids=[1], world_size=1)
    assert run.why()[0].startswith("lost: its supervisor ended without a word at step 3, last heard of at 20")
    assert "gptlab train --resume told" in run.why()[-1]


def test_a_run_that_goes_well_says_little(run: Run) -> None:
    with Claim(run.path) as claim:
        writer = an_attempt(run, claim, range(1, 4), world_size=2)
        writer.status("running", step=3, pids=[1, 1], world_size=2, straggler=1)
        assert run.why() == ["running: at step 3, the others wait for rank 1"]
        writer.result("finished", step=3)
        writer.status("finished", step=3, pids=[])
    assert run.why() == ["finished: at step 3"]
