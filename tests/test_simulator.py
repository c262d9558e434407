"""Cuts by cost, orders of passes, and what a simulator makes of them, against formulas from the papers."""

from __future__ import annotations

import pytest
import torch

from gptlab.config import TrainConfig
from gptlab.counts import flops_per_token
from gptlab.cuts import layers_of_stages, piece_costs
from gptlab.model import GPT, initial_weights
from gptlab.parallel.pipeline.cutting import make_part
from gptlab.parallel.pipeline.schedules import Action, order
from gptlab.parallel.pipeline.simulator import StageTimes, predict
from gptlab.presets import preset
from gptlab.spread import SCHEDULES, Layout, trouble

TINY = TrainConfig(n_layer=4, n_head=2, n_embd=32, block_size=16, dropout=0.1)


def even(place: Layout) -> list[StageTimes]:
    """A process's forward pass takes 1, its backward pass 2 in two halves."""
    part = 1 / place.per_process
    return [StageTimes(part, 2 * part, part, part)] * place.stages


def place_of(name: str, processes: int) -> Layout:
    per_process = SCHEDULES[name].per_process
    return Layout(processes * per_process, per_process, processes, 1)


def test_pieces_cost_what_the_whole_costs() -> None:
    config = preset("gpt2", vocab_size=50304)  # no padding
    embedding, block, head = piece_costs(config)
    assert 12 * block + head == flops_per_token(config) and embedding < block / 1000


def test_cuts_count_the_head() -> None:
    gpt2 = preset("gpt2")
    assert layers_of_stages(gpt2, 2) == [range(0, 8), range(8, 12)]
    assert layers_of_stages(gpt2, 4) == [range(0, 4), range(4, 8), range(8, 12), range(12, 12)]
    assert layers_of_stages(TINY, 4) == [range(0, 1), range(1, 2), range(2, 3), range(3, 4)]
    assert layers_of_stages(TINY, 6)[0] == range(0, 0) and layers_of_stages(TINY, 6)[-1] == range(4, 4)
    assert layers_of_stages(TINY, 3, "h.0=end,h.3=beginning") == [range(0, 1), range(1, 3), range(3, 4)]


@pytest.mark.parametrize("count", [1, 2, 3, 6])
@pytest.mark.parametrize("training", [True, False])
def test_stages_one_after_the_other_are_the_model(count: int, training: bool) -> None:
    whole = GPT(TINY, seed=3).train(training)
    part = make_part(
        TINY, dict(enumerate(layers_of_stages(TINY, count))), count, attention="sdpa", dtype="float32", in_chunks=True
    )
    part.to_empty(device="cpu")
    part.load_state_dict(dict(initial_weights(TINY, 3)))
    part.train(training)
    assert {name: p.shape for name, p in part.named_parameters()} == {n: p.shape for n, p in whole.named_parameters()}
    ids, targets = torch.randint(0, 257, (2, 3, 16), generator=torch.Generator().manual_seed(0))
    x = ids
    for stage in part.stages.values():
        x = stage(x, ids=ids, targets=targets, dropout_seed=7)
    assert torch.equal(x[0], whole(ids, targets, reduction="sum", dropout_seed=7))


@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize("processes", [2, 4])
def test_an_order_passes_every_micro_batch_once_both_ways(name: str, processes: int) -> None:
    place = place_of(name, processes)
    plans = order(name, place, 8)
    for kinds in ("F", "BI", "BW"):
        found = sorted((a.stage, a.micro_batch) for plan in plans for a in plan if a.kind in kinds)
        assert found == [(stage, index) for stage in range(place.stages) for index in range(8)]


def test_1f1b_is_in_turn() -> None:
    assert [str(action) for action in order("1f1b", Layout(3, 1, 3, 1), 4)[1]] == (
        ["F1.0", "F1.1", "B1.0", "F1.2", "B1.1", "F1.3", "B1.2", "B1.3"]
    )


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("count", [8, 16])
def test_bubbles_are_those_of_the_papers(processes: int, count: int) -> None:
    """Narayanan et al. 2021, section 2.2: the idle time over the ideal one is (P - 1) / M, and over v with v stages a
    process; Qi et al. 2024, section 2: with B = W = F zero bubble idles (P - 1) F where 1F1B does 3 (P - 1) F."""
    ideal = 3 * count
    idle = {name: predict(name, p := place_of(name, processes), count, even(p)).seconds - ideal for name in SCHEDULES}
    wait = processes - 1
    assert idle["gpipe"] == idle["1f1b"] == pytest.approx(3 * wait)
    assert idle["interleaved_1f1b"] == idle["looped_bfs"] == pytest.approx(3 * wait / 2)
    assert idle["zero_bubble"] == pytest.approx(wait)
    assert idle["zbv"] == idle["dualpipev"] == pytest.approx(wait / 2)


def test_memory_and_bubble_of_a_timeline() -> None:
    place = Layout(4, 1, 4, 1)
    gpipe, turns = (predict(name, place, 8, even(place)) for name in ("gpipe", "1f1b"))
    assert gpipe.bubble == turns.bubble == pytest.approx(3 / 11)
    assert gpipe.in_flight == [8, 8, 8, 8] and turns.in_flight == [4, 3, 2, 1]


def test_what_crosses_processes_takes_its_time_and_a_slow_stage_sets_the_pace() -> None:
    place = Layout(2, 1, 2, 1)
    timeline = predict("gpipe", place, 1, even(place), hop=0.5)
    assert [(str(s.action), s.start, s.end) for s in timeline.spans] == [
        ("F0.0", 0.0, 1.0), ("F1.0", 1.5, 2.5), ("B1.0", 2.5, 4.5), ("B0.0", 5.0, 7.0)
    ]  # fmt: skip
    uneven = [StageTimes(1, 2, 1, 1), StageTimes(3, 6, 3, 3)]
    assert predict("1f1b", place, 10, uneven).seconds == pytest.approx(1 + 10 * 9 + 2)
    assert Action("F", 0, 0) == timeline.spans[0].action and trouble("1f1b", 1, place) is not None
