"""bfloat16 over several processes is bfloat16 in one, within what rounding puts either away from float32."""

from __future__ import annotations

import pytest
from test_matrix import ALONE, BASE, LIMIT, cases, cells, largest_differences, train
from worlds import run_world

from gptlab.config import TrainConfig
from gptlab.spread import PIPELINES, layout

SCHEDULES = ("1f1b", "zero_bubble", "zbv")
"""One stage a process, its backward pass in halves, and two stages of it in a V."""
MORE = ("gpipe", "interleaved_1f1b", "looped_bfs", "dualpipev")


def check(strategy: str, size: int, goes: int, schedules: tuple[str, ...]) -> None:
    configs = [
        (config, micro) for config, micro in cells(strategy, size, goes)
        if strategy not in PIPELINES or config.pipeline_schedule in schedules
    ]  # fmt: skip
    first, micro = configs[0]
    plain: TrainConfig = BASE.replace(global_batch_size=first.global_batch_size)
    full, half = train(ALONE, plain, micro), train(ALONE, plain, micro, "bfloat16")
    loss_rounding, rounding = largest_differences([half], full)
    assert loss_rounding > LIMIT and rounding > 100 * LIMIT, "bfloat16 was not what it was asked for"
    stages = layout(first, size).processes
    for (config, _), *found in zip(configs, *run_world(size, cases, configs, "bfloat16", stages=stages), strict=True):
        loss, gradient = largest_differences(list(found), half)
        apart = f"{loss:.1e} of {loss_rounding:.1e}, {gradient:.1e} of {rounding:.1e}"
        label = f"{strategy} {config.pipeline_schedule}: {apart}"
        print(label)
        # Either is about so far from float32, and so no more than twice as far from the other.
        assert loss <= 2 * loss_rounding and gradient <= 2 * rounding, label


@pytest.mark.parametrize(("strategy", "size"), [("fsdp", 2), pytest.param("pp", 2, marks=pytest.mark.slow)])
def test_half_precision_over_several_processes_is_that_of_one(strategy: str, size: int) -> None:
    check(strategy, size, 2, SCHEDULES)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "size"), [("ddp", 2), ("fsdp", 4), ("pp", 4), ("pp+ddp", 4), ("pp+fsdp", 4)])
def test_half_precision_under_the_other_strategies_and_schedules(strategy: str, size: int) -> None:
    check(strategy, size, 1, SCHEDULES + MORE)
