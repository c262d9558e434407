"""A pipeline trains as one process does: under every schedule, with replicas, and through several passes a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import run_world

from gptlab import evaluation, timelines
from gptlab.batches import Batches
from gptlab.config import TrainConfig
from gptlab.model import GPT
from gptlab.parallel.pipeline.pipelined import Pipelined
from gptlab.parallel.replicated import Replicated
from gptlab.parallel.strategy import Files, Strategy, Work
from gptlab.parallel.world import World
from gptlab.spread import SCHEDULES, layout
from gptlab.step import TrainStep

CONFIG = TrainConfig(
    n_layer=3, n_head=2, n_embd=32, block_size=16, vocab_size=65, tokenizer="char", global_batch_size=16,
    micro_batch_size=1, dropout=0.1, grad_clip=0.5,
)  # fmt: skip
DEEP = CONFIG.replace(n_layer=6, vocab_size=65)
ALONE = World(0, 1, torch.device("cpu"))
TOKENS = np.random.default_rng(0).integers(0, 65, 300).astype(np.uint16)
STEPS = 5
NAMES = list(SCHEDULES)


@dataclass
class Trained:
    """What five steps gave."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    """Of this process's parameters, by step and name."""
    text_loss: float
    files: Files | None
    weights: dict[str, Tensor]
    record: dict[str, Any] | None


def build(config: TrainConfig, world: World, dtype: str = "float32") -> tuple[Strategy, TrainStep]:
    batches = Batches(TOKENS, block_size=16, global_batch_size=config.global_batch_size, order="random", seed=1)
    work = Work(config, batches, world, config.micro_batch_size, dtype)
    strategy: Strategy
    strategy = Pipelined(work, attention="sdpa") if world.size > 1 else Replicated(GPT(config, seed=config.seed), work)
    strategy.part.train()
    return strategy, TrainStep(strategy, work)


def train(
    world: World, config: TrainConfig, steps: range = range(STEPS), state: Files | None = None, dtype: str = "float32"
) -> Trained:
    strategy, step = build(config, world, dtype)
    if state is not None:
        strategy.load(state)
    losses, norms, gradients, record = [], [], [], None
    starts = evaluation.covering_windows(TOKENS, 16)
    for number in steps:
        result = step(number)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        divisor = max(1.0, (result.grad_norm + 1e-6) / config.grad_clip)
        gradients.append({name: gradient * divisor for name, gradient in whole_gradients(strategy).items()})
        record = strategy.observe() or record
        if number == 1:  # a look in between changes nothing
            evaluation.score(strategy, TOKENS, starts[:4], 16, world=world)
    score = evaluation.score(strategy, TOKENS, starts, 16, world=world)
    files = strategy.gather()
    copied = files and {file: {name: value.clone() for name, value in named.items()} for file, named in files.items()}
    return Trained(losses, norms, gradients, score.loss, copied, weights(strategy), record)


def whole_gradients(strategy: Strategy) -> dict[str, Tensor]:
    """By name: of all parameters of a process that trains alone, of its stages on the first replica."""
    if isinstance(strategy, Replicated):
        return {name: p.grad for name, p in strategy.part.named_parameters() if p.grad is not None}
    assert isinstance(strategy, Pipelined)
    return whole(strategy, {name: p.grad for name, p in strategy.held.parameters.items() if p.grad is not None})


def weights(strategy: Strategy) -> dict[str, Tensor]:
    if isinstance(strategy, Replicated):
        return {name: p.detach().clone() for name, p in strategy.part.named_parameters()}
    assert isinstance(strategy, Pipelined)
    return whole(strategy, {name: p.detach() for name, p in strategy.held.parameters.items()})


def whole(strategy: Pipelined, mine: dict[str, Tensor]) -> dict[str, Tensor]:
    gathered = {name: strategy.held.gather(name, value) for name, value in mine.items()}
    return {name: value.clone() for name, value in gathered.items() if value is not None}


def cases(world: World, configs: list[TrainConfig]) -> list[Trained]:
    """Several in one world, which takes seconds to make."""
    return [train(world, config) for config in configs]


def variants(
    base: TrainConfig, strategy: str, size: int, accumulation: int, names: Sequence[str] = NAMES
) -> list[TrainConfig]:
    """A config for each schedule, whose steps go through the pipeline `accumulation` times."""
    replicas = 1 if strategy == "pp" else 2
    count = base.global_batch_size // (base.micro_batch_size * replicas * accumulation)
    return [
        base.replace(
            strategy=strategy, nproc=size, pipeline_schedule=name, vocab_size=base.vocab_size,
            stages=SCHEDULES[name].per_process * size // replicas, pipeline_micro_batches=count,
        )
        for name in names
    ]  # fmt: skip


def check(config: TrainConfig, alone: Trained, found: list[Trained]) -> None:
    place = layout(config, len(found))
    label = f"{config.pipeline_schedule} {place}"
    covered: set[str] = set()
    for rank, one in enumerate(found):
        assert one.losses == pytest.approx(alone.losses, abs=1e-5), label
        assert one.norms == pytest.approx(alone.norms, rel=1e-5), label
        assert one.text_loss == pytest.approx(alone.text_loss, abs=1e-5), label
        for mine, wanted in zip(one.gradients, alone.gradients, strict=True):
            assert set(mine) == set(one.weights)
            for name, gradient in mine.items():
                assert (gradient - wanted[name]).abs().max() <= 1e-5 * wanted[name].abs().max(), (label, rank, name)
        covered |= set(one.weights)
        assert (one.files is None) == (rank != 0)
    assert covered == set(alone.weights)
    ends = [one.weights["wte.weight"] for one in found if "wte.weight" in one.weights]
    assert all(torch.equal(ends[0], end) for end in ends), label


