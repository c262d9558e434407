"""Killed anywhere, also amid a save, and resumed: the same losses and the same final weights, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gptlab.config import TrainConfig
from gptlab.recording import create_run
from gptlab.runs import Run

KILLING = Path(__file__).parent / "killing.py"
STEPS = 60
EVENTS = 38
"""Calls of a save that sweeps up the half of the one before, takes its place, and removes an older one."""


def train(path: Path, plans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What became of each attempt."""
    done = subprocess.run(
        [sys.executable, str(KILLING), str(path), json.dumps(plans)], capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def begin(text: Path, folder: Path, name: str, dtype: str) -> Run:
    config = TrainConfig(
        n_layer=2, n_head=2, n_embd=32, block_size=32, global_batch_size=4, micro_batch_size=2, max_iters=STEPS,
        warmup_iters=3, eval_iters=1, eval_interval=5, checkpoint_interval=3, keep_checkpoints=1, dropout=0.1,
        data=str(text), tokenizer="char", device="cpu", threads=1,
    )  # fmt: skip
    return create_run(config.replace(dtype=dtype), name, folder)


def outcome(run: Run) -> tuple[list[float], bytes, bytes]:
    """The loss column, and the bytes of the final weights and of the optimizer."""
    last = run.checkpoints()[-1]
    assert last.name == f"step-{STEPS:08d}"
    return (
        [row["loss"] for row in run.metrics() if "loss" in row],
        (last / "model.safetensors").read_bytes(),
        (last / "optimizer.safetensors").read_bytes(),
    )


def amid_saves(every: int = 1) -> list[dict[str, Any]]:
    """Each attempt dies in its first save, amid a file or at a later call than the one before it, which it resumes."""
    return [{"bytes": 30_000}, {"bytes": 180_000}, *({"event": nth} for nth in range(1, EVENTS + 1, every))]


def at_random_steps(draw: random.Random, kills: int = 20) -> list[dict[str, Any]]:
    """Half of them amid the row, half some moments later."""
    steps = sorted(draw.sample(range(1, STEPS - 3), k=kills))
    return [{"step": step} | ({"pause": draw.uniform(0, 0.02)} if n % 2 else {}) for n, step in enumerate(steps)]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param("saves", "float32", marks=pytest.mark.slow),
        ("some saves", "bfloat16"),
        pytest.param("steps", "float32", marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_equals_unbroken(tinytext: Path, tmp_path: Path, kind: str, dtype: str) -> None:
    whole, broken = (begin(tinytext, tmp_path, name, dtype) for name in ("whole", "broken"))
    assert train(whole.path, [{}])[0]["code"] == 0, whole.log()
    draw = random.Random(f"{kind} {dtype}")
    plans = {"saves": amid_saves(), "some saves": amid_saves(every=3), "steps": at_random_steps(draw)}[kind]
    *died, last = train(broken.path, [*(plan | {"eval_interval": draw.randint(1, 7)} for plan in plans), {}])
    for end in died:
        assert end["signal"] in (signal.SIGKILL, signal.SIGXFSZ), (end, broken.log())
        assert set(end["checkpoints"].values()) <= {None}, end  # complete or absent
    assert last["code"] == 0, broken.log()
    assert outcome(broken) == outcome(whole)
    if kind != "steps":
        assert [end["signal"] for end in died[:3]] == [signal.SIGXFSZ, signal.SIGXFSZ, signal.SIGKILL]
        assert died[0]["halves"] == 1 and not died[0]["checkpoints"]
        progress = [max(end["checkpoints"], default="") for end in died]
        assert "" in progress and len(set(progress)) > 3  # some died before the rename, and some after it
