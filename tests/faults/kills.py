"""Workers and supervisors that are killed."""

from __future__ import annotations

import functools
import os
import random
import signal
import statistics
import time
from typing import Any

from arena import PATIENCE_S, STEPS, Arena, Skipped, alive, check_equal, command, script, steps, told, until
from verdicts import Case, Outcome

from gptlab.config import TrainConfig
from gptlab.launcher import client
from gptlab.runs import Run, read_json

SEEDS = 20


def fault(seed: int) -> dict[str, Any]:
    """Where the SIGKILL of a seed strikes. The first four are start-up and first step, on each rank."""
    if seed < 4:
        return {"attempt": 1, "rank": seed % 2, "do": "kill", "at": "start"} if seed < 2 else {
            "attempt": 1, "rank": seed % 2, "do": "kill", "at": "amid", "step": 0
        }  # fmt: skip
    draw = random.Random(seed)
    rank, at = draw.randrange(2), draw.choice(["before", "amid", "after", "save"])
    step = draw.randrange(1, STEPS)
    if at == "save":
        rank, step = 0, 5 * draw.randrange(1, STEPS // 5)
    return {"attempt": 1, "rank": rank, "step": step, "at": at, "do": "kill"}


def one_kill(arena: Arena, seed: int = 0) -> Outcome:
    plan = fault(seed)
    handle = arena.start(plan)
    arena.finish(handle)
    assert len(handle.run.attempts()) == 2, told(handle.run)
    row = handle.run.attempts_table()[0]
    assert row["rank"] == plan["rank"] and "SIGKILL" in row["error"], row
    where = f"rank {plan['rank']}, {plan['at']}" + (f" of step {plan['step']}" if "step" in plan else "")
    return Outcome(f"{where}: replaced", check_equal(handle.run, arena.unbroken()))


def strategy_kill(arena: Arena, strategy: str = "fsdp", rank: int = 1, **changes: Any) -> Outcome:
    if "strategy" not in TrainConfig.__dataclass_fields__:
        raise Skipped("this version has no strategies")
    changes = {"strategy": strategy, **changes}
    reference = arena.unbroken(**changes)
    handle = arena.start({"attempt": 1, "rank": rank, "step": 12, "at": "before", "do": "kill"}, **changes)
    arena.finish(handle)
    assert len(handle.run.attempts()) == 2, told(handle.run)
    return Outcome(f"rank {rank} before step 12: replaced", check_equal(handle.run, reference))


def six_kills(arena: Arena) -> Outcome:
    plan = [
        {"attempt": n, "rank": n % 2, "step": step, "at": "before", "do": "kill"}
        for n, step in enumerate((3, 4, 9, 17, 17, 30), start=1)
    ]
    handle = arena.start(*plan)
    arena.finish(handle)
    assert len(handle.run.attempts()) == 7, told(handle.run)
    return Outcome("six replaced, one after the other", check_equal(handle.run, arena.unbroken()))


def too_many_kills(arena: Arena) -> Outcome:
    handle = arena.start({"rank": 1, "step": 3, "at": "before", "do": "kill"})
    result = arena.finish(handle, "failed")
    assert len(handle.run.attempts()) == 8 and "8 attempts in a row failed without a new checkpoint" in told(handle.run)
    assert result["error"]["rank"] == 1 and "SIGKILL" in result["message"]
    return Outcome("ended at the eighth death without a new checkpoint, rank and signal named")


def supervisor(arena: Arena) -> Outcome:
    handle = arena.start({"attempt": 1, "rank": 0, "step": 17, "at": "before", "do": "wait"})
    until(lambda: (handle.run.path / "struck").exists())
    pids = arena.workers(handle.run)
    os.kill(client.supervisor().process.pid, signal.SIGKILL)
    gone = until(lambda: not any(alive(pid) for pid in pids), what="the workers' end")
    result = handle.wait(10)
    assert (result["status"], handle.status) == ("lost", "lost"), result
    arena.finish(arena.begin(handle.run))
    assert gone < 1, f"workers were gone after {gone:.2f} s, not within 1 s"
    return Outcome(f"lost, workers gone in {gone:.2f} s, resumed", check_equal(handle.run, arena.unbroken()))


def everyone_amid_a_save(arena: Arena) -> Outcome:
    handle = arena.start({"attempt": 1, "rank": 0, "step": 15, "at": "save", "do": "wait"})
    until(lambda: (handle.run.path / "struck").exists())
    pids = arena.workers(handle.run)
    halves = list((handle.run.path / "checkpoints").glob(".step-*"))
    assert len(halves) == 1 and any(halves[0].iterdir()), halves
    for pid in (client.supervisor().process.pid, *pids):
        os.kill(pid, signal.SIGKILL)
    until(lambda: handle.status == "lost")
    assert [path.name for path in handle.run.checkpoints()] == ["step-00000005", "step-00000010"]
    arena.finish(arena.begin(handle.run))
    assert not list((handle.run.path / "checkpoints").glob(".step-*"))
    return Outcome("all killed, the half of step 15 passed over", check_equal(handle.run, arena.unbroken()))


def told_to_stop(arena: Arena, number: signal.Signals = signal.SIGTERM) -> Outcome:
    config = arena.config(max_iters=150, eval_interval=1000, checkpoint_interval=1000)
    words = [
        f"--{name.replace('_', '-')}={value}" for name, value in config.to_dict().items()
        if value != getattr(TrainConfig(), name) and name not in ("vocab_size",)
    ]  # fmt: skip
    found: list[tuple[str, list[float], bytes]] = []
    for name in (f"told-{number.name}", f"left-{number.name}"):
        process = command("train", *words, "--name", name, "--runs-dir", arena.runs, start_new_session=True)
        run = Run(arena.runs / name)
        if name.startswith("told"):
            until(lambda run=run: steps(run) >= 20)  # type: ignore[misc]
            arena.workers(run)
            os.killpg(process.pid, number)
            out, error = process.communicate(timeout=PATIENCE_S)
            result = run.result() or {}
            assert process.returncode == 0 and result["status"] == "stopped", (out, error, result)
            assert run.checkpoints()[-1].name == f"step-{result['step']:08d}"
            happened = f"stopped at step {result['step']} with a checkpoint, resumed"
            process = command("train", "--resume", name, "--runs-dir", arena.runs)
        out, error = process.communicate(timeout=3 * PATIENCE_S)
        assert process.returncode == 0, error
        rows = [row["loss"] for row in run.metrics() if "loss" in row]
        found.append((name, rows, (run.checkpoints()[-1] / "model.safetensors").read_bytes()))
    assert found[0][1:] == found[1][1:], "a run that was told to stop and resumed is not the one that was left alone"
    return Outcome(happened, "bit for bit")


def recovery(arena: Arena) -> Outcome:
    """Kill to the next step, as a user would have it: 0.8M parameters, 2 workers."""
    seconds = []
    handle = arena.start(
        n_layer=4, n_head=4, n_embd=128, block_size=64, global_batch_size=12, micro_batch_size=6, max_iters=100_000,
        eval_interval=100_000, checkpoint_interval=20,
    )  # fmt: skip
    run = handle.run
    for turn in range(5):
        until(lambda: steps(run) > 0 and run.metrics()[-1]["attempt"] == len(run.attempts()))
        goal = steps(run) + 25
        until(lambda goal=goal: steps(run) >= goal)  # type: ignore[misc]
        pid = arena.workers(run)[turn % 2]
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        attempt = len(run.attempts()) + 1
        until(lambda attempt=attempt: _did_a_step(run, attempt))  # type: ignore[misc]
        seconds.append(time.monotonic() - began)
    handle.stop()
    arena.finish(handle, "stopped")
    median = statistics.median(seconds)
    assert median <= 1, f"median {median:.2f} s of {', '.join(f'{s:.2f}' for s in sorted(seconds))}: not within 1 s"
    return Outcome(f"5 kills, to the next step: median {median:.2f} s, longest {max(seconds):.2f} s")


def _did_a_step(run: Run, attempt: int) -> bool:
    main = read_json(run.path / "attempts" / f"{attempt:02d}" / "rank-0.json") or {}
    return main.get("first_step") is not None


CALLER = """
import sys, time, signal
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from arena import Arena
guest = Arena(Path(sys.argv[1]))
signal.signal(signal.SIGINT, signal.default_int_handler)
from gptlab.recording import create_run
from gptlab.runs import write_json
run = create_run(guest.config(), sys.argv[3], guest.runs)
fault = {"attempt": 1, "rank": 1, "step": 20, "at": "before", "do": "sleep", "seconds": 2.0}
write_json(run.path / "plan.json", [fault])
handle = guest.begin(run, detach=sys.argv[4] == "detached")
print("begun", flush=True)
while True:
    try:
        print(handle.wait()["status"], flush=True)
        break
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""
"""Stands for a notebook's kernel: a process that launches a run, and lives on when its cell is interrupted."""


def kernel(arena: Arena, how: str = "interrupted", run_is: str = "attached") -> Outcome:
    arena.unbroken()  # the text is prepared
    name = f"kernel-{how}-{run_is}"
    process = script(CALLER, arena.folder, os.path.dirname(__file__), name, run_is, start_new_session=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "begun\n", process.communicate()[1]
    run = Run(arena.runs / name)
    until(lambda: (run.path / "struck").exists())
    pids = arena.workers(run)
    if how == "interrupted":
        os.killpg(process.pid, signal.SIGINT)  # as Jupyter does
        assert process.stdout.readline() == "interrupted\n"
        assert process.stdout.readline() == "finished\n", told(run)
        assert len(run.attempts()) == 1
        process.wait(10)
        return Outcome("the cell is interrupted, the run is not", check_equal(run, arena.unbroken()))
    process.send_signal(signal.SIGTERM if how == "restarted" else signal.SIGKILL)
    if run_is == "detached":
        process.wait(PATIENCE_S)
        until(lambda: run.state == "finished", what="the detached run's end")
        until(lambda: not any(alive(pid) for pid in pids))
        assert len(run.attempts()) == 1, told(run)
        return Outcome("the run goes on to its end", check_equal(run, arena.unbroken()))
    gone = until(lambda: not any(alive(pid) for pid in pids), what="the workers' end")
    process.wait(10)
    until(lambda: run.state == "lost", 10)
    arena.finish(arena.begin(run))
    assert gone < 1, f"workers were gone after {gone:.2f} s, not within 1 s"
    return Outcome(f"lost, workers gone in {gone:.2f} s, resumed", check_equal(run, arena.unbroken()))


_some = functools.partial
CASES = (
    *(
        Case(f"kill-{seed:02d}", f"SIGKILL of a rank, seed {seed}", _some(one_kill, seed=seed), quick=seed == 0)
        for seed in range(SEEDS)
    ),
    Case("kill-fsdp", "SIGKILL of an fsdp rank", strategy_kill),
    Case("kill-stage", "SIGKILL of a pipeline stage", _some(strategy_kill, strategy="pp", rank=1)),
    Case("six-kills", "six SIGKILLs in a row", six_kills),
    Case("eight-kills", "SIGKILL at the same step each time", too_many_kills, quick=True),
    Case("supervisor", "SIGKILL of the supervisor", supervisor),
    Case("amid-save", "SIGKILL of all amid a checkpoint's write", everyone_amid_a_save),
    Case("sigterm", "SIGTERM to `gptlab train`", told_to_stop),
    Case("sigint", "SIGINT to `gptlab train`", _some(told_to_stop, number=signal.SIGINT)),
    *(
        Case(f"kernel-{how}-{run_is}", f"kernel {how}, {run_is} run", _some(kernel, how=how, run_is=run_is))
        for how in ("interrupted", "restarted", "killed")
        for run_is in ("attached", "detached")
    ),
    Case("recovery", "kill to the next step, 0.8M, 2 workers", recovery),
)
