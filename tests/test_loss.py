"""The loss in chunks is the plain one: its value and every gradient; and the logits never exist as a whole."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptlab import counts
from gptlab.config import GPTConfig
from gptlab.loss import head_loss
from gptlab.model import GPT

CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=24, vocab_size=65)


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 65, (3, 24), generator=torch.Generator().manual_seed(0))
    targets = ids.roll(-1, 1)
    targets[0, :7] = -100
    targets[2, 5] = -100
    return ids, targets


def plain(model: GPT, ids: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten(), reduction=reduction)


def close(found: Tensor, wanted: Tensor, share: float) -> None:
    assert (found - wanted).abs().max() <= share * wanted.abs().max()


@pytest.mark.parametrize("rows", [1, 5, 16, 72, None])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("switches", [{}, {"tie_head": False}, {"logit_softcap": 5.0}], ids=["tied", "untied", "cap"])
def test_loss_and_gradients_are_the_plain_ones(
    switches: dict[str, Any], reduction: str, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rows:
        monkeypatch.setattr(counts, "LOGIT_BYTES", rows * 4 * 128)
    model = GPT(GPTConfig(**CONFIG.to_dict() | switches), seed=1)
    torch.nn.init.normal_(model.head, std=0.5)  # rows past the vocabulary as well: they must not matter
    ids, targets = batch()
    loss = plain(model, ids, targets, reduction)
    wanted = torch.autograd.grad(3 * loss, list(model.parameters()))
    found = model(ids, targets, reduction=reduction)
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    (3 * found).backward()
    for (name, parameter), gradient in zip(model.named_parameters(), wanted, strict=True):
        assert parameter.grad is not None, name
        close(parameter.grad, gradient, 2e-6)
    assert not model.head.grad[65:].any()  # type: ignore[index]


@pytest.mark.parametrize("rows", [5, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_rounds_as_the_plain_loss_does(
    dtype: torch.dtype, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rows:
        monkeypatch.setattr(counts, "LOGIT_BYTES", rows * 4 * 128)
    model = GPT(CONFIG, seed=1)
    ids, targets = batch()
    wanted = torch.autograd.grad(plain(model, ids, targets, "sum"), list(model.parameters()))
    with torch.autocast("cpu", dtype=dtype):
        loss, exact = model(ids, targets, reduction="sum"), plain(model, ids, targets, "sum")
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)  # the same logits
    loss.backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
        close(parameter.grad, gradient, 0.03)  # of float32's; bfloat16 has 8 bits


def test_float16_keeps_the_small_probabilities_of_a_large_vocabulary() -> None:
    hidden = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    head = torch.zeros(50304, 32, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        head_loss(hidden, head, torch.zeros(64, dtype=torch.long), vocab_size=50257, reduction="sum").backward()
    assert head.grad is not None
    close(head.grad[1], hidden.detach().sum(0) / 50257, 0.01)


def test_what_needs_no_gradient_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "LOGIT_BYTES", 5 * 4 * 128)
    ids, targets = batch()
    model = GPT(CONFIG, seed=1)
    with torch.no_grad():
        assert not model(ids, targets).requires_grad
    model.wte.requires_grad_(False)
    model(ids, targets).backward()
    assert model.wte.weight.grad is None
    assert model.ln_f.weight.grad is not None
    with pytest.raises(RuntimeError, match="once"):
        loss = model(ids, targets)
        loss.backward(retain_graph=True)
        loss.backward()


def test_without_a_target_the_mean_is_torchs_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "LOGIT_BYTES", 5 * 4 * 128)
    ids, targets = batch()
    assert GPT(CONFIG)(ids, torch.full_like(targets, -100)).isnan()
    assert GPT(CONFIG)(ids, torch.full_like(targets, -100), reduction="sum") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can reset the peak of resident memory")
def test_the_logits_of_a_large_vocabulary_never_exist() -> None:
    code = """
import torch
from gptlab.config import GPTConfig
from gptlab.memory import peak_bytes, reset_peak
from gptlab.model import GPT
model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=1024, vocab_size=50257))
ids = torch.randint(0, 50257, (2, 1024))
model(ids[:, :8], ids[:, :8]).backward()
reset_peak("cpu")
before = peak_bytes("cpu")
model(ids, ids).backward()
print(peak_bytes("cpu") - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 0.6 * 4 * 2 * 1024 * 50304  # plain: more than three times as much
