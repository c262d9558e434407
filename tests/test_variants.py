"""What came after GPT-2, each switch against the formula of its paper written out here, and against transformers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gptlab.config import ConfigError, GPTConfig, TrainConfig
from gptlab.grid import cells
from gptlab.kvcache import KVCache
from gptlab.model import GPT

BASE = GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=24, vocab_size=65)
SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rope": {"rope": True},
    "rmsnorm": {"rmsnorm": True},
    "qk_norm": {"qk_norm": True},
    "swiglu": {"mlp": "swiglu"},
    "relu2": {"mlp": "relu2"},
    "grouped": {"n_kv_head": 2},
    "one_kv_head": {"n_kv_head": 1},
    "untied": {"tie_head": False},
    "softcap": {"logit_softcap": 0.5},
    "window": {"sliding_window": 5},
    "documents": {"mask_documents": True},
    "all": {
        "rope": True, "rmsnorm": True, "qk_norm": True, "mlp": "swiglu", "n_kv_head": 2, "tie_head": False,
        "logit_softcap": 0.5, "sliding_window": 5, "mask_documents": True, "bias": False,
    },
}  # fmt: skip


def config(name: str, **changes: Any) -> GPTConfig:
    return GPTConfig.from_dict(BASE.to_dict() | SWITCHES[name] | changes)


def scattered(name: str, **changes: Any) -> GPT:
    """A model whose every parameter differs from what it would do without, in eval mode."""
    model = GPT(config(name, **changes)).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p + torch.randn(p.shape, generator=generator) * 0.1)
    return model


def text(rows: int = 2, length: int = 24) -> Tensor:
    ids = torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(3))
    for row in range(rows):
        ids[row, 4 + row :: 9] = 64  # end-of-text
    return ids


def layer_norm(x: Tensor, w: dict[str, Tensor], name: str, c: GPTConfig) -> Tensor:
    """Ba et al. 2016, eq. 4; Zhang & Sennrich 2019, eq. 4."""
    gain = w[f"{name}.weight"]
    if c.rmsnorm:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain
    x = x - x.mean(-1, keepdim=True)
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain + w.get(f"{name}.bias", torch.zeros(()))


def turned(x: Tensor, position: int) -> Tensor:
    """Su et al. 2021, eq. 14: each pair of features as a complex number, times exp(i m theta). x: (D,)."""
    half = len(x) // 2
    angles = [position / 10_000 ** (2 * i / len(x)) for i in range(half)]
    pairs = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half), torch.tensor(angles))
    return torch.cat((pairs.real, pairs.imag))


def reference(model: GPT, ids: Tensor) -> Tensor:
    """The logits of one row (T,) -> (T, V), a position and a head at a time."""
    c = model.config
    w = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    D, T, G = c.head_dim, len(ids), c.n_kv_head or c.n_head

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(()))

    x = w["wte.weight"][ids]
    if not c.rope:
        x = x + w["wpe.weight"][:T]
    for layer in range(c.n_layer):
        name = f"h.{layer}"
        qkv = linear(layer_norm(x, w, f"{name}.ln_1", c), f"{name}.attn.c_attn")  # (T, (H + 2 G) D)
        heads = [qkv[:, i * D : (i + 1) * D] for i in range(c.n_head + 2 * G)]  # each (T, D)
        q, k, v = heads[: c.n_head], heads[c.n_head : c.n_head + G], heads[c.n_head + G :]
        if c.qk_norm:  # RMSNorm of each head, with one gain for all heads
            for group, kind in ((q, "q_norm"), (k, "k_norm")):
                for i, part in enumerate(group):
                    norm = (part.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
                    group[i] = part / norm * w[f"{name}.attn.{kind}.weight"]
        if c.rope:
            q = [torch.stack([turned(head[t], t) for t in range(T)]) for head in q]
            k = [torch.stack([turned(head[t], t) for t in range(T)]) for head in k]
        mixed = torch.zeros(T, c.n_embd)
        for t in range(T):
            first = max(0, t + 1 - c.sliding_window) if c.sliding_window else 0
            if c.mask_documents:
                first = max([first, *(j for j in range(t + 1) if ids[j] == c.vocab_size - 1)])
            for h in range(c.n_head):
                g = h * G // c.n_head  # Ainslie et al. 2023: neighbouring heads share
                weights = torch.softmax(k[g][first : t + 1] @ q[h][t] / math.sqrt(D), 0)
                mixed[t, h * D : (h + 1) * D] = weights @ v[g][first : t + 1]
        x = x + linear(mixed, f"{name}.attn.c_proj")
        y = linear(layer_norm(x, w, f"{name}.ln_2", c), f"{name}.mlp.c_fc")
        if c.mlp == "swiglu":  # Shazeer 2020, eq. 6: (Swish(x W) * x V) W2
            gate, value = y[:, : y.size(1) // 2], y[:, y.size(1) // 2 :]
            y = gate * torch.sigmoid(gate) * value
        elif c.mlp == "relu2":  # So et al. 2021, section 3
            y = y.clamp(min=0) ** 2
        else:
            y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + linear(y, f"{name}.mlp.c_proj")
    x = layer_norm(x, w, "ln_f", c)
    logits = (x @ (w["wte.weight"] if c.tie_head else w["lm_head.weight"]).T)[:, : c.vocab_size]
    if c.logit_softcap:  # Gemma Team 2024, section 2
        logits = c.logit_softcap * torch.tanh(logits / c.logit_softcap)
    return logits


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_is_its_papers_formula(name: str) -> None:
    model, ids = scattered(name), text()
    with torch.inference_mode():
        for row in range(2):
            wanted = reference(model, ids[row])
            assert (model(ids)[row] - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("name", [name for name in SWITCHES if name != "plain"])
def test_every_switch_changes_something(name: str) -> None:
    plain, switched = GPT(BASE).eval(), GPT(config(name)).eval()
    shared = plain.state_dict()
    own = switched.state_dict()
    switched.load_state_dict(
        {n: shared[n] if n in shared and shared[n].shape == t.shape else t for n, t in own.items()}
    )
    if name == "untied":
        assert not torch.equal(switched.head, switched.wte.weight)
    assert not torch.allclose(plain(text()), switched(text()), atol=1e-4)


@pytest.mark.parametrize("name", SWITCHES)
def test_a_cache_gives_the_logits_of_the_whole(name: str) -> None:
    model = scattered(name)
    ids = text() if name not in ("documents", "all") else text() % 64  # with a cache a row is one document
    with torch.inference_mode():
        cache = KVCache(model.config, 2, 24, torch.device("cpu"), torch.float32)
        parts = [
            model(ids[:, a:b], cache=cache) for a, b in [(0, 7), (7, 8), (8, 11), *((t, t + 1) for t in range(11, 24))]
        ]
        whole = model(ids)
    assert cache.buffer.size(3) == (model.config.n_kv_head or 4)  # shared heads are kept once
    assert (torch.cat(parts, 1) - whole).abs().max() <= 1e-5 * whole.abs().max()


@pytest.mark.parametrize("name", SWITCHES)
def test_the_fast_kernel_gives_the_gradients_of_the_plain_one(name: str) -> None:
    fast = scattered(name).train()
    plain = GPT(fast.config, attention="math").train()
    plain.load_state_dict(fast.state_dict())
    ids = text()
    for model in (fast, plain):
        model(ids[:, :-1], ids[:, 1:]).backward()
    for (key, a), b in zip(fast.named_parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None, key  # every parameter takes part
        assert (a.grad - b.grad).abs().max() <= 1e-4 * b.grad.abs().max() + 1e-8, key


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_starts_as_the_table_says(name: str) -> None:
    model = GPT(config(name, n_embd=192, vocab_size=1000))
    for key, p in model.named_parameters():
        if key.endswith("bias"):
            assert not p.any(), key
        elif "ln_" in key or "_norm" in key:
            assert (p == 1).all(), key
        else:
            wanted = 0.02 / math.sqrt(4) if key.endswith("c_proj.weight") else 0.02
            assert p[:1000].std().item() == pytest.approx(wanted, rel=0.05), key
    assert not model.head[1000:].any() and not model.wte.weight[1000:].any()


@pytest.mark.parametrize("name", SWITCHES)
def test_an_untrained_model_knows_nothing_and_learns(name: str) -> None:
    model = GPT(config(name, **({"logit_softcap": 15.0} if config(name).logit_softcap else {})))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = text(8)
    losses = []
    for _ in range(12):
        loss = model(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(65), abs=0.15) and losses[-1] < losses[0] - 0.3


def test_no_switch_is_on_and_plain_gpt2_keeps_its_names() -> None:
    names = [name for name, _ in GPT(dataclasses.replace(BASE, n_layer=1)).named_parameters()]
    assert names == [
        "wte.weight", "wpe.weight", "h.0.ln_1.weight", "h.0.ln_1.bias",
        "h.0.attn.c_attn.weight", "h.0.attn.c_attn.bias",
        "h.0.attn.c_proj.weight", "h.0.attn.c_proj.bias", "h.0.ln_2.weight", "h.0.ln_2.bias", "h.0.mlp.c_fc.weight",
        "h.0.mlp.c_fc.bias", "h.0.mlp.c_proj.weight", "h.0.mlp.c_proj.bias", "ln_f.weight", "ln_f.bias",
    ]  # fmt: skip


@torch.inference_mode()
def test_rotary_scores_depend_on_distance_alone() -> None:
    """Su et al. 2021, eq. 1, and so a window may stand anywhere."""
    model = scattered("rope", block_size=64)
    shifted = KVCache(model.config, 2, 24, torch.device("cpu"), torch.float32)
    shifted.positions = lambda T: torch.arange(30 + shifted.used, 30 + shifted.used + T)  # type: ignore[method-assign]
    assert torch.allclose(model(text()), model(text(), cache=shifted), atol=1e-5)


@torch.inference_mode()
def test_rows_may_stand_at_places_of_their_own() -> None:
    """positions (B, T): what a cache of padded prompts gives."""
    model = scattered("rope", block_size=64)
    cache = KVCache(model.config, 2, 24, torch.device("cpu"), torch.float32)
    cache.positions = lambda T: torch.stack([torch.arange(T), torch.arange(T) + 9])  # type: ignore[method-assign]
    assert torch.allclose(model(text(), cache=cache), model(text()), atol=1e-5)


def test_logits_stay_under_the_cap() -> None:
    model = scattered("softcap")
    with torch.no_grad():
        model.wte.weight.mul_(100)
    assert 0.49 < model(text()).abs().max() <= 0.5


def test_no_token_sees_another_document_or_past_its_window() -> None:
    for name, first_seen in (("documents", 13), ("window", 20 - 2 * 4)):  # two layers reach back twice as far
        model, ids = scattered(name), text()
        other = ids.clone()
        other[0, :first_seen] = (other[0, :first_seen] + 1) % 64
        if name == "documents":
            assert ids[0, 13] == 64
        assert torch.equal(model(ids)[0, 20], model(other)[0, 20]), name
        other[0, first_seen + 1] = (other[0, first_seen + 1] + 1) % 64
        assert not torch.equal(model(ids)[0, 20], model(other)[0, 20]), name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_kv_head": 3}, "n_kv_head 3 cannot be shared evenly by n_head 4: choose one of 1, 2, 4"),
        ({"n_kv_head": 8}, "n_kv_head 8 cannot be shared"),
        ({"rope": True, "n_embd": 12}, "rope turns pairs.*leaves a head 3"),
        ({"mlp": "swiglue"}, "did you mean 'swiglu'"),
        ({"sliding_window": -1}, "sliding_window -1 is out of range"),
        ({"logit_softcap": -1.0}, "logit_softcap -1"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        GPTConfig.from_dict(BASE.to_dict() | changes)


def test_a_sweep_can_vary_every_switch() -> None:
    base = TrainConfig(n_layer=1, n_head=4, n_embd=32, tokenizer="byte")
    grid: dict[str, list[Any]] = {"mlp": ["gelu", "swiglu", "relu2"], "rope": [False, True], "n_kv_head": [0, 1, 3]}
    found = cells(base, grid)
    assert len(found) == 18 and len({cell.name for cell in found}) == 18
    assert [cell.values["n_kv_head"] for cell in found if cell.config is None] == [3] * 6


def test_llama_and_qwen3_are_settings_of_it() -> None:
    """Rotary positions, RMSNorm, SwiGLU, grouped heads and an untied head are Llama; with norms of q and k, Qwen3."""
    transformers = pytest.importorskip("transformers", reason="transformers is a dependency of the tests alone")
    for qk_norm in (False, True):
        shape = config("all", sliding_window=0, logit_softcap=0.0, mask_documents=False, qk_norm=qk_norm)
        kind = "Qwen3" if qk_norm else "Llama"
        more = {"head_dim": shape.head_dim, "attention_bias": False} if qk_norm else {}
        other = getattr(transformers, f"{kind}ForCausalLM")(
            getattr(transformers, f"{kind}Config")(
                hidden_size=32, intermediate_size=shape.mlp_width, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, vocab_size=65, max_position_embeddings=24, rms_norm_eps=1e-5,
                tie_word_embeddings=False, pad_token_id=None, bos_token_id=None, eos_token_id=None, **more,
            )
        ).eval()  # fmt: skip
        model = GPT(shape).eval()
        ours = dict(model.named_parameters())
        state = {f"model.{n}" if not n.startswith("lm_head") else n: t for n, t in _as_llama(ours, 2).items()}
        missing, unexpected = other.load_state_dict({n: t.detach() for n, t in state.items()}, strict=False)
        assert not missing and not unexpected
        assert (other(text()).logits - model(text())).abs().max() <= 1e-5


def _as_llama(ours: dict[str, Any], layers: int) -> dict[str, Tensor]:
    """Our parameters under Llama's names."""
    named = {"embed_tokens.weight": ours["wte.weight"][:65], "norm.weight": ours["ln_f.weight"]}
    named["lm_head.weight"] = ours["lm_head.weight"][:65]
    for layer in range(layers):
        a, b = f"h.{layer}", f"layers.{layer}"
        q, k, v = ours[f"{a}.attn.c_attn.weight"].split([32, 16, 16])
        gate, up = ours[f"{a}.mlp.c_fc.weight"].chunk(2)
        named |= {f"{b}.self_attn.{n}_proj.weight": t for n, t in (("q", q), ("k", k), ("v", v))}
        named |= {f"{b}.mlp.gate_proj.weight": gate, f"{b}.mlp.up_proj.weight": up}
        named[f"{b}.self_attn.o_proj.weight"] = ours[f"{a}.attn.c_proj.weight"]
        named[f"{b}.mlp.down_proj.weight"] = ours[f"{a}.mlp.c_proj.weight"]
        named[f"{b}.input_layernorm.weight"] = ours[f"{a}.ln_1.weight"]
        named[f"{b}.post_attention_layernorm.weight"] = ours[f"{a}.ln_2.weight"]
        for kind in ("q_norm", "k_norm"):
            if f"{a}.attn.{kind}.weight" in ours:
                named[f"{b}.self_attn.{kind}.weight"] = ours[f"{a}.attn.{kind}.weight"]
    return named
