"""Runs started from here: what they leave when they end well, and when a process of theirs is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from gptlab import hardware, kernels, launcher, peaks, worker
from gptlab.config import ConfigError, TrainConfig
from gptlab.launcher import client
from gptlab.launcher.engines import Torchrun
from gptlab.launcher.handle import Handle
from gptlab.launcher.verdict import FRUITLESS, Failure, reason_to_end
from gptlab.recording import Claim, create_run
from gptlab.runs import Run, default_runs_dir, is_locked, list_runs, read_json, write_json


def small(text: Path, **changes: Any) -> TrainConfig:
    """A run whose step takes a few milliseconds."""
    values: dict[str, Any] = {
        "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "global_batch_size": 4, "max_iters": 300,
        "checkpoint_interval": 20, "eval_interval": 100, "eval_iters": 2, "device": "cpu", "dtype": "float32",
        "threads": 1, "data": str(text),
    }  # fmt: skip
    return TrainConfig(**(values | changes))


def until(condition: Callable[[], Any], seconds: float = 120.0) -> float:
    """Waits until something is so; the seconds that took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise AssertionError(f"not so after {seconds} s")
        time.sleep(0.005)
    return time.monotonic() - began


def steps(run: Run) -> int:
    rows = run.metrics()
    return rows[-1]["step"] if rows else 0


def losses(run: Run) -> list[float]:
    return [row["loss"] for row in run.metrics()]


def workers(run: Run) -> list[int]:
    return (read_json(run.path / "status.json") or {})["pids"]


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that knows the machine's rates: to measure them takes seconds, and is not kept when it is busy."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "gptlab").mkdir()
    key = peaks.cache_key(hardware.device_name("cpu"), "float32", hardware.cores())
    write_json(folder / "gptlab" / "rates.json", {key: asdict(peaks.Rates(1e11, 1e11, 1e11, 1e10, 1e10))})
    return folder


@pytest.fixture(autouse=True)
def shared_cache_and_a_clean_end(cache: Path, own_folders: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One cache for all of these tests, so that the text is prepared once. What a failed test left on is ended."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    yield
    for run in list_runs():
        if run.is_active:
            client.supervisor().send({"do": "kill", "path": str(run.path)})


@pytest.fixture(scope="module")
def unbroken(cache: Path, tinytext: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[float]]:
    """Losses of runs that nothing happened to, by number of processes."""
    folder = tmp_path_factory.mktemp("unbroken")
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(cache))
    found = {}
    for nproc in (1, 2):
        handle = launcher.launch(small(tinytext, nproc=nproc), runs_dir=folder)
        assert handle.wait(60)["status"] == "finished", handle.log()
        found[nproc] = losses(handle.run)
    patch.undo()
    return found


def test_a_launched_run_finishes_and_leaves_no_process(tinytext: Path) -> None:
    handle = launcher.launch(small(tinytext, max_iters=30), name="first")
    assert handle.status in ("preparing", "starting", "running")
    until(lambda: handle.metrics())
    pids = workers(handle.run)
    result = handle.wait(60)
    assert (result["status"], result["step"], handle.status) == ("finished", 30, "finished")
    assert [row["step"] for row in handle.metrics()] == list(range(1, 31))
    assert "iter 30: loss" in handle.log()
    assert pids and not any(alive(pid) for pid in pids) and workers(handle.run) == []
    assert [folder.name for folder in handle.run.attempts()] == ["01"]


