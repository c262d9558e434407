"""torchrun: ranks that meet anew after each loss or gain, under our own command, a plain one, and DLRover's agent."""

from __future__ import annotations

import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

import gptlab
from gptlab import joining, launcher, worker
from gptlab.assembly import Setting
from gptlab.cli import main
from gptlab.config import ConfigError, TrainConfig
from gptlab.joining import Spot, find_spot
from gptlab.launcher import ending
from gptlab.launcher.engines import Dlrover, Torchrun, agent, dlrover, starting
from gptlab.launcher.handle import Handle
from gptlab.launcher.verdict import FRUITLESS
from gptlab.recording import Claim, RunWriter, create_run
from gptlab.runs import Run, read_json

WAIT_S = 300.0
"""Far beyond what it takes; the machine may be busy."""


def small(text: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 16, "global_batch_size": 4, "micro_batch_size": 1,
        "max_iters": 300, "checkpoint_interval": 20, "eval_interval": 300, "eval_iters": 1, "device": "cpu",
        "dtype": "float32", "kernels": "torch", "threads": 1, "data": str(text), "nproc": 2,
    }  # fmt: skip
    return TrainConfig(**(values | changes))


def losses(run: Run) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in run.metrics() if "loss" in row}


def steps_of(run: Run, attempt: int) -> list[int]:
    return [row["step"] for row in run.metrics() if row["attempt"] == attempt]


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def workers(run: Run) -> list[psutil.Process]:
    """The ranks' processes, wherever they are: a namespace of their own gives them other numbers."""
    found = []
    for process in psutil.process_iter(["cmdline", "ppid"]):
        words = process.info["cmdline"] or []
        if words[1:4] in (["-u", "-m", "gptlab.worker"], ["-m", "gptlab.worker"]) and str(run.path) in words:
            found.append(process)
    return sorted(found, key=lambda process: process.pid)


@pytest.fixture
def tidy() -> Iterator[list[Handle]]:
    """Handles of which nothing is left after the test."""
    handles: list[Handle] = []
    yield handles
    for handle in handles:
        if not handle.is_over:
            handle.kill()


@functools.cache
def _unbroken(text: Path, folder: Path) -> dict[int, float]:
    handle = launcher.launch(small(text), name="unbroken", runs_dir=folder)
    assert handle.wait(WAIT_S)["status"] == "finished", handle.log()
    return losses(handle.run)


@pytest.fixture
def unbroken(tinytext: Path) -> dict[int, float]:
    """Losses of a run of two processes that nothing happened to."""
    return _unbroken(tinytext, tinytext.parent)


# Meeting ------------------------------------------------------------------------------------------------------------


def test_the_living_meet_in_a_store_that_is_full_of_the_dead() -> None:
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    store = HashStore()
    for rank in (1, 2):  # of a generation before: greetings, an answer, and a rank that had come
        store.set(f"gptlab/hello-{rank}", "dead")
        store.set(f"gptlab/welcome-{rank}", "dead 7-dead")
        store.set(f"gptlab/7-dead/here-{rank}", "yes")
    found: dict[int, tuple[Any, int]] = {}

    def come(rank: int, wait_s: float) -> None:
        time.sleep(wait_s)
        found[rank] = joining.meet(store, Spot(rank, 3, rank, 3), 8 if rank == 0 else 0)
        found[rank][0].set(f"key-{rank}", str(rank))

    threads = [threading.Thread(target=come, args=(rank, wait)) for rank, wait in ((0, 0.0), (1, 0.1), (2, 0.2))]
    for thread in threads:
        thread.start()
    time.sleep(0.15)
    store.set("gptlab/hello-1", "dying")  # a rank of before that speaks over the living one
    for thread in threads:
        thread.join(30)
    assert [found[rank][1] for rank in range(3)] == [8, 8, 8]
    for part, _ in found.values():
        part.set_timeout(timedelta(seconds=10))
        assert [part.get(f"key-{rank}") for rank in range(3)] == [b"0", b"1", b"2"]


def test_a_rank_that_does_not_come_is_named() -> None:
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] of 3"):
        joining.meet(HashStore(), Spot(0, 3, 0, 3), 1, patience_s=0.05)
    with pytest.raises(TimeoutError, match="rank 0 has not answered rank 2"):
        joining.meet(HashStore(), Spot(2, 3, 2, 3), 1, patience_s=0.05)


