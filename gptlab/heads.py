"""Classification of sequences with a GPT: one linear score on its last token, as GPT2ForSequenceClassification has it.

    >>> import torch
    >>> from gptlab.presets import preset
    >>> from gptlab.heads import SequenceClassifier
    >>> model = SequenceClassifier(preset("tiny"), num_labels=2, pad_id=0)
    >>> model(torch.tensor([[5, 6, 0, 0], [7, 8, 9, 4]])).shape
    torch.Size([2, 2])

A row's last token that isn't padding has seen the whole row; padding stands on the right, where causality hides it.
Left out on purpose: the network (`model.py`) and the head that models language, which is the network's own.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlab import weights
from gptlab.attention import Attention
from gptlab.config import ConfigError, GPTConfig
from gptlab.given import read_object
from gptlab.model import GPT


@dataclass(frozen=True)
class Labels:
    """What a classifier's shape has besides the GPT's."""

    count: int
    """Labels K."""
    pad_id: int | None
    """The id that fills rows up on the right."""


def initial_score(config: GPTConfig, num_labels: int, seed: int) -> Tensor:
    """A score's first weights, (K, C): normal, deviation 0.02, as in transformers; drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(num_labels, config.n_embd).normal_(0.0, 0.02, generator=generator)


def tally(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """What a model makes of sequences: (1,) their summed loss, in nats; of a classifier (2,), and how many it classes
    rightly. Targets of -100 are left out.

    Args:
        targets: (B, T) int64 for a model of language, (B,) labels for a classifier.
    """
    if targets.dim() == 2:
        loss: Tensor = model(ids, targets, reduction="sum")
        return loss[None]
    return tally_scores(model(ids), targets)


def tally_scores(scores: Tensor, labels: Tensor) -> Tensor:
    """The same (2,) from a classifier's scores (B, K)."""
    loss = F.cross_entropy(scores.float(), labels, reduction="sum")
    return torch.stack([loss, (scores.argmax(1) == labels).sum().to(loss.dtype)])


def last_position(ids: Tensor, pad_id: int | None) -> Tensor:
    """Where the last token of each row stands that isn't padding: (B, T) int64 -> (B,) int64. As in transformers, other
    places with the padding's id count as text, and a row without any text is read at its beginning."""
    if pad_id is None:
        return torch.full((ids.size(0),), ids.size(1) - 1, device=ids.device)
    return (torch.arange(ids.size(1), device=ids.device) * (ids != pad_id)).argmax(1)


class SequenceClassifier(nn.Module):
    """A GPT with a score for each label.

    Args:
        config: shape of the GPT.
        num_labels: labels K; with one, the score is a regression's value.
        pad_id: the id that fills rows up on the right; None where rows have no padding.
        seed: decides the initial weights.
    """

    def __init__(
        self, config: GPTConfig, num_labels: int, *, pad_id: int | None, attention: Attention = "sdpa", seed: int = 0
    ) -> None:
        super().__init__()
        # A language model's head of its own would have no use here.
        self.transformer = GPT(dataclasses.replace(config.shape(), tie_head=True), attention=attention, seed=seed)
        self.pad_id, self.num_labels = pad_id, num_labels
        self.score = nn.Linear(config.n_embd, num_labels, bias=False)
        if self.score.weight.device.type != "meta":
            with torch.no_grad():
                self.score.weight.copy_(initial_score(config, num_labels, seed))

    def forward(
        self, ids: Tensor, labels: Tensor | None = None, *, reduction: str = "mean", dropout_seed: int | None = None
    ) -> Tensor:
        """Scores, or the loss where labels are given.

        Args:
            ids: (B, T) int64.
            labels: (B,) int64, for cross-entropy; (B, K) floating point, where several labels may hold at once, for
                binary cross-entropy; or, with one label, (B,) floating point, for the squared error.
            reduction: `mean` over the sequences, or their `sum`.
            dropout_seed: with it, dropout depends on nothing else.

        Returns:
            (B, K) scores; or a scalar loss, in float32.
        """
        hidden = self.transformer.hidden(ids, dropout_seed=dropout_seed)  # (B, T, C)
        last = last_position(ids, self.pad_id)  # (B,)
        scores = self.score(hidden[torch.arange(ids.size(0), device=ids.device), last])  # (B, K)
        if labels is None:
            return scores
        if self.num_labels == 1:
            return F.mse_loss(scores.float().squeeze(1), labels.float(), reduction=reduction)
        if labels.is_floating_point():
            return F.binary_cross_entropy_with_logits(scores.float(), labels.float(), reduction=reduction)
        return F.cross_entropy(scores.float(), labels, reduction=reduction)

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike[str], *, dropout: float = 0.0, attention: Attention = "sdpa"
    ) -> Self:
        """A classifier from a folder as transformers saves it; float32, in eval mode.

        Raises:
            ConfigError: files that hold something else, and what.
        """
        config, tensors = weights.read(path, dropout=dropout, also=("score.weight",))
        score = tensors.pop("score.weight", None)
        if score is None or score.dim() != 2 or score.size(1) != config.n_embd:
            found = "no score.weight" if score is None else f"a score.weight of shape {tuple(score.shape)}"
            raise ConfigError(f"{path} has {found}, where (labels, {config.n_embd}) is needed: choose a classifier.")
        pad_id = read_object(Path(path).expanduser() / "config.json", weights.CONFIG).get("pad_token_id")
        if not (pad_id is None or type(pad_id) is int):
            raise ConfigError(f"{path}/config.json has pad_token_id {pad_id!r}: give a whole number or null.")
        with torch.device("meta"):
            model = cls(config, score.size(0), pad_id=pad_id, attention=attention)
        tensors.pop("lm_head.weight", None)
        model.transformer.load_state_dict(tensors, assign=True)
        model.score.load_state_dict({"weight": score}, assign=True)
        return model.requires_grad_().eval()

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """Writes config.json and model.safetensors as transformers' GPT2ForSequenceClassification reads them."""
        labels = [f"LABEL_{label}" for label in range(self.num_labels)]
        settings = {
            "architectures": ["GPT2ForSequenceClassification"], "pad_token_id": self.pad_id,
            "id2label": {str(label): name for label, name in enumerate(labels)},
            "label2id": {name: label for label, name in enumerate(labels)},
        }  # fmt: skip
        tensors = self.transformer.state_dict()
        weights.write(
            path, self.transformer.config, tensors, also={"score.weight": self.score.weight}, settings=settings
        )
