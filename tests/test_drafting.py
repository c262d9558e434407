"""Guessing ahead: the same ids to the last bit, with fewer readings of the weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from gptlab import drafting
from gptlab.config import GPTConfig
from gptlab.decoding import MOST, Decoder
from gptlab.drafting import Drafter
from gptlab.kernels import lanes_refusal
from gptlab.kvcache import KVCache
from gptlab.model import GPT
from gptlab.native.thin import quantised, thin_product
from gptlab.sampling import generate

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=65)
CPU = torch.device("cpu")
needs_thin = pytest.mark.skipif(lanes_refusal() is not None, reason="no AVX-512, or no compiler")


def model(**changes: Any) -> GPT:
    """With opinions: guesses in int8 are right and wrong."""
    made = GPT(dataclasses.replace(SMALL, **changes)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for p in made.parameters():
        p.add_(torch.randn(p.shape, generator=generator), alpha=0.15)
    return made


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models draft, too."""
    monkeypatch.setattr(drafting, "LARGE", 0)
    monkeypatch.setattr(drafting, "LONG", 0)


@needs_thin
@pytest.mark.parametrize("rows", [1, 2, 5, MOST])
@pytest.mark.parametrize("shape", [(33, 64), (64, 48), (7, 130)])
def test_the_product_with_int8_is_that_of_the_weights_it_stands_for(rows: int, shape: tuple[int, int]) -> None:
    weight, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(rows, shape[1])
    few, scale = quantised(weight)
    product = thin_product()
    assert product is not None
    assert (few * scale[:, None] - weight).abs().max() <= scale.max() / 2 + 1e-6
    wanted = torch.nn.functional.linear(x, few * scale[:, None], bias)
    torch.testing.assert_close(product(x, few, bias, scale=scale), wanted, atol=1e-4, rtol=1e-4)


def test_an_output_without_weights_stays_zero() -> None:
    few, scale = quantised(torch.zeros(3, 16))
    assert not few.any() and scale.isfinite().all()


@needs_thin
def test_several_ids_at_once_have_the_bits_of_one_after_another() -> None:
    decoder, text = Decoder(model(), rows=1), torch.randint(0, 65, (1, 20), generator=torch.Generator().manual_seed(0))
    caches = [KVCache(SMALL, 1, 64, CPU, torch.float32) for _ in range(2)]
    for cache in caches:
        decoder.logits(text[:, :12], cache)
    one = torch.cat([decoder.logits(ids, caches[0]) for ids in text[:, 12:].split(1, 1)])
    assert torch.equal(decoder.following(text[:, 12:], caches[1])[0], one)
    assert torch.equal(caches[0].buffer, caches[1].buffer) and caches[0].used == caches[1].used == 20


@needs_thin
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.7, "top_k": 5, "seed": 1},
        {"temperature": 0, "repetition_penalty": 1.3},
        {"temperature": 1.0, "stop_ids": (3, 17), "seed": 2},
    ],
)
@pytest.mark.parametrize("prompt", [1, 20, 70])
def test_texts_are_the_same_also_past_the_edge(always: None, options: dict[str, Any], prompt: int) -> None:
    gpt = model()
    ids = torch.randint(0, 65, (1, prompt), generator=torch.Generator().manual_seed(prompt))

    def text(draft: bool) -> list[int]:
        return [int(one) for one in generate(gpt, ids, max_new_tokens=70, draft=draft, **options)]

    assert text(True) == text(False)


@needs_thin
def test_fewer_readings_of_the_weights_than_tokens(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[int] = []
    following = Decoder.following

    def counted(self: Decoder, ids: Tensor, cache: KVCache) -> Tensor:
        if not any(getattr(m, "scale", None) is not None for m in self.model.modules()):
            readings.append(ids.size(1))
        return following(self, ids, cache)

    monkeypatch.setattr(Decoder, "following", counted)
    list(generate(model(), torch.zeros(1, 4, dtype=torch.long), max_new_tokens=40, temperature=0))
    assert len(readings) < 25 and max(readings) <= MOST, readings


@pytest.mark.parametrize(
    ("rows", "new", "changes", "dtype"),
    [
        (2, 100, {}, torch.float32),
        (1, 10, {}, torch.float32),
        (1, 100, {"mask_documents": True}, torch.float32),
        (1, 100, {"rope": True}, torch.float32),
        (1, 100, {}, torch.bfloat16),
    ],
)
def test_where_it_would_not_pay_or_cannot_be_had_nothing_is_guessed(
    monkeypatch: pytest.MonkeyPatch, rows: int, new: int, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(drafting, "LARGE", 0)
    assert not drafting.pays(Decoder(model(**changes), rows=rows, dtype=dtype), rows, new)


def test_small_models_lie_in_the_cache() -> None:
    assert not drafting.pays(Decoder(model(), rows=1), 1, 1000)


@needs_thin
def test_wrong_guesses_are_thrown_away() -> None:
    gpt = model()
    decoder = Decoder(gpt, rows=1)
    cache, plain = (KVCache(SMALL, 1, 64, CPU, torch.float32) for _ in range(2))
    prompt = torch.zeros(1, 4, dtype=torch.long)
    drafter = Drafter(gpt, decoder, lambda logits, ahead: 0)  # always guesses id 0
    decoder.logits(prompt, cache), decoder.logits(prompt, plain)
    for step, last in enumerate([0, 0, 5, 0, 7, 8]):
        wanted = decoder.logits(torch.tensor([[last]]), plain)
        assert torch.equal(drafter.logits(last, 4 + step, cache, 50), wanted), step
