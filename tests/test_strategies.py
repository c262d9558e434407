"""Whatever spreads a step, losses, gradients and checkpoints are those of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import run_world

from gptlab import evaluation
from gptlab.assembly import Setting, assemble
from gptlab.config import TrainConfig
from gptlab.parallel.replicated import Replicated
from gptlab.parallel.strategy import Files, Strategy
from gptlab.parallel.world import World

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
