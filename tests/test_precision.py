"""The loss scale is torch's own, and tfloat32 is on where it was asked for and nowhere else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gptlab.precision import LossScaler, allow_tfloat32, precision

# Whether the gradient of a step overflows.
STORY = [True, True, False, False, False, True, False, False, False, False, False, False, True, *[False] * 9]


def test_the_scale_is_that_of_torchs_scaler() -> None:
    ours, theirs = LossScaler(growth_interval=3), torch.amp.GradScaler("cpu", growth_interval=3)
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([p])
    for overflow in STORY:
        assert ours.scale == theirs.get_scale()
        optimizer.zero_grad()
        theirs.scale(p.sum() * (math.inf if overflow else 1.0)).backward()
        theirs.step(optimizer)
        theirs.update()
        ours.overflowed() if overflow else ours.succeeded()
    assert ours.scale == theirs.get_scale() != 65536


def test_the_scale_ends_at_one_and_comes_back_from_a_checkpoint() -> None:
    scaler = LossScaler()
    assert [scaler.overflowed() for _ in range(18)] == [True] * 16 + [False] * 2
    assert scaler.scale == 1
    for _ in range(2005):
        scaler.succeeded()
    other = LossScaler()
    other.restore(scaler.state())
    assert (other.scale, other.good_steps) == (scaler.scale, scaler.good_steps) == (2, 5)


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        ("float32", torch.float32), ("tfloat32", torch.float32), ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
    ],
)  # fmt: skip
def test_products_are_in_the_precision_asked_for(dtype: str, wanted: torch.dtype) -> None:
    with precision(torch.device("cpu"), dtype):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == wanted


def test_tfloat32_is_on_where_it_was_asked_for() -> None:
    try:
        for dtype in ("tfloat32", "float32", "tfloat32", "bfloat16"):
            allow_tfloat32(dtype)
            assert torch.backends.cuda.matmul.allow_tf32 == (dtype == "tfloat32")
    finally:
        allow_tfloat32("float32")
