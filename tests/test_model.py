"""The GPT: published sizes, start, causality, and each fast path against its plain twin."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from gptlab.config import ConfigError, GPTConfig, TrainConfig
from gptlab.kvcache import KVCache
from gptlab.model import GPT, MLP
from gptlab.presets import PRESETS, preset

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=65)
PUBLISHED = {"gpt2": 124439808, "gpt2-medium": 354823168, "gpt2-large": 774030080, "gpt2-xl": 1557611200}


def ids(rows: int = 2, length: int = 16, vocabulary: int = 65) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_with_its_published_parameters(name: str) -> None:
    config = preset(name)
    with torch.device("meta"):
        model = GPT(config)
    count = sum(p.numel() for p in model.parameters())
    padding = (config.padded_vocab_size - config.vocab_size) * config.n_embd
    assert count - padding == PUBLISHED.get(name, count - padding)
    assert model(torch.zeros(1, 4, dtype=torch.long, device="meta")).shape == (1, 4, config.vocab_size)


def test_initial_weights_are_those_of_the_table() -> None:
    config = GPTConfig(n_layer=8, n_head=4, n_embd=256, block_size=64, vocab_size=1000)
    model = GPT(config)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif "ln_" in name:
            assert (p == 1).all(), name
        else:
            wanted = 0.02 / math.sqrt(16) if name.endswith("c_proj.weight") else 0.02
            assert p[:1000].std().item() == pytest.approx(wanted, rel=0.03), name
    assert not model.wte.weight[1000:].any()


def test_the_seed_alone_decides_the_weights() -> None:
    one, same, other = GPT(SMALL, seed=1), GPT(SMALL, seed=1), GPT(SMALL, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.wte.weight, other.wte.weight)


def test_an_untrained_model_knows_nothing() -> None:
    loss = GPT(SMALL)(ids(), ids().flip(0, 1))  # a tied head favours the id it sees
    assert loss.item() == pytest.approx(math.log(65), abs=0.1)


def test_no_position_sees_the_future() -> None:
    model, text = GPT(SMALL).eval(), ids()
    other = text.clone()
    other[:, 9:] = (other[:, 9:] + 1) % 65
    assert torch.equal(model(text)[:, :9], model(other)[:, :9])
    assert not torch.equal(model(text)[:, 9:], model(other)[:, 9:])


def test_padding_rows_can_be_neither_predicted_nor_moved() -> None:
    model = GPT(SMALL)
    assert model(ids()).size(-1) == 65 and model.wte.weight.size(0) == 128
    model(ids(), ids()).backward()
    assert not model.wte.weight.grad[65:].any()  # type: ignore[index]


@pytest.mark.parametrize(
    "config", [SMALL, GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=16, vocab_size=65, bias=False)]
)
def test_fused_attention_equals_the_plain_twin(config: GPTConfig) -> None:
    fast, plain = GPT(config), GPT(config, attention="math")
    text = ids()
    for model in (fast, plain):
        model(text[:, :-1], text[:, 1:]).backward()
    for (name, a), b in zip(fast.named_parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert (a.grad - b.grad).abs().max() <= 1e-5 * b.grad.abs().max() + 1e-8, name


def test_the_cache_equals_the_whole() -> None:
    model, text = GPT(SMALL).eval(), ids()
    with torch.inference_mode():
        cache = KVCache(SMALL, 2, 16, torch.device("cpu"), torch.float32)
        parts = [model(text[:, :5], cache=cache)] + [model(text[:, t : t + 1], cache=cache) for t in range(5, 16)]
        assert torch.allclose(torch.cat(parts, 1), model(text), atol=1e-5)


def test_dropout_depends_on_its_seed_alone_and_is_off_in_eval() -> None:
    config = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=65, dropout=0.2)
    model, text = GPT(config).train(), ids()
    first = model(text, text, dropout_seed=5)
    torch.rand(7)
    assert torch.equal(first, model(text, text, dropout_seed=5))
    assert not torch.equal(first, model(text, text, dropout_seed=6))
    model.eval()
    assert torch.equal(model(text, text), model(text, text))


def test_left_out_targets_do_not_count() -> None:
    model, text = GPT(SMALL), ids()
    targets = text.clone()
    targets[:, 4:] = -100
    logits = model(text)[:, :4]
    assert torch.allclose(model(text, targets), F.cross_entropy(logits.flatten(0, 1), text[:, :4].flatten()))
    assert torch.allclose(model(text, targets, reduction="sum") / 8, model(text, targets))


def test_gelu_is_the_tanh_approximation() -> None:
    mlp = MLP(SMALL)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)) * 30
    inner = mlp.c_fc(x)
    tanh = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
    assert torch.allclose(mlp(x), mlp.c_proj(tanh), atol=1e-5)


def test_an_unknown_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        GPT(TrainConfig(tokenizer="char"))
