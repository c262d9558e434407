"""Whatever spreads a step, losses, gradients and checkpoints are those of one process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import run_world

from gptlab import evaluation, launcher
from gptlab.assembly import Setting, assemble
from gptlab.config import TrainConfig
from gptlab.parallel.replicated import Replicated
from gptlab.parallel.strategy import Files, Strategy
from gptlab.parallel.world import World
from gptlab.runs import Run, read_json, write_json

CONFIG = TrainConfig(
    n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=65, tokenizer="char", global_batch_size=8, grad_clip=0.5
)  # AdamW turns the noise of a gradient near 0 into a whole step: a warm-up of 100 keeps such steps small
ALONE = World(0, 1, torch.device("cpu"))
TOKENS = np.random.default_rng(0).integers(0, 65, 500).astype(np.uint16)
STEPS = 5

Found = tuple[float, float, float, dict[str, Tensor] | None]
"""Of a step: loss, norm, loss of a text after it, and the gradients by name on the main rank."""


def gradients(strategy: Strategy) -> dict[str, Tensor] | None:
    """Whole gradients by name, on the main rank."""
    if isinstance(strategy, Replicated):
        return {name: p.grad.clone() for name, p in strategy.part.named_parameters() if p.grad is not None}
    shards: Any = strategy.shards  # type: ignore[attr-defined]
    found = {name: shards.gather(name, p.grad) for name, p in shards.parameters.items()}
    return found if shards.mesh.get_rank() == 0 else None


def train(
    world: World, config: TrainConfig, micro: int, dtype: str = "float32", state: Files | None = None,
    steps: range = range(STEPS),
) -> tuple[list[Found], Files | None]:  # fmt: skip
    """Takes steps, from a state on or from the start, and gathers."""
    parts = assemble(config, Setting("cpu", dtype, "sdpa", micro, 1), TOKENS, world)
    if state is not None:
        parts.strategy.load(state)
    found: list[Found] = []
    starts = evaluation.covering_windows(TOKENS[:150], 16)
    for step in steps:
        result = parts.step(step)
        grads = gradients(parts.strategy)
        found.append(
            (
                result.loss,
                result.grad_norm,
                evaluation.score(parts.strategy, TOKENS[:150], starts, 16, world=world).loss,
                grads,
            )
        )
    return found, parts.strategy.gather()


def near(found: list[Found], wanted: list[Found]) -> None:
    for (loss, norm, text, grads), (its_loss, its_norm, its_text, its_grads) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(its_loss, abs=1e-5) and norm == pytest.approx(its_norm, rel=1e-5)
        assert text == pytest.approx(its_text, abs=1e-5)
        if grads is not None and its_grads is not None:
            assert set(grads) == set(its_grads)
            for name, wanted_grad in its_grads.items():
                assert (grads[name] - wanted_grad).abs().max() <= 1e-5 * wanted_grad.abs().max(), name


def train_all(world: World, cases: list[tuple[TrainConfig, int]]) -> list[list[Found]]:
    return [train(world, config, micro)[0] for config, micro in cases]


@pytest.mark.parametrize(("size", "micros"), [(2, [4, 2, 1]), (3, [1]), (4, [4, 2, 1])])
def test_losses_and_gradients_are_those_of_one_process(size: int, micros: list[int]) -> None:
    """Two processes accumulate 1, 2 and 4 micro-batches; three have 3, 3 and 2; of four, two have nothing to do, and
    then each has 1 and 2."""
    alone, _ = train(ALONE, CONFIG, 8)
    cases = [(CONFIG.replace(strategy=strategy), micro) for strategy in ("ddp", "fsdp") for micro in micros]
    for found in run_world(size, train_all, cases):
        for one in found:
            near(one, alone)


def equal(a: Files | None, b: Files | None) -> bool:
    assert a is not None and b is not None
    assert {f: list(named) for f, named in a.items()} == {f: list(named) for f, named in b.items()}
    return all(torch.equal(a[f][name], b[f][name]) for f in a for name in a[f])


Ways = dict[str, tuple[list[Found], Files | None]]


def go_on(world: World, strategy: str, half: Files | None = None) -> Ways:
    """A run as a whole, its first two steps, and the rest of it from a state: its own, or another's."""
    config = CONFIG.replace(strategy=strategy)
    found: Ways = {}
    if half is None:
        found["whole"] = train(world, config, 1)
        found["half"] = train(world, config, 1, steps=range(2))
        half = shared(found["half"][1], world)
    found["rest"] = train(world, config, 1, state=half, steps=range(2, STEPS))
    return found


