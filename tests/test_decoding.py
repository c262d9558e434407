"""The decoding twin: the same numbers, the model untouched, weights shared."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gptlab.config import GPTConfig
from gptlab.decoding import FEW, PackedLinear, can_pack, for_decoding
from gptlab.model import GPT

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=65)
CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="torch without oneDNN")


def model(bias: bool = True) -> GPT:
    made = GPT(GPTConfig.from_dict(SMALL.to_dict() | {"bias": bias})).eval().requires_grad_(False)
    for p in made.parameters():
        p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())), alpha=0.05)
    return made


@needs_packing
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("length", [1, 16, 64])
def test_the_twin_equals_the_model(bias: bool, length: int) -> None:
    gpt = model(bias)
    twin = for_decoding(gpt, rows=FEW, dtype=torch.float32)
    assert sum(isinstance(m, PackedLinear) for m in twin.modules()) == 4 * SMALL.n_layer + 1
    ids = torch.randint(0, 65, (FEW, length), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(twin(ids), gpt(ids), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(twin.logits(twin.hidden(ids)[:, -1]), gpt(ids)[:, -1], atol=1e-5, rtol=1e-5)


@needs_packing
def test_the_model_is_left_as_it_was_and_shares_its_weights() -> None:
    gpt = model()
    names = set(gpt.state_dict())
    twin = for_decoding(gpt, rows=8, dtype=torch.float32)
    assert set(gpt.state_dict()) == names and not any(isinstance(m, PackedLinear) for m in gpt.modules())
    assert twin.wte.weight is gpt.wte.weight
    assert twin.get_submodule("h.1.mlp.c_fc").plain.data_ptr() == gpt.get_submodule("h.1.mlp.c_fc").weight.data_ptr()  # type: ignore[operator]


def test_without_a_gain_it_is_the_model() -> None:
    gpt = model()
    assert for_decoding(gpt, rows=1, dtype=torch.float32) is gpt


@pytest.mark.parametrize("packs", [True, False])
def test_bfloat16_is_near_and_a_copy(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if packs and not can_pack(CPU, torch.bfloat16):
        pytest.skip("no bfloat16 instructions")
    monkeypatch.setattr("gptlab.decoding.can_pack", lambda device, dtype: packs)
    gpt, ids = model(), torch.arange(32).view(2, 16)
    twin = for_decoding(gpt, rows=2, dtype=torch.bfloat16)
    assert any(isinstance(m, nn.Linear) for m in twin.modules()) is not packs
    assert {p.dtype for p in gpt.parameters()} == {torch.float32}
    ours, theirs = twin(ids), gpt(ids)
    assert ours.dtype == torch.bfloat16
    assert (ours - theirs).abs().max() < 0.03 * theirs.abs().max()