def test_spots() -> None:
    ours = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    theirs = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "1"}
    assert find_spot(ours | theirs | {"TORCHELASTIC_RESTART_COUNT": "2"}) == Spot(3, 4, 1, 2, restarts=2)
    assert find_spot(theirs) == Spot(5, 8, 1, 4)
    with pytest.raises(ConfigError, match="RANK is not set: start this with torchrun or srun"):
        find_spot({})


def test_the_peak_of_several_nodes_is_that_of_all_their_devices() -> None:
    setting = Setting("cpu", "float32", "sdpa", micro_batch_size=1, threads=1)
    one = worker._peak({}, setting, Spot(0, 2, 0, 2))
    two = worker._peak({}, setting, Spot(0, 4, 0, 2))
    assert one is not None and two is not None
    assert two.flops == 2 * one.flops and two.source == f"2 nodes x {one.source}"


def test_a_leash_ends_an_orphan() -> None:
    code = "from gptlab import joining; import time; joining.keep_leash(); print('up', flush=True); time.sleep(60)"
    parent = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])", code],
        stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
    (child,) = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    psutil.wait_procs([child], timeout=WAIT_S)
    assert not child.is_running()


# Verdicts -----------------------------------------------------------------------------------------------------------


def attempt_with(run: Run, claim: Claim, step: int | None, message: str) -> None:
    RunWriter(run.path, claim.new_attempt()).error(1, step, RuntimeError(message), "")


def test_restarts_that_repeat_an_error_are_hopeless_and_the_echoes_of_a_loss_are_not(tmp_path: Path) -> None:
    run = create_run(TrainConfig(), "run", tmp_path)
    with Claim(run.path) as claim:
        attempt_with(run, claim, 3, "no such thing 0x12")  # of an earlier start
        for step in (7, 7):
            attempt_with(run, claim, step, "Connection closed by peer [127.0.0.1]:1234")
        attempt_with(run, claim, 3, "no such thing 0x34")
    assert ending.hopeless(run, 3) is None
    found = ending.hopeless(run, 4)
    assert found is not None and "twice" in found[1]
    ending.fail(run, 4, *found)
    result = run.result() or {}
    assert result["status"] == "failed" and "RuntimeError on rank 1: no such thing" in result["message"]
    assert run.state == "failed"


def test_a_failure_before_the_newest_checkpoint_was_written_was_not_fruitless(tmp_path: Path) -> None:
    run = create_run(TrainConfig(), "run", tmp_path)
    with Claim(run.path) as claim:
        for number in range(1, FRUITLESS + 1):
            attempt_with(run, claim, number, "Connection closed by peer")
            if number == 2:  # it wrote the one checkpoint; those after it died before they had even read that
                RunWriter(run.path, number).log({"step": 20, "loss": 1.0})
                (run.path / "checkpoints" / "step-00000020").mkdir(parents=True)
        assert ending.hopeless(run, 99) is None
        attempt_with(run, claim, None, "Connection closed by peer")
    found = ending.hopeless(run, 99)
    assert found is not None and found[1] == f"{FRUITLESS} attempts in a row failed without a new checkpoint"


@pytest.mark.parametrize("killed", [True, False])
def test_what_ends_before_its_first_attempt_has_a_result_of_its_own(tmp_path: Path, killed: bool) -> None:
    run = create_run(TrainConfig(), "run", tmp_path)
    with Claim(run.path) as claim:
        RunWriter(run.path, claim.new_attempt()).result("stopped", step=3, message="of an earlier start")
    agent.close(run, 1, "the agent gave up", killed=killed)
    result = run.result() or {}
    assert (result["attempt"], result["status"]) == (2, "stopped" if killed else "failed")
    assert result["message"] == ("killed on request" if killed else "the agent gave up, before its first attempt")


def test_an_agent_that_cannot_be_started_is_a_sentence(tmp_path: Path) -> None:
    run = create_run(TrainConfig(), "run", tmp_path)
    assert agent.main([str(run.path), agent.ALONE, "--", "/nowhere/agent"]) == 1
    message = "/nowhere/agent cannot be started (No such file or directory), before its first attempt"
    assert (run.result() or {})["message"] == message and run.state == "failed"


# The command --------------------------------------------------------------------------------------------------------


