"""SLURM: a script that keeps every word as it is, and runs under a real SLURM of two nodes that equal local ones."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import NoCluster
from cluster import cluster as cluster_of_two

import gptlab
from gptlab import launcher
from gptlab.cli import main
from gptlab.config import ConfigError, TrainConfig
from gptlab.launcher.engines import Slurm, queue
from gptlab.launcher.engines.slurm import seconds
from gptlab.recording import create_run
from gptlab.runs import Run, read_json, write_json

WAIT_S = 300.0
"""A requeued job waits for its turn, and the machine may be busy."""


def small(text: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 16, "global_batch_size": 4, "micro_batch_size": 1,
        "max_iters": 60, "checkpoint_interval": 10, "eval_interval": 30, "eval_iters": 1, "device": "cpu",
        "dtype": "float32", "kernels": "torch", "threads": 1, "data": str(text),
    }  # fmt: skip
    return TrainConfig(**(values | changes))


def losses(run: Run) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in run.metrics() if "loss" in row}


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# What a person reads ------------------------------------------------------------------------------------------------


def test_the_script_keeps_every_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = tmp_path / "py thon"
    stub.write_text('#!/bin/bash\npwd\nprintf "%s\\n" "$@" "$XDG_CACHE_HOME"\n')
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    odd = tmp_path / "a $(touch x) 'b' \"c\" %j"
    odd.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(odd / "cache"))
    monkeypatch.chdir(odd)
    run = create_run(small(Path("x")), "first run", odd, cwd=str(odd))
    Slurm().plan(run)
    done = subprocess.run(["bash", str(run.path / "job.sh")], capture_output=True, text=True, cwd="/")
    folder, *words, cache = done.stdout.splitlines()
    assert (folder, cache, done.stderr) == (str(odd), str(odd / "cache"), "")
    assert words == ["-m", "gptlab.launcher.engines.batch", str(run.path)]
    assert not (odd / "x").exists()


def test_an_array_has_a_run_for_each_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = tmp_path / "python"
    stub.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    paths = [tmp_path / "it's one", tmp_path / "two"]
    text = Slurm().script("x", 2, paths, tmp_path, tmp_path / "x-%a.log", at_once=1)
    assert "#SBATCH --array=0-1%1" in text
    for number, path in enumerate(paths):
        environ = os.environ | {"SLURM_ARRAY_TASK_ID": str(number)}
        done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, env=environ)
        assert done.stdout.splitlines()[-1] == str(path)


def test_the_command_prints_the_script_and_submits_nothing(
    tinytext: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    words = ["--engine", "slurm", "--nodes", "2", "--time", "1-12", "--dry-run", "--data", str(tinytext)]
    assert main(["train", "--name", "first", "--sbatch=--constraint='a b' --qos=long", *words]) == 0
    text = capsys.readouterr().out
    for option in ("--nodes=2", "--time=1-12", '--constraint="a b"', "--qos=long", "--signal=B:USR1@120", "--requeue"):
        assert f"#SBATCH {option}\n" in text
    run = Run.open("first")
    assert text.startswith((run.path / "job.sh").read_text()) and run.state == "planned"
    assert main(["sweep", "--name", "grid", "--n-layer", "1", "2", "--at-once", "2", *words]) == 0
    assert "#SBATCH --array=0-1%2\n" in capsys.readouterr().out and not list(tmp_path.glob("runs/grid*"))
    assert main(["train", "--name", "other", *(word for word in words if word != "--dry-run")]) == 2
    assert "no sbatch on this machine" in capsys.readouterr().err


SBATCH = """#!{python}
import pathlib, sys
print("1234")
if pathlib.Path(sys.argv[0]).with_name("refuses").exists():
    sys.exit("no such partition")
