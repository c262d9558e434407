"""The run directory: names, rows of several attempts, who may write, and what a reader sees."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gptlab.config import ConfigError, TrainConfig
from gptlab.recording import Claim, RunWriter, StaleWriterError, create_run
from gptlab.runs import Run, is_locked, list_runs


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_run(TrainConfig(), "first", tmp_path / "runs")


def test_a_run_is_found_by_name_and_path(run: Run) -> None:
    assert Run.open("first", run.path.parent).path == run.path
    assert Run.open(str(run.path)).config == TrainConfig()
    assert [found.name for found in list_runs(run.path.parent)] == ["first"]
    with pytest.raises(ConfigError, match="did you mean 'first'"):
        Run.open("frist", run.path.parent)


def test_a_folder_that_cannot_be_looked_into_is_not_said_to_be_empty(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "none") == []
    (tmp_path / "file").touch()
    for folder, why in ((tmp_path / "file", "Not a directory"), (tmp_path / ("x" * 300), "File name too long")):
        with pytest.raises(ConfigError, match=f"cannot be looked into \\({why}\\): give another --runs-dir"):
            list_runs(folder)


@pytest.mark.parametrize("name", ["", " ", "a/b", "..", ".hidden", "a\nb", "x" * 101, "a ", "-x", "a\0b"])
def test_names_that_cannot_be_folders_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a folder"):
        create_run(TrainConfig(), name or " ", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_taken_name_is_refused_and_a_made_up_one_is_unique(run: Run) -> None:
    with pytest.raises(ConfigError, match="already"):
        create_run(TrainConfig(), "first", run.path.parent)
    names = {create_run(TrainConfig(), None, run.path.parent).name for _ in range(3)}
    assert len(names) == 3


def test_readers_take_the_newest_attempt_and_ignore_half_a_line(run: Run) -> None:
    for attempt, steps in ((1, (1, 2, 3)), (2, (3, 4))):
        writer = RunWriter(run.path, attempt)
        for step in steps:
            writer.log({"step": step, "loss": attempt * 10 + step})
            writer.log({"step": step, "val_loss": 1.0})
    late = RunWriter(run.path, 1)  # an old attempt that wakes up
    late.log({"step": 3, "loss": -1})
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "lo')
    assert [(row["step"], row["loss"], row["val_loss"]) for row in run.metrics()] == [
        (1, 11, 1.0), (2, 12, 1.0), (3, 23, 1.0), (4, 24, 1.0),
    ]  # fmt: skip
    RunWriter(run.path, 3).log({"step": 5, "loss": 35, "unknown": "kept"})
    assert run.metrics()[-1] == {"step": 5, "loss": 35, "unknown": "kept", "attempt": 3}
    assert len(Run(run.path).metrics()) == 5


def test_one_process_claims_at_a_time(run: Run) -> None:
    with Claim(run.path) as claim:
        assert claim.new_attempt() == 1
        script = (
            "import sys; from pathlib import Path; from gptlab.recording import Claim\n"
            "Claim(Path(sys.argv[1]), wait_s=0)"
        )
        other = subprocess.run([sys.executable, "-c", script, run.path], capture_output=True, text=True)
        assert other.returncode == 1 and "being trained by another process" in other.stderr
    with Claim(run.path) as claim:
        assert claim.new_attempt() == 2


def test_where_files_cannot_be_locked_nobody_trains(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=r"cannot be locked .*: choose another --runs-dir"):
        Claim(run.path)
    assert (run.path / "lock").exists() and not is_locked(run.path)


def test_what_a_later_attempt_adds_to_a_step_does_not_hide_its_loss(run: Run) -> None:
    RunWriter(run.path, 1).log({"step": 1, "loss": 2.0})
    RunWriter(run.path, 2).log({"step": 1, "val_loss": 3.0})  # killed after its last step, resumed for the last look
    assert run.metrics() == [{"step": 1, "loss": 2.0, "val_loss": 3.0, "attempt": 2}]


def test_an_older_attempt_may_not_write(run: Run) -> None:
    with Claim(run.path) as claim:
        old = RunWriter(run.path, claim.new_attempt())
        old.status("running")
        new = RunWriter(run.path, claim.new_attempt())
        with pytest.raises(StaleWriterError, match="attempt 2 has taken over"):
            old.status("running")
        with pytest.raises(StaleWriterError):
            old.result("finished")
        new.result("finished")


def test_a_new_attempt_archives_the_result_and_removes_the_stop(run: Run) -> None:
    with Claim(run.path) as claim:
        RunWriter(run.path, claim.new_attempt()).result("stopped", step=5)
        run.request_stop()
        claim.new_attempt()
    assert run.result() is None and not (run.path / "stop").exists()
    assert json.loads((run.path / "attempts" / "02" / "previous-result.json").read_text())["step"] == 5


def test_an_active_run_without_a_trainer_is_lost(run: Run) -> None:
    with Claim(run.path) as claim:
        RunWriter(run.path, claim.new_attempt()).status("running")
        assert run.state == "running" and run.is_active
    assert run.state == "lost" and not run.is_active


def test_the_first_error_is_kept(run: Run) -> None:
    with Claim(run.path) as claim:
        writer = RunWriter(run.path, claim.new_attempt())
        writer.error(1, 7, ValueError("first"), "...")
        writer.error(0, 7, RuntimeError("echo"), "...")
    error = run.error()
    assert error is not None and (error["rank"], error["message"]) == (1, "first")


def test_a_run_of_newer_layout_with_unknown_settings_says_so(run: Run) -> None:
    info = json.loads((run.path / "run.json").read_text())
    info["config"]["n_hade"] = 3
    (run.path / "run.json").write_text(json.dumps(info))
    with pytest.raises(ConfigError, match="n_head"):
        _ = run.config
