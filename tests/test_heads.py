"""Sequence classification equals transformers', both ways: scores, losses, gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptlab.config import ConfigError, GPTConfig
from gptlab.heads import SequenceClassifier
from gptlab.model import GPT
from gptlab.presets import preset

transformers = pytest.importorskip("transformers", reason="transformers is a dependency of the tests alone")

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=65)
PAD = 64


def theirs(config: GPTConfig, labels: int) -> Any:
    values: dict[str, Any] = {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd}
    values["num_labels"] = labels
    values |= {"n_positions": config.block_size, "vocab_size": config.vocab_size, "pad_token_id": PAD}
    values |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | {"bos_token_id": 0, "eos_token_id": PAD}
    model = transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**values)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.05)
    return model


def text() -> Tensor:
    """Rows of different lengths; the last holds the padding's id inside as well, which is no padding there."""
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(3))
    ids[0, 5:], ids[1, 1:], ids[3, 4] = PAD, PAD, PAD
    return ids


@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl"])
def test_scores_equal_transformers_both_ways(name: str, tmp_path: Path) -> None:
    whole = preset(name)
    config = GPTConfig(n_layer=2, n_head=whole.n_head, n_embd=whole.n_embd, block_size=64, vocab_size=65)
    other = theirs(config, 3)
    other.save_pretrained(tmp_path / "theirs")
    model = SequenceClassifier.from_pretrained(tmp_path / "theirs")
    assert (model.num_labels, model.pad_id) == (3, PAD)
    with torch.inference_mode():
        assert (model(text()) - other(text()).logits).abs().max() <= 2e-4
        model.save_pretrained(tmp_path / "ours")
        back = transformers.GPT2ForSequenceClassification.from_pretrained(tmp_path / "ours").eval()
        assert (back.config.num_labels, back.config.pad_token_id) == (3, PAD)
        assert torch.equal(back(text()).logits, other(text()).logits)


@pytest.mark.parametrize(
    ("count", "labels"),
    [
        (3, torch.tensor([0, 2, 1, 1])),
        (1, torch.tensor([0.5, -1.0, 2.0, 0.0])),
        (3, torch.tensor([[0.0, 1, 1], [0, 0, 0], [1, 0, 1], [1, 1, 1]])),
    ],
)
def test_loss_and_every_gradient_equal_transformers(count: int, labels: Tensor, tmp_path: Path) -> None:
    other = theirs(SMALL, count)
    other.save_pretrained(tmp_path)
    model = SequenceClassifier.from_pretrained(tmp_path)
    wanted = other(text(), labels=labels).loss
    wanted.backward()
    loss = model(text(), labels)
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    gradients = {name: p.grad for name, p in other.named_parameters()}
    for name, p in model.named_parameters():
        expected = gradients.pop(name)
        expected = expected.t() if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else expected
        assert p.grad is not None
        assert (p.grad[: len(expected)] - expected).abs().max() <= 1e-4 * expected.abs().max() + 1e-9, name
    assert not gradients


def test_padding_changes_nothing() -> None:
    model = SequenceClassifier(SMALL, 2, pad_id=PAD, seed=1).eval()
    row = torch.tensor([[5, 6, 7]])
    padded = torch.tensor([[5, 6, 7, PAD, PAD]])
    assert torch.allclose(model(row), model(padded), atol=1e-6)
    assert not torch.allclose(model(row), SequenceClassifier(SMALL, 2, pad_id=None, seed=1).eval()(padded), atol=1e-3)


def test_a_language_models_file_is_refused(tmp_path: Path) -> None:
    GPT(SMALL).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has no score.weight, where \(labels, 32\) is needed"):
        SequenceClassifier.from_pretrained(tmp_path)
    SequenceClassifier(SMALL, 2, pad_id=PAD).save_pretrained(tmp_path)
    GPT.from_pretrained(tmp_path)  # the network of a classifier is one that can go on as a language model


def test_switches_work_under_the_head_and_come_back(tmp_path: Path) -> None:
    shape = GPTConfig.from_dict(SMALL.to_dict() | {"rope": True, "tie_head": False, "n_kv_head": 1})
    model = SequenceClassifier(shape, 2, pad_id=PAD).eval()
    assert model.transformer.lm_head is None
    model.save_pretrained(tmp_path)
    assert torch.equal(SequenceClassifier.from_pretrained(tmp_path)(text()), model(text()))