"""
OTHER = """#!/bin/bash
printf "%s\\n" "$(basename "$0") $*" >>"$(dirname "$0")/said"
"""
"""SLURM's commands, as far as they are needed: they note what they are asked."""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with commands that stand for SLURM's: a job is 1234, and waits until it is cancelled."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name in ("sbatch", "scancel", "squeue"):
        text = SBATCH.format(python=sys.executable) if name == "sbatch" else OTHER
        text += '[ -e "$(dirname "$0")/cancelled" ] || echo PENDING\n' * (name == "squeue")
        text += 'touch "$(dirname "$0")/cancelled"\n' * (name == "scancel")
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_a_queued_run_is_listed_is_not_begun_twice_and_leaves_the_queue_when_it_is_stopped(
    tinytext: Path, stand_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = gptlab.launch(small(tinytext), name="far", engine=Slurm())
    run = handle.run
    assert (handle.status, run.is_active, handle.is_over) == ("queued", True, False)
    with pytest.raises(TimeoutError, match="still queued"):
        handle.wait(0.2)
    for engine in (None, Slurm()):
        with pytest.raises(ConfigError, match="waits in SLURM's queue, as job 1234"):
            launcher.resume("far", engine=engine)
    assert main(["runs", "rm", "far"]) == 2 and "stop it first" in capsys.readouterr().err
    assert main(["runs"]) == 0 and "queued" in capsys.readouterr().out
    assert run.why() == ["queued: its job waits for its turn in SLURM's queue, before its first step"]
    assert main(["runs", "stop", "far"]) == 0 and capsys.readouterr().out == "far is stopped\n"
    assert "scancel 1234" in (stand_in / "said").read_text()
    assert handle.wait(WAIT_S)["status"] == "lost"  # no result came of it
    assert run.state == "stopped" and run.why()[0].startswith("stopped: taken from SLURM's queue")
    assert main(["runs", "rm", "far"]) == 0


def test_the_hint_of_a_queued_run_can_be_pasted(tmp_path: Path) -> None:
    run = create_run(small(Path("x")), "far away", tmp_path)
    write_json(run.path / "status.json", {"state": "queued", "job": "7"})
    with pytest.raises(ConfigError, match=r"as job 7: .*`gptlab runs stop 'far away'`"):
        queue.check_not_queued(run)


def test_a_job_that_went_by_itself_leaves_no_run_queued_and_a_refused_one_none_at_all(
    tinytext: Path, stand_in: Path
) -> None:
    handle = gptlab.launch(small(tinytext), name="far", engine=Slurm())
    (stand_in / "cancelled").touch()
    handle.wait(WAIT_S)
    assert handle.status == "stopped" and "SLURM ended its job before it began" in handle.why()[0]
    handle.run.request_stop()
    again = launcher.resume("far", engine=Slurm())
    assert again.status == "queued" and not (handle.run.path / "stop").exists()
    again.wait(WAIT_S)
    (stand_in / "refuses").touch()
    with pytest.raises(ConfigError, match="no such partition"):
        launcher.resume("far", engine=Slurm())
    assert again.status == "stopped"
    with pytest.raises(ConfigError, match="no such partition"):
        gptlab.launch(small(tinytext), name="other", engine=Slurm())
    assert Run.open("other").state == "planned"


def test_runs_that_wait_in_an_array_are_not_submitted_again(tinytext: Path, stand_in: Path, tmp_path: Path) -> None:
    grid = {"n_layer": [1, 2]}
    first = gptlab.sweep(small(tinytext), grid, name="grid", runs_dir=tmp_path / "far", engine=Slurm())
    assert [row["state"] for row in first.rows()] == ["queued"] * 2
    assert [queue.job_of(run) for run in first.runs] == ["1234_0", "1234_1"]
    (stand_in / "refuses").touch()
    again = gptlab.sweep(small(tinytext), grid, name="grid", runs_dir=tmp_path / "far", engine=Slurm())
    assert again.wait(1)
    (stand_in / "cancelled").touch()
    assert first.wait(WAIT_S)
    assert [row["state"] for row in first.rows()] == ["stopped"] * 2


@pytest.mark.parametrize(
    ("text", "value"),
    [("90", 5400), ("1:30", 90), ("2:00:00", 7200), ("1-12", 129_600), ("1-0:30", 88_200), ("0-0:0:5", 5)],
)
def test_times(text: str, value: int) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"time": "2h"}, "time '2h'"), ({"time": "2"}, "margin_s"), ({"nodes": "1:2"}, "fixed number"),
        ({"partition": "a b"}, "partition"), ({"sbatch": "-p x"}, "sbatch '-p'"), ({"sbatch": "'"}, "quotes"),
        ({"memory": "1;ls"}, "memory"), ({"cpus": 0}, "cpus"),
    ],
)  # fmt: skip
def test_mistakes_are_named(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Slurm(**changes)


# A real SLURM -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two nodes on this machine, for as long as these tests run."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(cluster_of_two(tmp_path_factory.mktemp("slurm")))
        except NoCluster as reason:
            pytest.skip(str(reason))
        yield


@pytest.mark.slow
def test_two_nodes_requeued_amid_the_run_and_a_killed_rank_equal_a_local_run(cluster: None, tinytext: Path) -> None:
    config = small(tinytext, max_iters=400, checkpoint_interval=50, nproc=1)
    handle = gptlab.launch(config, name="far", engine=Slurm(nodes="2"))
    run = handle.run
    assert run.state == "queued" or run.attempts()
    until(lambda: len(losses(run)) > 60)
    os.kill((read_json(run.path / "status.json") or {})["pids"][1], 9)  # the nodes are this machine
    until(lambda: len(run.attempts()) == 2 and [row for row in run.metrics() if row["attempt"] == 2])
    error = read_json(run.path / "attempts" / "02" / "error.json")
    job = handle.job  # type: ignore[attr-defined]
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], check=True)  # as SLURM does before the limit
    until(lambda: len(run.attempts()) == 3)
    until(lambda: [row for row in run.metrics() if row["attempt"] == 3])
    result = handle.wait(WAIT_S)
    assert (result["status"], result["step"], error) == ("finished", 400, None), run.log()
    assert read_json(run.path / "attempts" / "03" / "previous-result.json") is not None  # it stopped, with a checkpoint
    stopped = max(row["step"] for row in run.metrics() if row["attempt"] == 2)
    assert f"resumed from step-{stopped:08d}" in run.log()
    assert run.info["world_size"] == 2 and queue.state(job) == "COMPLETED"
    local = launcher.launch(config.replace(nproc=2), name="near")
    assert local.wait(WAIT_S)["status"] == "finished"
    assert losses(run) == losses(local.run)