def test_the_command_is_shown_and_runs_as_it_stands(tinytext: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--nodes", "1:4", "--rdzv-endpoint", "127.0.0.1:29511", "--dry-run", "--name", "a run"]
    assert main([*words, "--data", str(tinytext), "--nproc", "2", "--max-iters", "2"]) == 0
    line = capsys.readouterr().out
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 " in line and "--rdzv-endpoint=127.0.0.1:29511" in line
    assert shlex.split(line)[-1] == str(Run.open("a run").path.absolute()) and "--nnodes=1:4" in line
    assert Run.open("a run").state == "planned"
    assert main(["train", "--dry-run", "--max-iters", "2"]) == 2
    assert main(["train", "--nodes", "2"]) == 2 and "rdzv_endpoint" in capsys.readouterr().err
    assert main(["train", "--image", "x"]) == 2 and "says nothing to the engine local" in capsys.readouterr().err
    assert main(["train", "--engine", "slrum"]) == 2 and "did you mean 'slurm'" in capsys.readouterr().err


def test_a_run_is_joined_under_its_own_settings_alone(tinytext: Path) -> None:
    engine = Torchrun(nodes="1:2", rdzv_endpoint="127.0.0.1:29512")
    first = starting.prepare(small(tinytext), "run", None, engine)
    assert starting.prepare(small(tinytext), "run", None, engine).path == first.path
    with pytest.raises(ConfigError, match="made with n_embd 32, and this is 64"):
        starting.prepare(small(tinytext, n_embd=64), "run", None, engine)
    with pytest.raises(ConfigError, match="already"):
        starting.prepare(small(tinytext), "run", None, Torchrun())
    with pytest.raises(ConfigError, match="nodes 3 with nproc 2 each are 6 processes"):
        starting.prepare(small(tinytext), "other", None, Torchrun(nodes="3", rdzv_endpoint="a:1"))


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"nodes": "0"}, "nodes"), ({"rdzv_endpoint": "node1"}, "HOST:PORT"), ({"restarts": -1}, "-1")],
)
def test_mistakes_are_named(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Torchrun(**changes)


# Real agents --------------------------------------------------------------------------------------------------------


def test_a_killed_rank_is_replaced_and_the_losses_are_equal(
    tinytext: Path, unbroken: dict[int, float], tidy: list[Handle]
) -> None:
    handle = gptlab.launch(small(tinytext), name="run", engine=Torchrun())
    tidy.append(handle)
    until(lambda: len(losses(handle.run)) > 30)
    workers(handle.run)[1].kill()
    result = handle.wait(WAIT_S)
    assert result["status"] == "finished", (result, handle.log())
    assert len(handle.run.attempts()) == 2 and losses(handle.run) == unbroken
    for rank in (0, 1):
        assert "iter 300: loss" in handle.log(rank)
    assert not workers(handle.run)


def test_a_stop_before_the_first_attempt_is_kept_and_the_next_start_forgets_it(
    tinytext: Path, tidy: list[Handle]
) -> None:
    handle = gptlab.launch(small(tinytext, nproc=1), name="run", engine=Torchrun())
    tidy.append(handle)
    handle.stop()
    result = handle.wait(WAIT_S)
    assert result["status"] == "stopped" and result["step"] < 300, (result, handle.log())
    again = launcher.resume("run", engine=Torchrun())
    tidy.append(again)
    assert again.wait(WAIT_S)["status"] == "finished", again.log()


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_replaced(tinytext: Path, unbroken: dict[int, float], tidy: list[Handle]) -> None:
    """One that sleeps is a case of the fault campaign, and both are of test_lookout.py."""
    handle = gptlab.launch(small(tinytext, hang_timeout_s=2.0), name="run", engine=Torchrun())
    tidy.append(handle)
    until(lambda: len(losses(handle.run)) > 30)
    workers(handle.run)[1].suspend()
    result = handle.wait(WAIT_S)
    assert result["status"] == "finished", (result, handle.log())
    error = read_json(handle.run.attempts()[0] / "error.json") or {}
    assert (error["type"], error["rank"]) == ("WorkerStopped", 1) and "gave no sign of life" in error["message"]
    assert losses(handle.run) == unbroken and not workers(handle.run)


@pytest.mark.slow
def test_an_error_that_repeats_ends_the_run_before_the_restarts_do(tinytext: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(tinytext.read_text())
    run = starting.prepare(small(text, nproc=1), "run", None, Torchrun(restarts=9))
    text.unlink()
    result = Torchrun(restarts=9).start(run).wait(WAIT_S)
    assert result["status"] == "failed" and "text.txt" in result["message"] and "again" not in run.log()
    assert len(run.attempts()) <= 2


@pytest.mark.slow
def test_the_caller_s_death_ends_agent_and_ranks_and_the_run_resumes(
    tinytext: Path, unbroken: dict[int, float]
) -> None:
    code = (
        "import json, sys, gptlab; from gptlab.launcher.engines import Torchrun\n"
        "gptlab.launch(gptlab.TrainConfig(**json.loads(sys.argv[1])), name='run', engine=Torchrun()).wait()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(small(tinytext).to_dict())],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    until(lambda: (Path(os.environ["GPTLAB_RUNS"]) / "run" / "run.json").is_file())
    run = Run.open("run")
    until(lambda: len(losses(run)) > 30)
    family = psutil.Process(parent.pid).children(recursive=True)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    psutil.wait_procs(family, timeout=WAIT_S)
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)
    assert run.state == "lost"
    assert launcher.resume("run").wait(WAIT_S)["status"] == "finished"  # the warm supervisor goes on with it
    assert losses(run) == unbroken


@pytest.mark.slow
def test_a_second_node_joins_and_leaves_while_it_trains(tinytext: Path, tidy: list[Handle]) -> None:
    """One worker, then two, then one, of plain agents with a shared store: the same batch, and losses within 1e-4."""
    config = small(tinytext, nproc=1, max_iters=2000, checkpoint_interval=25, eval_interval=2000)
    engine = Torchrun(nodes="1:2", rdzv_endpoint=f"127.0.0.1:{_free_port()}", local_addr="127.0.0.1")
    first = gptlab.launch(config, name="run", engine=engine)
    tidy.append(first)
    run = first.run
    until(lambda: len(losses(run)) > 30)
    second = gptlab.launch(config, name="run", engine=engine)
    tidy.append(second)
    # Two checkpoints later: what came after the newest one is trained again when the second node leaves.
    until(lambda: sum(row.get("world_size") == 2 for row in run.metrics()) > 2 * config.checkpoint_interval)
    second.kill()
    grown = max(row["step"] for row in run.metrics() if row.get("world_size") == 2)
    until(lambda: losses(run) and run.metrics()[-1]["step"] > grown + 5 and run.metrics()[-1].get("world_size") == 1)
    run.request_stop()
    assert first.wait(WAIT_S)["status"] == "stopped", run.log()
    sizes = [row["world_size"] for row in run.metrics() if "loss" in row]
    assert sizes[0] == 1 and 2 in sizes and sizes[-1] == 1
    whole = gptlab.launch(config.replace(max_iters=max(losses(run)), lr_decay_iters=2000), name="whole")
    assert whole.wait(WAIT_S)["status"] == "finished"
    expected = losses(whole.run)
    assert losses(run).keys() == expected.keys()
    assert max(abs(loss - expected[step]) for step, loss in losses(run).items()) < 1e-4


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# DLRover ------------------------------------------------------------------------------------------------------------


def test_dlrover_where_it_is_not_is_refused(tinytext: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be started"):
        gptlab.launch(small(tinytext), engine=Dlrover(dlrover_python="/nowhere/python"))


def test_under_dlrover_a_killed_rank_is_replaced_and_the_losses_are_equal(
    tinytext: Path, unbroken: dict[int, float], tidy: list[Handle]
) -> None:
    python = os.environ.get("GPTLAB_DLROVER", sys.executable)
    if reason := dlrover.missing(python):
        pytest.skip(f"{reason} (GPTLAB_DLROVER names it to this test)")
    before = set(os.listdir("/dev/shm"))
    handle = gptlab.launch(small(tinytext), name="run", engine=Dlrover(dlrover_python=python))
    tidy.append(handle)
    until(lambda: len(losses(handle.run)) > 30)
    workers(handle.run)[1].kill()
    result = handle.wait(WAIT_S)
    assert result["status"] == "finished", (result, handle.log())
    assert len(handle.run.attempts()) >= 2 and losses(handle.run) == unbroken
    assert not workers(handle.run) and set(os.listdir("/dev/shm")) <= before