def shared(files: Files | None, world: World) -> Files:
    """The main rank's files on every rank, as they would be read from a checkpoint."""
    box: list[Any] = [files]
    torch.distributed.broadcast_object_list(box, src=0)
    found: Files = box[0]
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_state_goes_on_bit_for_bit_in_the_same_world_and_nearly_so_in_others(strategy: str) -> None:
    first, *_ = run_world(3, go_on, strategy)
    (whole, end), (_, half), (rest, again) = first["whole"], first["half"], first["rest"]
    assert equal(end, again) and [found[:3] for found in rest] == [found[:3] for found in whole[2:]]
    near(train(ALONE, CONFIG, 1, state=half, steps=range(2, STEPS))[0], whole[2:])
    near(run_world(2, go_on, "fsdp" if strategy == "ddp" else "ddp", half)[0]["rest"][0], whole[2:])


def small(text: Path, **changes: Any) -> TrainConfig:
    """A run of about a second."""
    return TrainConfig(
        n_layer=2, n_head=2, n_embd=32, block_size=32, tokenizer="char", data=str(text), global_batch_size=8,
        micro_batch_size=4, max_iters=30, eval_interval=1000, eval_iters=1, checkpoint_interval=5, log_interval=10,
        device="cpu", dtype="float32", nproc=2, strategy="fsdp", threads=1,
    ).replace(**changes)  # fmt: skip


def final(run: Run) -> tuple[list[float], bytes, bytes]:
    """Losses, and the last checkpoint's weights and optimizer."""
    last = run.checkpoints()[-1]
    assert last.name == "step-00000030"
    losses = [row["loss"] for row in run.metrics() if "loss" in row]
    return losses, (last / "model.safetensors").read_bytes(), (last / "optimizer.safetensors").read_bytes()


def steps(run: Run) -> int:
    rows = run.metrics()
    return rows[-1]["step"] if rows else 0


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.02)


def test_a_killed_fsdp_run_equals_an_unbroken_one_and_its_checkpoints_serve_plain_training(tinytext: Path) -> None:
    """Killed in one process; or stopped, taken on by one process under ddp, stopped, and by two under fsdp again."""
    unbroken = launcher.launch(small(tinytext), name="unbroken")
    unbroken.wait(300)
    assert "kernels of our own train whole models" in unbroken.run.info["reasons"]["kernels"]
    wanted = final(unbroken.run)
    killed = launcher.launch(small(tinytext), name="killed")
    until(lambda: steps(killed.run) >= 8)
    os.kill((read_json(killed.run.path / "status.json") or {})["pids"][1], signal.SIGKILL)
    assert killed.wait(300)["status"] == "finished" and len(killed.run.attempts()) == 2
    assert final(killed.run) == wanted
    moved = launcher.launch(small(tinytext), name="moved")
    for done, nproc, strategy in ((5, 1, "ddp"), (12, 2, "fsdp")):
        until(lambda run=moved.run, done=done: steps(run) >= done)  # type: ignore[misc]
        moved.stop()
        assert moved.wait(300)["status"] == "stopped"
        info = read_json(moved.run.path / "run.json") or {}
        info["config"] |= {"nproc": nproc, "strategy": strategy}
        write_json(moved.run.path / "run.json", info)
        moved = launcher.resume("moved")
    assert moved.wait(300)["status"] == "finished"
    assert max(abs(a - b) for a, b in zip(final(moved.run)[0], wanted[0], strict=True)) < 1e-4
