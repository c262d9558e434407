"""The whole matrix: each strategy and schedule, on 2 and 4 processes, in 1, 2 and 4 goes a step, against one process.

    GPTLAB_SLOW=1 pytest -s tests/test_matrix.py    # prints a line a cell, with its largest differences

Short forms stand in test_strategies.py and test_pipeline.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import run_world

from gptlab.assembly import Setting, assemble
from gptlab.config import TrainConfig
from gptlab.parallel.pipeline.pipelined import Pipelined
from gptlab.parallel.replicated import Replicated
from gptlab.parallel.sharded import Sharded
from gptlab.parallel.strategy import Strategy
from gptlab.parallel.world import World
from gptlab.spread import PIPELINES, SCHEDULES, layout, trouble

BASE = TrainConfig(
    n_layer=6, n_head=2, n_embd=32, block_size=16, vocab_size=65, tokenizer="char", dropout=0.1, grad_clip=0.5,
    global_batch_size=16,
)  # fmt: skip
ALONE = World(0, 1, torch.device("cpu"))
TOKENS = np.random.default_rng(0).integers(0, 65, 500).astype(np.uint16)
STEPS = 5
LIMIT = 1e-5
"""Of the losses' differences, and of a gradient's largest difference over its largest value."""


@dataclass
class Trained:
    """What five steps gave on one process."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    """Whole ones, by step and name: of all parameters, or of those of this process's stages; none where others know."""
    embedding: Tensor | None
    """The tied embedding at the end, where this process has one as a whole."""


def train(world: World, config: TrainConfig, micro: int, dtype: str = "float32") -> Trained:
    parts = assemble(config, Setting("cpu", dtype, "sdpa", micro, 1), TOKENS, world)
    parts.strategy.part.train()
    losses, gradients = [], []
    for step in range(STEPS):
        losses.append(parts.step(step).loss)
        gradients.append(whole(parts.strategy))
    held = parts.strategy.held.parameters if isinstance(parts.strategy, Pipelined) else {}
    embedding = held.get("wte.weight")
    return Trained(losses, gradients, None if embedding is None else embedding.detach().clone())


def whole(strategy: Strategy) -> dict[str, Tensor]:
    """Gradients as the optimizer has seen them."""
    if isinstance(strategy, Replicated):
        found = {name: p.grad for name, p in strategy.part.named_parameters()}
    elif isinstance(strategy, Sharded):
        found = {name: strategy.shards.gather(name, _grad(p)) for name, p in strategy.shards.parameters.items()}
    else:
        assert isinstance(strategy, Pipelined)
        found = {name: strategy.held.gather(name, _grad(p)) for name, p in strategy.held.parameters.items()}
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def cases(world: World, configs: list[tuple[TrainConfig, int]], dtype: str = "float32") -> list[Trained]:
    """Several in one world, which takes seconds to make."""
    return [train(world, config, micro, dtype) for config, micro in configs]


def cells(strategy: str, size: int, goes: int) -> list[tuple[TrainConfig, int]]:
    """A config and its micro-batch size; in a pipeline one a schedule."""
    if strategy not in PIPELINES:
        return [(BASE.replace(strategy=strategy, nproc=size), BASE.global_batch_size // (size * goes))]
    replicas = 1 if strategy == "pp" else 2
    found = []
    for name, schedule in SCHEDULES.items():
        config = BASE.replace(
            strategy=strategy, nproc=size, pipeline_schedule=name, stages=schedule.per_process * size // replicas,
            global_batch_size=8 * goes, micro_batch_size=1, pipeline_micro_batches=8 // replicas,
        )  # fmt: skip
        assert trouble(name, 8 // replicas, layout(config, size)) is None
        found.append((config, 1))
    return found


def largest_differences(found: list[Trained], alone: Trained) -> tuple[float, float]:
    """Of losses, and of gradients over their largest value, over all steps and processes."""
    loss = max(abs(a - b) for one in found for a, b in zip(one.losses, alone.losses, strict=True))
    seen: set[str] = set()
    gradient = 0.0
    for one in found:
        for mine, wanted in zip(one.gradients, alone.gradients, strict=True):
            for name, value in mine.items():
                assert value.shape == wanted[name].shape
                ratio = (value - wanted[name]).abs().max() / wanted[name].abs().max()
                gradient = max(gradient, float(ratio))
                seen.add(name)
    assert seen == set(alone.gradients[0]), "a gradient is nowhere"
    return loss, gradient


def tied_ends(config: TrainConfig, found: list[Trained]) -> bool:
    """Whether the first and the last stage of each replica have the same embedding, or the same rows of it."""
    stages = layout(config, len(found)).processes
    for replica in range(len(found) // stages):
        each = found[replica * stages : (replica + 1) * stages]
        ends = [one.embedding for one in each if one.embedding is not None]
        if not ends or not all(torch.equal(ends[0], end) for end in ends):
            return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("goes", [1, 2, 4])
@pytest.mark.parametrize(
    ("strategy", "size"),
    [("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4), ("pp", 2), ("pp", 4), ("pp+ddp", 4), ("pp+fsdp", 4)],
)
def test_losses_and_gradients_are_those_of_one_process(strategy: str, size: int, goes: int) -> None:
    configs = cells(strategy, size, goes)
    first = configs[0][0]
    # In the same micro-batches, each of which has a dropout of its own.
    alone = train(ALONE, BASE.replace(global_batch_size=first.global_batch_size), configs[0][1])
    stages = layout(first, size).processes
    wrong = []
    for (config, _), *found in zip(configs, *run_world(size, cases, configs, stages=stages), strict=True):
        loss, gradient = largest_differences(list(found), alone)
        tied = "-" if strategy not in PIPELINES else "bit-equal" if tied_ends(config, list(found)) else "NOT EQUAL"
        schedule = config.pipeline_schedule if strategy in PIPELINES else "-"
        line = f"| {strategy} | {schedule} | {size} | {goes} | {loss:.1e} | {gradient:.1e} | {tied} |"
        print(line)
        if loss > LIMIT or gradient > LIMIT or tied == "NOT EQUAL":
            wrong.append(line)
    assert not wrong, "\n".join(wrong)
