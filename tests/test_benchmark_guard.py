"""Speed does not fall back: a few ratios that the README quotes, in small and with much slack."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

from gptlab.benchmark.cell import settle
from gptlab.benchmark.cells import Plan, grid
from gptlab.benchmark.inside import generating, training
from gptlab.benchmark.pairing import take_turns
from gptlab.kernels import refusal
from gptlab.parallel.world import World

PAIRS = 7


def ratio(ours: Any, theirs: Any) -> float:
    """The median of pairs' ratios: what freezes a machine for a while spoils one pair."""
    a, b = take_turns(ours, theirs, PAIRS)
    return statistics.median(y / x for x, y in zip(a, b, strict=True))


def test_a_training_step_keeps_ahead_of_plain() -> None:
    changes = {"threads": 1, "device": "cpu", "block_size": 128, "global_batch_size": 8, "dtype": "bfloat16"}
    cell = grid(Plan("train", "2/4/128", changes=changes), {})[0][0]
    if (why := refusal(cell.config, "cpu", "bfloat16")) is not None:
        pytest.skip(why)
    world, setting = World(0, 1, torch.device("cpu")), settle(cell, cell.config, strict=True)
    ours, plain = (training.make(name, cell, setting, world) for name in ("ours", "plain"))
    assert setting.kernels == "native" and ratio(ours.step, plain.step) > 1.3


def test_the_cache_keeps_ahead_of_none() -> None:
    changes = {"threads": 1, "device": "cpu", "block_size": 128}
    cell = grid(Plan("generate", "2/4/128", changes=changes), {})[0][0]
    model = generating.model_of(cell, "cpu")
    prompt = torch.zeros(1, 64, dtype=torch.long)
    ours, plain = (generating.make(name, cell, model, torch.float32, "sdpa") for name in ("ours", "nocache"))
    assert ratio(lambda: ours.greedy(prompt, 32), lambda: plain.greedy(prompt, 32)) > 1.3