def test_neither_this_process_nor_the_supervisor_loads_torch(tinytext: Path) -> None:
    launcher.launch(small(tinytext, max_iters=2)).wait(60)
    maps = Path(f"/proc/{client.supervisor().process.pid}/maps")
    if maps.exists():
        assert "libtorch" not in maps.read_text()
    code = (
        "import sys, gptlab.launcher, gptlab.launcher.supervisor; print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False False\n"


def test_launch_returns_at_once_and_a_warm_run_steps_soon(tinytext: Path) -> None:
    launcher.launch(small(tinytext, max_iters=2)).wait(60)
    returned, stepped = [], []
    for _ in range(5):  # the best of some: the machine may be busy with something else
        began = time.monotonic()
        handle = launcher.launch(small(tinytext, max_iters=2))
        returned.append(time.monotonic() - began)
        until(handle.metrics, 30)
        stepped.append(time.monotonic() - began)
        handle.wait(60)
    assert min(returned) < 0.05 and min(stepped) < 1.5, (returned, stepped)


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_killed_worker_is_replaced_and_the_losses_are_equal(
    nproc: int, tinytext: Path, unbroken: dict[int, list[float]]
) -> None:
    handle = launcher.launch(small(tinytext, nproc=nproc))
    until(lambda: steps(handle.run) >= 50)
    last = workers(handle.run)[-1]
    os.kill(last, signal.SIGKILL)
    until(lambda: len(handle.run.attempts()) == 2, 20)
    first_error = read_json(handle.run.path / "attempts" / "01" / "error.json")
    assert first_error is not None and first_error["type"] == "WorkerKilled" and first_error["rank"] == nproc - 1
    assert "SIGKILL" in first_error["message"] and first_error["step"] >= 50
    assert handle.wait(60)["status"] == "finished"
    assert {row["attempt"] for row in handle.metrics()} == {1, 2}
    assert losses(handle.run) == unbroken[nproc]
    assert max(abs(a - b) for a, b in zip(unbroken[1], unbroken[2], strict=True)) < 1e-4


def test_stop_leaves_a_checkpoint_and_no_process_and_resume_goes_on(
    tinytext: Path, unbroken: dict[int, list[float]]
) -> None:
    handle = launcher.launch(small(tinytext, nproc=2), name="stopped")
    until(lambda: steps(handle.run) >= 30)
    pids = workers(handle.run)
    handle.stop()
    result = handle.wait(2)
    assert result["status"] == "stopped" and not any(alive(pid) for pid in pids)
    assert handle.run.checkpoints()[-1].name == f"step-{result['step']:08d}"
    again = launcher.resume("stopped")
    assert again.wait(60)["status"] == "finished"
    assert losses(again.run) == unbroken[2]
    with pytest.raises(ConfigError, match="is finished, with step 300"):
        launcher.resume("stopped")


def test_a_checkpoint_of_one_world_size_resumes_on_another(tinytext: Path, unbroken: dict[int, list[float]]) -> None:
    handle = launcher.launch(small(tinytext, nproc=1), name="resized")
    for nproc, goal in ((2, 60), (1, 120)):
        until(lambda run=handle.run, goal=goal: steps(run) >= goal)  # type: ignore[misc]
        handle.stop()
        assert handle.wait(10)["status"] == "stopped"
        info = read_json(handle.run.path / "run.json") or {}
        info["config"]["nproc"] = nproc
        write_json(handle.run.path / "run.json", info)
        handle = launcher.resume("resized")
    assert handle.wait(60)["status"] == "finished"
    assert {row["world_size"] for row in handle.metrics()} == {1, 2}
    assert max(abs(a - b) for a, b in zip(losses(handle.run), unbroken[1], strict=True)) < 1e-4


def test_a_run_is_resized_while_it_goes_on(tinytext: Path, unbroken: dict[int, list[float]]) -> None:
    handle = launcher.launch(small(tinytext, nproc=1, micro_batch_size=2), name="scaled")
    until(lambda: steps(handle.run) >= 20)
    with pytest.raises(
        ConfigError, match="3 workers are more than the 2 micro-batches of 2 that a step has: use at most"
    ):
        handle.scale(3)
    with pytest.raises(ConfigError, match="nproc 0 is out of range"):
        handle.scale(0)
    handle.scale(2)
    until(lambda: handle.metrics()[-1]["world_size"] == 2)
    assert handle.wait(60)["status"] == "finished"
    one, two = handle.run.attempts_table()
    assert (one["world_size"], two["world_size"], one["error"]) == (1, 2, None) and one["to_step"] == two["from_step"]
    assert handle.run.config.nproc == 2  # so that it is resumed with as many
    assert max(abs(a - b) for a, b in zip(losses(handle.run), unbroken[1], strict=True)) < 1e-4
    with pytest.raises(ConfigError, match="is finished"):
        handle.scale(1)


def test_a_worker_is_killed_on_request_and_replaced(tinytext: Path) -> None:
    handle = launcher.launch(small(tinytext, nproc=2, max_iters=100_000))
    until(lambda: steps(handle.run) >= 3 and len(workers(handle.run)) == 2)
    with pytest.raises(ConfigError, match="There is no rank 2 in"):
        handle.kill_worker(2)
    handle.kill_worker(1)
    until(lambda: len(handle.run.attempts()) == 2)
    assert "rank 1 was killed by SIGKILL" in handle.run.attempts_table()[0]["error"]
    assert "rank 1 was killed by SIGKILL" in "".join(handle.why())
    handle.kill()
    assert handle.wait(30)["status"] == "stopped"


def test_each_rank_says_what_it_does(tinytext: Path) -> None:
    handle = launcher.launch(small(tinytext, nproc=2, max_iters=100_000))
    until(lambda: [(step or 0) > 5 for step in handle.run.status().get("rank_steps", [])] == [True, True])
    status = handle.run.status()
    assert len(status["heartbeats"]) == 2 and all(abs(beat - time.time()) < 60 for beat in status["heartbeats"])
    for shares in status["shares"]:
        assert 0 < shares["forward"] < 1 and 0 < shares["backward"] < 1 and 0 < sum(shares.values()) <= 1
    handle.kill()
    handle.wait(30)


def test_a_stop_right_after_launch_is_not_lost(tinytext: Path) -> None:
    handle = launcher.launch(small(tinytext, max_iters=100_000))
    handle.stop()
    assert handle.wait(30)["status"] == "stopped"


def test_kill_ends_a_run_at_once(tinytext: Path) -> None:
    handle = launcher.launch(small(tinytext, max_iters=100_000, nproc=2))
    until(lambda: steps(handle.run) >= 3)
    pids = workers(handle.run)
    handle.kill()
    assert handle.wait(2)["status"] == handle.status == "stopped"
    assert not any(alive(pid) for pid in pids)


def test_several_runs_at_once(tinytext: Path, unbroken: dict[int, list[float]]) -> None:
    handles = [launcher.launch(small(tinytext), name=f"run-{index}") for index in range(3)]
    assert [handle.wait(60)["status"] for handle in handles] == ["finished"] * 3
    assert [losses(handle.run) == unbroken[1] for handle in handles] == [True] * 3


def test_a_run_that_is_being_trained_is_not_started_again(tinytext: Path) -> None:
    handle = launcher.launch(small(tinytext, max_iters=100_000), name="busy")
    with pytest.raises(ConfigError, match="'busy' is being trained by another process"):
        launcher.resume("busy")
    with pytest.raises(ConfigError, match="a run 'busy'"):
        launcher.launch(small(tinytext), name="busy")
    handle.stop()
    assert handle.wait(30)["status"] == "stopped"


def test_what_cannot_work_makes_nothing(tinytext: Path, tmp_path: Path) -> None:
    for wrong in (small(tmp_path / "nowhere.txt"), small(tinytext, n_layer=1000, n_embd=8192)):
        with pytest.raises(ConfigError):
            launcher.launch(wrong)
    assert not default_runs_dir().exists()


def test_a_large_text_is_prepared_elsewhere_and_a_relative_path_means_this_folder(
    tinytext: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "large.txt"
    text.write_text(tinytext.read_text() * 40)
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    handle = launcher.launch(small(Path("large.txt"), max_iters=2))
    assert time.monotonic() - began < 0.2 and handle.status == "preparing"
    assert handle.wait(60)["status"] == "finished", handle.wait()


def test_a_stop_while_the_text_is_prepared(tmp_path: Path) -> None:
    handle = launcher.launch(small(tmp_path, data="pysrc"))
    assert handle.status == "preparing"
    handle.stop()
    result = handle.wait(5)
    assert (result["status"], result["step"], handle.status) == ("stopped", 0, "stopped")


def test_a_directory_that_is_removed_ends_its_run(tinytext: Path) -> None:
    handle = launcher.launch(small(tinytext, max_iters=100_000, nproc=2))
    until(lambda: steps(handle.run) >= 3)
    pids = workers(handle.run)
    shutil.rmtree(handle.run.path, ignore_errors=True)
    shutil.rmtree(handle.run.path, ignore_errors=True)  # a file may have been written in between
    result = handle.wait(10)
    assert result["status"] == "lost" and "is gone" in result["message"]
    until(lambda: not any(alive(pid) for pid in pids), 5)
    assert not handle.run.path.exists()


def test_a_run_that_cannot_be_read_is_refused_and_leaves_the_others_alone(tinytext: Path) -> None:
    other = launcher.launch(small(tinytext, max_iters=100_000), name="other")
    until(lambda: steps(other.run) >= 3)
    run = create_run(small(tinytext), "spoilt", default_runs_dir())
    info = run.info
    changes = {"config": info["config"] | {"n_hade": 3}, "data": {"path": str(tinytext.parent)}}
    write_json(run.path / "run.json", info | changes)
    with pytest.raises(ConfigError, match="n_hade"):
        launcher.resume("spoilt")
    assert not run.attempts() and not is_locked(run.path)
    handle = client.start(run, Claim(run.path), cwd=Path.cwd(), prepared=True)  # as if it were spoilt in between
    result = handle.wait(30)
    assert result["status"] == "lost" and "n_hade" in result["message"]
    done = steps(other.run)
    until(lambda: steps(other.run) > done)
    other.kill()
    assert other.wait(30)["status"] == "stopped"


def test_a_supervisor_that_fails_leaves_its_last_words() -> None:
    one = client.Client()
    one.send({"do": "nothing"})
    one.process.wait(60)
    assert "KeyError: 'path'" in one.last_words(Path("any")) and not one.folder.exists()
    one.close()


def test_a_run_is_not_resumed_where_its_device_or_its_kernel_is_not(
    tinytext: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = "mps" if sys.platform != "darwin" else "cuda"
    ours = {
        "device": "cpu", "dtype": "float32", "attention": "sdpa", "micro_batch_size": 1, "threads": 1,
        "kernels": "native",
    }  # fmt: skip
    monkeypatch.setattr(kernels, "refusal", lambda *_: "this CPU lacks avx512f")
    for kept, words in (
        (ours | {"device": missing}, f"began on {missing}, which this machine lacks"),
        (ours, "began with the kernel of our own, and here this CPU lacks avx512f"),
    ):
        run = create_run(small(tinytext), None, default_runs_dir())
        write_json(run.path / "run.json", run.info | {"setting": kept, "world_size": 1})
        for engine in (None, Torchrun()):
            with pytest.raises(ConfigError, match=words):
                launcher.resume(run.name, engine=engine)
        with pytest.raises(ConfigError, match=words):  # a rank that something else has started
            worker.settle(run.config, run.info, 1, 1)
        assert not run.attempts() and not is_locked(run.path)


# Workers that do wrong ---------------------------------------------------------------------------------------------

WORKERS = """
import os, signal, sys, time
from gptlab.config import ConfigError
from gptlab.recording import RunWriter

def row(path, attempt, step):
    RunWriter(path, attempt).log({"step": step, "loss": 1.0})

def raises(path, *, attempt, rank, world_size, rendezvous):
    row(path, attempt, 7)
    raise ValueError(f"bad luck at 0x{attempt:x}")

def refuses(path, *, attempt, rank, world_size, rendezvous):
    raise ConfigError("no such device")

def leaves(path, *, attempt, rank, world_size, rendezvous):
    if rank == world_size - 1:
        return
    time.sleep(0.2)
    raise RuntimeError(f"Connection closed by peer [127.0.0.1]:{attempt}")

def exits(path, *, attempt, rank, world_size, rendezvous):
    sys.exit(3)

def dies(path, *, attempt, rank, world_size, rendezvous):
    os.kill(os.getpid(), signal.SIGKILL)

def crashes(path, *, attempt, rank, world_size, rendezvous):
    import ctypes
    if attempt == 1:
        ctypes.string_at(0)
    RunWriter(path, attempt).result("finished", step=0)

def imports(path, *, attempt, rank, world_size, rendezvous):
    before = set(sys.modules)
    import gptlab.worker
    gptlab.worker.run_rank(path, attempt=attempt, rank=rank, world_size=world_size, rendezvous=rendezvous)
    new = {name for name in set(sys.modules) - before if name.startswith(("gptlab", "torch", "numpy", "safetensors"))}
    (path / f"imported-{rank}").write_text(" ".join(sorted(new)))

def lingers(path, *, attempt, rank, world_size, rendezvous):
    if rank == 0:
        RunWriter(path, attempt).result("finished", step=0)
    else:
        time.sleep(60)
"""


@pytest.fixture
def start(tinytext: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Handle]:
    """Starts a run whose ranks execute one of WORKERS."""
    (tmp_path / "odd_workers.py").write_text(WORKERS)
    monkeypatch.syspath_prepend(tmp_path)

    def _start(worker: str, nproc: int = 1, **changes: Any) -> Handle:
        run = create_run(small(tinytext, nproc=nproc, **changes), worker, default_runs_dir())
        return client.start(run, Claim(run.path), cwd=tmp_path, prepared=True, worker=f"odd_workers:{worker}")

    return _start


@pytest.mark.parametrize(
    ("worker", "nproc", "attempts", "message"),
    [
        ("raises", 1, 2, "ValueError on rank 0: bad luck at 0x2 (the same error came twice at the same step)"),
        ("refuses", 1, 1, "ConfigError on rank 0: no such device (another attempt would be refused too)"),
        ("leaves", 2, 2, "rank 1 left with exit code 0, though the run is not over, before its first step (the same"),
        ("leaves", 1, 2, "rank 0 left with exit code 0, though the run is not over, before its first step (the same"),
        ("exits", 1, 2, "rank 0 left with exit code 3 before its first step (the same error came twice"),
        (
            "dies",
            1,
            FRUITLESS,
            f"before its first step ({FRUITLESS} attempts in a row failed without a new checkpoint)",
        ),
    ],
)
def test_a_run_that_cannot_go_on_fails_with_its_reason(
    start: Callable[..., Handle], worker: str, nproc: int, attempts: int, message: str
) -> None:
    handle = start(worker, nproc)
    result = handle.wait(60)
    assert result["status"] == handle.status == "failed"
    assert message in result["message"]
    assert len(handle.run.attempts()) == result["attempt"] == attempts
    error = handle.run.error()
    assert error is not None and error["message"] == result["error"]["message"]
    assert workers(handle.run) == []
    if worker == "raises":
        assert error["step"] is None and result["error"]["step"] == result["step"] == 7
        assert 'raise ValueError(f"bad luck' in result["error"]["traceback"] and "bad luck" in handle.log()


def test_a_worker_finds_everything_imported_by_a_process_that_has_computed_nothing(
    start: Callable[..., Handle],
) -> None:
    handle = start("imports", 2, max_iters=3)
    assert handle.wait(60)["status"] == "finished", handle.log()
    for rank in (0, 1):
        late = (handle.run.path / f"imported-{rank}").read_text().split()
        assert len(late) <= 1, late  # torch 2.13 imports a monitor of CUDA's profiler when it first profiles nothing
    servers = [
        process for process in psutil.Process(client.supervisor().process.pid).children()
        if any("forkserver" in word for word in process.cmdline())
    ]  # fmt: skip
    assert [server.num_threads() for server in servers] == [1]  # torch's kernels would have left theirs


def test_a_crash_leaves_its_stack(start: Callable[..., Handle]) -> None:
    handle = start("crashes")
    assert handle.wait(30)["status"] == "finished"
    error = read_json(handle.run.path / "attempts" / "01" / "error.json")
    assert error is not None and "SIGSEGV" in error["message"] and "string_at" in error["traceback"]


def test_a_rank_that_does_not_leave_is_ended(start: Callable[..., Handle], monkeypatch: pytest.MonkeyPatch) -> None:
    handle = start("lingers", 2)
    until(lambda: handle.run.result())
    pids = workers(handle.run)
    assert handle.wait(20)["status"] == "finished" and not any(alive(pid) for pid in pids)


def test_verdicts() -> None:
    def failure(step: int | None, message: str = "x", checkpoint: str | None = None, signal: bool = False) -> Failure:
        return Failure(0, step, "E", message, checkpoint, by_signal=signal)

    assert reason_to_end([failure(3)]) is None
    assert reason_to_end([failure(3), failure(3)]) is not None
    assert reason_to_end([failure(3), failure(4)]) is None
    assert reason_to_end([failure(3), failure(3, "y")]) is None
    assert reason_to_end([failure(3, "port 12"), failure(3, signal=True), failure(3, "port 34")]) is not None
    killed = [failure(3, signal=True)] * (FRUITLESS - 1)
    assert reason_to_end(killed) is None
    assert reason_to_end([*killed, failure(3, signal=True)]) is not None
    assert reason_to_end([*killed, failure(3, signal=True, checkpoint="step-00000002")]) is None


# The death of those above ------------------------------------------------------------------------------------------


def script(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A process of its own that launches a run and prints what it is told to."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


LAUNCH = """
    import os, sys, time
    import gptlab
    from gptlab.launcher import client, launch
    from gptlab.runs import read_json
    config = gptlab.TrainConfig(
        n_layer=2, n_head=2, n_embd=32, block_size=32, global_batch_size=4, max_iters=int(sys.argv[2]), device="cpu",
        dtype="float32", threads=1, checkpoint_interval=20, eval_interval=100, eval_iters=2, data=sys.argv[1], nproc=2)
    handle = launch(config, name="theirs")
    while len(handle.metrics()) < 30:
        time.sleep(0.005)
    caller = client.supervisor()
    pids = read_json(handle.run.path / "status.json")["pids"]
    print(os.getpid(), caller.process.pid, caller.folder, *pids, flush=True)
"""


@pytest.mark.parametrize("how", ["killed", "left"])
def test_when_the_caller_ends_nothing_is_left(how: str, tinytext: Path) -> None:
    parent = script(LAUNCH + ("    time.sleep(60)" if how == "killed" else ""), tinytext, 100_000)
    assert parent.stdout is not None
    words = parent.stdout.readline().split()
    folder, pids = Path(words[2]), [int(word) for word in (words[1], *words[3:])]
    family = (
        [process.pid for process in psutil.Process(parent.pid).children(recursive=True)] if how == "killed" else pids
    )
    assert set(pids) <= set(family)
    parent.kill() if how == "killed" else parent.wait(10)
    until(lambda: not any(alive(pid) for pid in family), 10.0)
    until(lambda: not folder.exists(), 10.0)
    parent.wait()
    assert parent.returncode == (-signal.SIGKILL if how == "killed" else 0)
    assert Run.open("theirs").state == "lost"


def test_when_the_supervisor_is_killed_its_workers_end_and_the_run_resumes(
    tinytext: Path, unbroken: dict[int, list[float]]
) -> None:
    parent = script(LAUNCH + "    print(handle.wait()['status'], handle.status, flush=True)", tinytext, 300)
    assert parent.stdout is not None
    words = parent.stdout.readline().split()
    family = [process.pid for process in psutil.Process(parent.pid).children(recursive=True)]
    os.kill(int(words[1]), signal.SIGKILL)
    until(lambda: not any(alive(int(pid)) for pid in words[3:]), 10.0)  # `make faults` measures it
    assert parent.stdout.readline() == "lost lost\n"
    until(lambda: not any(alive(pid) for pid in family), 10.0)
    assert parent.wait(10) == 0 and not Path(words[2]).exists()
    again = launcher.resume("theirs")
    assert again.wait(60)["status"] == "finished"
    assert losses(again.run) == unbroken[2]


def test_a_detached_run_outlives_who_started_it(tinytext: Path, unbroken: dict[int, list[float]]) -> None:
    code = LAUNCH.replace('name="theirs"', 'name="theirs", detach=True')
    code = code[: code.index("    caller =")] + '    print("begun", flush=True); time.sleep(60)'
    parent = script(code, tinytext, 300)
    assert parent.stdout is not None and parent.stdout.readline() == "begun\n"
    parent.kill()
    parent.wait()
    run = Run.open("theirs")
    until(lambda: not run.is_active, 60)
    assert run.state == "finished" and losses(run) == unbroken[2] and len(run.attempts()) == 1, run.why()


def test_a_detached_run_is_killed_and_resized_by_who_started_it(tinytext: Path) -> None:
    config = small(tinytext, max_iters=100_000, micro_batch_size=1)
    handle = launcher.launch(config, name="far", detach=True)
    until(lambda: steps(handle.run) >= 3)
    handle.scale(2)
    until(lambda: handle.metrics()[-1]["world_size"] == 2)
    handle.kill()
    assert handle.wait(30)["status"] == "stopped"
    assert launcher.resume("far", detach=True).run.path == handle.run.path
    until(lambda: len(handle.run.attempts()) == 3 and handle.status == "running")
    handle.stop()
    assert handle.wait(30)["status"] == "stopped"


def test_a_dead_supervisor_is_followed_by_another(tinytext: Path) -> None:
    before = client.supervisor()
    before.process.kill()
    until(lambda: not psutil.pid_exists(before.process.pid) and not before.folder.exists(), 10.0)  # no zombie, no file
    assert launcher.launch(small(tinytext, max_iters=2)).wait(60)["status"] == "finished"
    assert client.supervisor().process.pid != before.process.pid


def test_a_long_temporary_folder_leaves_room_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    for usual, wanted in ((long, "/tmp"), (Path("/tmp"), "/tmp")):
        monkeypatch.setattr(tempfile, "tempdir", str(usual))
        made = vars(client)["_folder"]()
        assert str(made.parent) == wanted and made.is_dir()
        made.rmdir()
