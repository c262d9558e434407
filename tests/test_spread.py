"""A pipeline's layout: what fits is counted, and what does not is refused with what does."""

from __future__ import annotations

from typing import Any

import pytest

from gptlab.config import ConfigError, TrainConfig
from gptlab.spread import (
    SCHEDULES,
    Layout,
    check_device,
    held,
    layout,
    owners,
    passes,
    pipeline_micro_batch,
    split_points,
    trouble,
)


def config(**changes: Any) -> TrainConfig:
    values: dict[str, Any] = {"strategy": "pp", "nproc": 2, "n_layer": 6, "global_batch_size": 12}
    return TrainConfig(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, Layout(2, 1, 2, 1)),
        ({"nproc": 4}, Layout(4, 1, 4, 1)),
        ({"pipeline_schedule": "interleaved_1f1b"}, Layout(4, 2, 2, 1)),
        ({"pipeline_schedule": "interleaved_1f1b", "stages": 6}, Layout(6, 3, 2, 1)),
        ({"pipeline_schedule": "zbv", "nproc": 4, "micro_batch_size": 1}, Layout(8, 2, 4, 1)),
        ({"strategy": "pp+ddp", "nproc": 4, "stages": 2}, Layout(2, 1, 2, 2)),
        ({"strategy": "pp+ddp", "nproc": 4, "stages": 4, "pipeline_schedule": "zbv"}, Layout(4, 2, 2, 2)),
        ({"nproc": 3, "split": {"h.2": "beginning", "h.4": "end"}}, Layout(3, 1, 3, 1)),
        ({"strategy": "ddp", "nproc": 3}, Layout(1, 1, 1, 3)),
    ],
)  # fmt: skip
def test_layouts(changes: dict[str, Any], wanted: Layout) -> None:
    made = config(**changes)
    assert layout(made, made.nproc) == wanted


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stages": 3}, "do not fit nproc 2 with strategy pp: use 2 stages"),
        ({"stages": 4}, "1f1b has 1 stage on a process, not 2: use 2 stages"),
        ({"strategy": "pp+ddp", "nproc": 4}, "give stages, such as 2, or split"),
        ({"strategy": "pp+ddp", "nproc": 4, "stages": 3}, "use one of 2, 4 stages"),
        ({"nproc": 4, "pipeline_schedule": "zbv", "stages": 4}, "zbv has 2 stages on a process, not 1: use 8 stages"),
        ({"nproc": 12, "n_layer": 6}, "use at most 8"),
        ({"split": {"h.9": "beginning"}}, "'h.9' is no block of this GPT"),
        ({"split": {"h.9": "beginning"}}, "choose from h.0 to h.5"),
        ({"split": {"h.2": "middle"}}, "'h.2=middle' is no split point"),
        ({"split": ""}, "split has no split point"),
        ({"nproc": 3, "split": {"h.2": "beginning", "h.1": "end"}}, "the same place: leave one out"),
        ({"nproc": 4, "split": {"h.2": "beginning"}}, "use 4 stages"),
        ({"split": {"h.2": "beginning"}, "stages": 3}, "split makes 2 stages, and stages is 3"),
        ({"micro_batch_size": 5}, "as a pipeline needs it: use a micro_batch_size of 1, 2, 3, 4, 6"),
        ({"nproc": 4, "micro_batch_size": 6}, "as many micro-batches as stages, 4: use a micro_batch_size of 1, 2, 3"),
        ({"micro_batch_size": 1, "global_batch_size": 5, "pipeline_schedule": "zero_bubble"}, "micro_batch_size of 5"),
        ({"micro_batch_size": 1, "pipeline_micro_batches": 5}, "which pipeline_micro_batches 5 does not divide"),
        ({"nproc": 4, "micro_batch_size": 2, "pipeline_micro_batches": 3}, "leave pipeline_micro_batches out"),
        ({"strategy": "ddp", "stages": 2}, "stages 2 is for pipelines, and strategy is ddp"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_does(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=r"\.$") as refused:
        config(**changes)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_batch_that_no_micro_batch_parts_names_the_next_one_that_works() -> None:
    with pytest.raises(ConfigError, match="use a global_batch_size of 4"):
        config(strategy="pp+ddp", nproc=4, stages=2, global_batch_size=3, micro_batch_size=1)


def test_a_mac_s_gpu_is_one_process_s_whatever_the_strategy() -> None:
    check_device("mps", 1)
    check_device("cpu", 2)
    with pytest.raises(ConfigError, match="the device is mps: use nproc 1, or device cpu"):
        check_device("mps", 2)


def test_split_is_text_in_a_config_and_means_the_same() -> None:
    made = config(nproc=3, split={"h.2": "beginning", "h.4": "end"})
    assert made.split == "h.2=beginning,h.4=end"
    assert split_points(str(made.split)) == {"h.2": "beginning", "h.4": "end"}
    assert TrainConfig.from_dict(made.to_dict()) == made and hash(made) == hash(TrainConfig.from_dict(made.to_dict()))


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_stage_has_one_owner(name: str) -> None:
    per_process = SCHEDULES[name].per_process
    place = Layout(4 * per_process, per_process, 4, 1)
    assert sorted(s for p in range(4) for s in held(name, place, p)) == list(range(place.stages))
    assert all(stage in held(name, place, owner) for stage, owner in enumerate(owners(name, place)))
    if SCHEDULES[name].v_shaped:
        assert owners(name, place) == [0, 1, 2, 3, 3, 2, 1, 0]


def test_a_micro_batch_that_is_chosen_leaves_twice_as_many_as_stages() -> None:
    made = config(global_batch_size=64, nproc=4)
    place = layout(made, 4)
    assert pipeline_micro_batch(made, 64, place) == 8  # 8 of them for 4 stages
    assert pipeline_micro_batch(made, 3, place) == 2
    small = config(global_batch_size=5, nproc=4)
    assert pipeline_micro_batch(small, 5, layout(small, 4)) == 1
    assert passes(made.replace(pipeline_micro_batches=4), 8, place) == 2


def test_a_schedules_demands_are_torchs_own() -> None:
    from gptlab.parallel.pipeline.schedules import order

    for name in ("interleaved_1f1b", "zero_bubble", "dualpipev"):
        per_process = SCHEDULES[name].per_process
        place = Layout(2 * per_process, per_process, 2, 1)
        for count in range(1, 9):
            try:
                order(name, place, count)
                legal = True
            except ValueError:
                legal = False
            assert (trouble(name, count, place) is None) == legal, (name, count)