@pytest.mark.slow
def test_an_error_that_comes_again_ends_the_job(cluster: None, tinytext: Path, tmp_path: Path) -> None:
    text = tmp_path / "gone.txt"
    shutil.copy(tinytext, text)
    handle = gptlab.launch(small(text), name="far", engine=Slurm())
    subprocess.run(["scontrol", "hold", handle.job], check=False)  # type: ignore[attr-defined]
    text.unlink()
    _release(handle)
    result = handle.wait(WAIT_S)
    assert result["status"] == "failed" and "gone.txt" in result["message"]
    assert queue.state(handle.job) == "FAILED"  # type: ignore[attr-defined]


def _release(handle: Any) -> None:
    subprocess.run(["scontrol", "release", handle.job], check=False)


@pytest.mark.slow
def test_a_sweep_is_one_array_and_equals_local_runs(cluster: None, tinytext: Path, tmp_path: Path) -> None:
    base = small(tinytext, max_iters=20)
    grid = {"n_layer": [1, 2, 3], "n_embd": [16, 32]}
    far = gptlab.sweep(base, grid, name="grid", runs_dir=tmp_path / "far", engine=Slurm(), at_once=2)
    assert far.wait(WAIT_S)
    near = gptlab.sweep(base, grid, name="grid", runs_dir=tmp_path / "near")
    assert near.wait(WAIT_S)
    assert [row["state"] for row in far.rows()] == ["finished"] * 6
    assert [losses(run) for run in far.runs] == [losses(run) for run in near.runs]
    columns = ("n_layer", "n_embd", "val_loss", "loss", "step", "state")
    table = [[{name: row[name] for name in columns} for row in found.rows()] for found in (far, near)]
    assert table[0] == table[1] and far.csv_path.is_file()
    again = gptlab.sweep(base, grid, name="grid", runs_dir=tmp_path / "far", engine=Slurm())
    assert again.wait(1) and all(len(run.attempts()) == 1 for run in again.runs)  # nothing was left to do
