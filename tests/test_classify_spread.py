"""However a classifier, or Hugging Face's module, is spread: losses, accuracy and gradients are those of the whole."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import run_world

from gptlab import evaluation, spread
from gptlab.assembly import Setting, assemble
from gptlab.batches import Tokens
from gptlab.config import TrainConfig
from gptlab.documents import Documents
from gptlab.manifest import MODEL
from gptlab.parallel.strategy import Files
from gptlab.parallel.world import World

ALONE = World(0, 1, torch.device("cpu"))
CONFIG = TrainConfig(
    task="classify", n_layer=4, n_head=2, n_embd=32, block_size=16, vocab_size=65, tokenizer="char",
    global_batch_size=8, grad_clip=0.5,
)  # fmt: skip
STEPS = 3
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is an optional dependency"
)

Found = tuple[list[tuple[float, float, float, float]], dict[str, Tensor], Files | None]
"""Of steps: loss, norm, then loss and accuracy on all data; gradients of the last by name; the state."""


def data(task: str) -> Tokens | Documents:
    """Twenty-one documents of three classes, of up to 30 ids, or their ids as one text."""
    drawn = np.random.default_rng(0)
    tokens = np.concatenate([np.append(drawn.integers(0, 64, drawn.integers(1, 31)), 64) for _ in range(21)])
    if task == "lm":
        return tokens.astype(np.uint16)
    return Documents(tokens.astype(np.uint16), drawn.integers(0, 3, 21), names=["a", "b", "c"], pad=64)


def train(world: World, config: TrainConfig, micro: int, state: Files | None = None, first: int = 0) -> Found:
    """Takes steps and looks at all data after each."""
    text = data(config.task)
    parts = assemble(config, Setting("cpu", "float32", "sdpa", micro, 1), text, world)
    strategy: Any = parts.strategy
    assert strategy.shapes == {name: value.shape for name, value in assemble_alone(config).state_dict().items()}
    if state is not None:
        strategy.load(state)
    chosen = evaluation.covering_windows(text, config.block_size)
    rows = []
    for step in range(first, STEPS):
        taken = parts.step(step)
        look = evaluation.score(strategy, text, chosen, config.block_size, world=world)
        rows.append((taken.loss, taken.grad_norm, look.loss, look.accuracy or 0.0))
    return rows, gradients(strategy), strategy.gather()


def assemble_alone(config: TrainConfig) -> Any:
    """The whole model."""
    alone = config.replace(
        strategy="ddp", nproc=1, stages=0, split=None, pipeline_micro_batches=0, vocab_size=65
    )  # fmt: skip
    return assemble(alone, Setting("cpu", "float32", "sdpa", 4, 1), data(config.task), ALONE).strategy.part


def gradients(strategy: Any) -> dict[str, Tensor]:
    """Those of this process's parameters that it can tell whole."""
    if hasattr(strategy, "replicas"):
        return {name: p.grad.clone() for name, p in strategy.part.named_parameters()}
    holder = getattr(strategy, "held", None) or strategy.shards
    found = {name: holder.gather(name, p.grad) for name, p in holder.parameters.items()}
    return {name: value for name, value in found.items() if value is not None}


def cases(world: World, configs: list[tuple[TrainConfig, int]]) -> list[Found]:
    return [train(world, config, micro) for config, micro in configs]


def near(found: Found, wanted: Found) -> None:
    assert len(found[0]) == STEPS
    for one, other in zip(found[0], wanted[0], strict=True):
        assert one == pytest.approx(other, abs=1e-5, rel=1e-5)
    for name, value in found[1].items():
        its = wanted[1][name]
        assert (value - its).abs().max() <= 1e-5 * its.abs().max() + 1e-9, name


def check(size: int, asked: list[tuple[dict[str, Any], int]], base: TrainConfig = CONFIG) -> None:
    """All of these in worlds of one size against one process; every gradient is somewhere."""
    configs = [(base.replace(nproc=size, vocab_size=65, **changes), micro) for changes, micro in asked]
    stages = {spread.processes(config, size) for config, _ in configs}
    assert len(stages) == 1, "cases of one world have one grid"
    wanted = train(ALONE, base, 8)
    ranks = run_world(size, cases, configs, stages=stages.pop())
    for number in range(len(configs)):
        for rank in ranks:
            near(rank[number], wanted)
        assert set().union(*(rank[number][1] for rank in ranks)) == set(wanted[1])
        state = ranks[0][number][2]
        assert state is not None and set(state[MODEL]) == set(wanted[2][MODEL])  # type: ignore[index]


def test_replicas_and_rows() -> None:
    check(3, [({"strategy": "ddp"}, 2), ({"strategy": "fsdp"}, 2), ({"strategy": "fsdp"}, 4)])


def test_stages() -> None:
    schedules = ("gpipe", "1f1b", "looped_bfs", "zero_bubble", "zbv", "dualpipev")
    check(2, [({"strategy": "pp", "pipeline_schedule": name}, 1) for name in schedules])


def test_stages_and_replicas_or_rows() -> None:
    check(4, [({"strategy": "pp+ddp", "stages": 2}, 2), ({"strategy": "pp+fsdp", "stages": 2}, 2)])


@needs_transformers
@pytest.mark.parametrize(("task", "schedule", "micro"), [("classify", "1f1b", 1), ("lm", "gpipe", 2)])
def test_the_published_module_in_traced_stages(task: Any, schedule: str, micro: int) -> None:
    points = {"transformer.h.1": "beginning", "h.1": "end", "transformer.ln_f": "beginning"}
    split = points if task == "classify" else None
    base = CONFIG.replace(task=task, model="huggingface", vocab_size=65)
    check(4, [({"strategy": "pp", "pipeline_schedule": schedule, "split": split}, micro)], base)


@needs_transformers
@pytest.mark.slow
def test_the_published_module_in_stages_and_replicas_goes_on_from_another_world() -> None:
    base = CONFIG.replace(task="lm", model="huggingface", vocab_size=65)
    config = base.replace(strategy="pp+ddp", stages=2, nproc=4, pipeline_micro_batches=2, vocab_size=65)
    parts = assemble(base, Setting("cpu", "float32", "sdpa", 4, 1), data("lm"), ALONE)
    parts.step(0)
    rows, state = run_world(4, go_on, config, parts.strategy.gather(), stages=2)[0]
    whole = train(ALONE, base, 4)
    assert rows == [pytest.approx(row, abs=1e-5, rel=1e-5) for row in whole[0][1:]]
    assert state is not None and whole[2] is not None
    for name, value in whole[2][MODEL].items():
        assert (state[MODEL][name] - value).abs().max() < 1e-5, name


def go_on(world: World, config: TrainConfig, state: Files) -> Any:
    rows, _, end = train(world, config, 2, state, 1)
    return rows, end
