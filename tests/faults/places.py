"""Ports, neighbours, and other ways to start the same worker."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from arena import Arena, Skipped, check_equal, free_port, until
from cluster import NoCluster, cluster
from hangs import LIMIT_S
from verdicts import Case, Outcome

from gptlab.config import ConfigError
from gptlab.recording import Claim, create_run
from gptlab.runs import read_json, write_json

INJECTION = Path(__file__).with_name("injection.py")
"""What stands for the worker, with the plan's faults built in."""


def occupied_port(arena: Arena) -> Outcome:
    with contextlib.ExitStack() as held:
        taken = held.enter_context(free_port())
        port = taken.getsockname()[1]
        before = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            handle = arena.start()
            arena.finish(handle)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
    return Outcome("workers meet without a port of their own", check_equal(handle.run, arena.unbroken()))


def two_at_once(arena: Arena) -> Outcome:
    handles = [arena.start({"attempt": 1, "rank": n, "step": 20 + n, "at": "before", "do": "kill"}) for n in (0, 1)]
    for handle in handles:
        arena.finish(handle)
    equal = {check_equal(handle.run, arena.unbroken()) for handle in handles}
    return Outcome("each loses a worker and finishes", equal.pop())


def two_on_one_directory(arena: Arena) -> Outcome:
    handle = arena.start({"attempt": 1, "rank": 0, "step": 5, "at": "before", "do": "sleep", "seconds": 1.0})
    until(lambda: (handle.run.path / "struck").exists())
    refusals = []
    tries = (
        lambda: Claim(handle.run.path, wait_s=0.2),
        lambda: create_run(arena.config(), handle.name, arena.runs),
    )
    for attempt in tries:
        try:
            attempt()
        except ConfigError as error:
            refusals.append(str(error))
    assert len(refusals) == 2 and "is being trained by another process" in refusals[0], refusals
    arena.finish(handle)
    assert len(handle.run.attempts()) == 1
    return Outcome("the second is refused in a sentence", check_equal(handle.run, arena.unbroken()))


def torchrun(arena: Arena, do: str = "kill") -> Outcome:
    program = shutil.which("torchrun", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    if program is None:
        raise Skipped("torchrun is not installed")
    reference = arena.unbroken()
    run = create_run(arena.config(hang_timeout_s=LIMIT_S), f"torchrun-{do}", arena.runs)
    write_json(
        run.path / "plan.json",
        [{"attempt": 1, "rank": 1, "step": 17, "at": "before", "do": do, "seconds": 600.0}],
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, program, "--nnodes=1", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d",
         "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--monitor-interval=0.1", "--shutdown-timeout=1",
         str(INJECTION), str(run.path)],
        capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                          "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and run.state == "finished", (done.stderr[-3000:], run.why())
    assert len(run.attempts()) == 2, run.why()
    if do == "kill":
        return Outcome("a rank killed before step 17, restarted by torchrun", check_equal(run, reference))
    error = read_json(run.attempts()[0] / "error.json") or {}
    assert (error["type"], error["rank"]) == ({"sleep": "WorkerHung", "stop": "WorkerStopped"}[do], 1), error
    noticed = error["time"] - float((run.path / "struck").read_text())
    return Outcome(f"rank 1 named after {noticed:.1f} s, restarted by torchrun", check_equal(run, reference))


def slurm(arena: Arena) -> Outcome:
    try:
        with cluster(arena.folder / "slurm"):
            return _requeued(arena)
    except NoCluster as reason:
        raise Skipped(str(reason)) from None


def _requeued(arena: Arena) -> Outcome:
    reference = arena.unbroken()
    run = create_run(arena.config(), "slurm", arena.runs)
    write_json(run.path / "plan.json", [{"attempt": 1, "rank": 0, "step": 17, "at": "before", "do": "wait"}])
    batch = arena.folder / "job.sh"
    worker = f"{sys.executable} -m torch.distributed.run --nnodes=1 --nproc-per-node=2 --rdzv-backend=c10d "
    worker += f"--rdzv-endpoint=127.0.0.1:0 --local-addr=127.0.0.1 {INJECTION}"
    batch.write_text(
        f"#!/bin/sh\n#SBATCH --requeue\n#SBATCH --nodes=1\n#SBATCH --output={arena.folder}/job.log\n"
        f"export OMP_NUM_THREADS=1\n{worker} {run.path}\n"
    )
    job = subprocess.run(
        ["sbatch", "--parsable", str(batch)], capture_output=True, text=True, check=True
    ).stdout.strip()
    try:
        until(lambda: (run.path / "struck").exists())
        write_json(run.path / "plan.json", [])
        subprocess.run(["scontrol", "requeue", job], check=True)
        until(lambda: run.state == "finished", 400)
    finally:
        subprocess.run(["scancel", job], check=False)
    return Outcome("requeued at step 17, resumed", check_equal(run, reference))


CASES = (
    Case("port", "an occupied port", occupied_port),
    Case("two-runs", "two runs at once", two_at_once),
    Case("one-directory", "two on one directory", two_on_one_directory),
    Case("torchrun", "the same script under torchrun", torchrun),
    Case("torchrun-sleeping", "a worker that sleeps, under torchrun", functools.partial(torchrun, do="sleep")),
    Case("torchrun-stopped", "a worker that is SIGSTOPped, under torchrun", functools.partial(torchrun, do="stop")),
    Case("slurm", "the same script under SLURM requeue", slurm),
)