@pytest.mark.slow
def test_two_processes_train_as_one_under_every_schedule_in_one_two_and_four_passes() -> None:
    alone = train(ALONE, CONFIG)
    configs = [config for passes in (1, 2, 4) for config in variants(CONFIG, "pp", 2, passes)]
    found = run_world(2, cases, configs, stages=2)
    for config, *ranks in zip(configs, *found, strict=True):
        check(config, alone, ranks)


def test_four_processes_train_as_one_under_every_schedule() -> None:
    """Four micro-batches a pass, which two pipelines share; test_matrix.py has the rest."""
    config = DEEP.replace(global_batch_size=8, vocab_size=65)
    alone = train(ALONE, config)
    configs = variants(config, "pp+ddp", 4, 1)
    found = run_world(4, cases, configs, stages=2)
    for case, *ranks in zip(configs, *found, strict=True):
        check(case, alone, ranks)


def test_rows_of_stages_train_as_one_process() -> None:
    plain = CONFIG.replace(global_batch_size=8, vocab_size=65)
    configs = variants(plain, "pp+fsdp", 4, 2, ["1f1b", "zero_bubble"])
    alone = train(ALONE, plain)
    found = run_world(4, cases, configs, stages=2)
    for config, *ranks in zip(configs, *found, strict=True):
        check(config, alone, ranks)


def test_what_models_may_have_besides() -> None:
    """Rotary positions, documents, a head of its own; bfloat16 is as near to itself as to one process's."""
    other = CONFIG.replace(
        rope=True, rmsnorm=True, mask_documents=True, tie_head=False, global_batch_size=4, logit_softcap=30.0,
        vocab_size=65,
    )  # fmt: skip
    config = other.replace(strategy="pp", nproc=2, pipeline_schedule="zero_bubble", split={"h.0": "end"}, vocab_size=65)
    check(config, train(ALONE, other), run_world(2, train, config, stages=2))


def goes_on(world: World, config: TrainConfig) -> tuple[Trained, Trained, Trained]:
    whole = train(world, config)
    first = train(world, config, range(2))
    state = _to_all(world, first.files)
    return whole, first, train(world, config, range(2, STEPS), state)


def _to_all(world: World, files: Files | None) -> Files:
    """As every process would read it from a checkpoint."""
    box = [files]
    torch.distributed.broadcast_object_list(box, src=0)
    assert box[0] is not None
    return box[0]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_state_goes_on_bit_for_bit_and_nearly_so_in_one_process(schedule: str) -> None:
    config = CONFIG.replace(strategy="pp", nproc=2, pipeline_schedule=schedule, vocab_size=65, global_batch_size=8)
    whole, first, rest = run_world(2, goes_on, config, stages=2)[0]
    assert rest.losses == whole.losses[2:] and rest.norms == whole.norms[2:]
    assert whole.files is not None and rest.files is not None
    for file, named in whole.files.items():
        assert set(named) == set(rest.files[file])
        assert all(torch.equal(value, rest.files[file][name]) for name, value in named.items())
    plain = CONFIG.replace(global_batch_size=8, vocab_size=65)
    alone = train(ALONE, plain, range(2, STEPS), first.files)
    assert alone.losses == pytest.approx(whole.losses[2:], abs=1e-5)
    complete = train(ALONE, plain).files
    assert complete is not None
    assert {file: list(named) for file, named in complete.items()} == {f: list(n) for f, n in whole.files.items()}


def test_a_timeline_is_taken_down_beside_its_prediction() -> None:
    config = CONFIG.replace(strategy="pp", nproc=2, pipeline_schedule="dualpipev", vocab_size=65, global_batch_size=4)
    first, second = run_world(2, train, config, stages=2)
    record = first.record
    assert record is not None and second.record is None
    assert (record["stages"], record["processes"], record["micro_batches"], record["passes"]) == (4, 2, 4, 1)
    assert set(record["others"]) == {"interleaved_1f1b", "looped_bfs", "zero_bubble", "zbv"}
    assert all(times["forward_s"] > 0 and times["backward_s"] > 0 for times in record["stage_times"])
    assert record["hop_s"] > 0
    for timeline in (record["predicted"], record["measured"]):
        assert 0 <= timeline["bubble"] < 1 and timeline["seconds"] > 0
    for process in range(2):  # what happened is what was planned, in that order
        plans = [
            [span[1:4] for span in sorted(record[kind]["spans"], key=lambda span: span[4]) if span[0] == process]
            for kind in ("predicted", "measured")
        ]
        assert plans[0] == plans[1]
    text = "\n".join(timelines.lines({"step": 3, **record}))
    assert "dualpipev: 4 stages over 2 processes, 4 micro-batches a pass, step 3" in text and "measured:" in text
