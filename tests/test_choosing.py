"""Choosing an id: the right set, the right share of draws, no trap at the extremes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gptlab.choosing import Choice
from gptlab.config import ConfigError

P = torch.tensor([0.1, 0.0, 0.4, 0.05, 0.25, 0.2])
LOGITS = P.log()  # id 1 is impossible


def shares(choice: Choice, logits: Tensor = LOGITS, n: int = 10_000) -> Tensor:
    """How often each id is drawn by draws that lie evenly, (V,)."""
    draws = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    ids = choice(logits.expand(n, -1), None, draws)
    return torch.bincount(ids, minlength=logits.numel()) / n


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 2, 3, 4, 5]),
        ({"top_k": 1}, [2]),
        ({"top_k": 3}, [2, 4, 5]),
        ({"top_k": 100}, [0, 2, 3, 4, 5]),
        ({"top_p": 0.0}, [2]),
        ({"top_p": 0.39}, [2]),
        ({"top_p": 0.6}, [2, 4]),
        ({"top_p": 0.7}, [2, 4, 5]),
        ({"top_p": 0.8, "top_k": 3}, [2, 4, 5]),
        ({"top_p": 0.6, "top_k": 3}, [2, 4]),  # 0.6 of the three's 0.85 is less than the first two's 0.65
        ({"top_p": 0.8, "top_k": 2}, [2, 4]),
    ],
)
def test_ids_are_drawn_by_their_share_among_those_kept(options: dict[str, float], kept: list[int]) -> None:
    wanted = torch.zeros(6)
    wanted[kept] = P[kept] / P[kept].sum()
    torch.testing.assert_close(shares(Choice(**options)), wanted, atol=2e-4, rtol=0)  # type: ignore[arg-type]


def test_temperature_divides_the_logits() -> None:
    torch.testing.assert_close(shares(Choice(temperature=2.0)), P.sqrt() / P.sqrt().sum(), atol=2e-4, rtol=0)
    assert shares(Choice(temperature=1e-300))[2] == 1 and shares(Choice(temperature=0))[2] == 1
    finite = LOGITS.clamp(min=-50)
    torch.testing.assert_close(shares(Choice(temperature=1e300), finite), torch.full((6,), 1 / 6), atol=2e-4, rtol=0)


def test_equal_logits_do_not_widen_top_k() -> None:
    assert (shares(Choice(top_k=2), torch.zeros(6)) > 0).sum() == 2


@pytest.mark.parametrize("draw", [0.0, math.nextafter(1.0, 0.0)])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.99}])
def test_the_outermost_draws_give_possible_ids(draw: float, options: dict[str, float]) -> None:
    logits = torch.tensor([[-math.inf, 0.0, 1.0, -math.inf, 0.5, -math.inf]])
    ids = Choice(**options)(logits, None, torch.tensor([draw], dtype=torch.float64))  # type: ignore[arg-type]
    assert ids.item() in (1, 2, 4)


def test_the_penalty_lowers_what_was_seen_whatever_its_sign() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0], [-1.0, -1.5, -3.0]])
    seen = torch.tensor([[True, False, False], [True, False, False]])
    assert Choice(temperature=0)(logits).tolist() == [0, 0]
    assert Choice(temperature=0, repetition_penalty=2.0)(logits, seen).tolist() == [1, 1]


@pytest.mark.parametrize("options", [{"top_k": 4}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.6}, {"temperature": 0.6}])
def test_the_distribution_is_that_of_transformers(options: dict[str, float]) -> None:
    process = pytest.importorskip("transformers.generation.logits_process")
    scores = torch.randn(1, 40, generator=torch.Generator().manual_seed(0)) * 2
    ids = torch.tensor([[3, 7, 7, 21]])
    theirs = process.RepetitionPenaltyLogitsProcessor(1.3)(ids, scores.clone())
    if "temperature" in options:
        theirs = process.TemperatureLogitsWarper(options["temperature"])(ids, theirs)
    if "top_k" in options:
        theirs = process.TopKLogitsWarper(int(options["top_k"]))(ids, theirs)
    if "top_p" in options:
        theirs = process.TopPLogitsWarper(options["top_p"])(ids, theirs)
    seen = torch.zeros(1, 40, dtype=torch.bool)
    seen[0, ids[0]] = True
    n = 20_000
    draws = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    choice = Choice(repetition_penalty=1.3, **options)  # type: ignore[arg-type]
    ours = torch.bincount(choice(scores.expand(n, -1), seen.expand(n, -1), draws), minlength=40) / n
    torch.testing.assert_close(ours, theirs.softmax(-1)[0], atol=2e-4, rtol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_diverged_model_is_named(bad: float, temperature: float) -> None:
    with pytest.raises(ConfigError, match="diverged"):
        Choice(temperature=temperature)(torch.tensor([[0.0, bad]]), None, torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 1.1}, {"top_p": -0.1},
        {"repetition_penalty": 0.0}, {"repetition_penalty": math.inf},
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} .* out of range"):
        Choice(**options)  # type: ignore[arg-type]
