"""From a config and a split of its data to the model that it asks for, the weights it begins with, and its batches.

    >>> from gptlab.presets import preset
    >>> from gptlab.making import make_model
    >>> make_model(preset("tiny"), None).config.n_layer
    2

Left out on purpose: how a model is spread over processes (`parallel/`), and what steps with it (`assembly.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gptlab import huggingface
from gptlab.attention import Attention
from gptlab.batches import Batches, Feed, Tokens
from gptlab.config import TrainConfig
from gptlab.counts import shapes
from gptlab.documents import DocumentBatches, Documents
from gptlab.heads import Labels, SequenceClassifier, initial_score
from gptlab.model import GPT, initial_weights
from gptlab.weights import TRANSPOSED, cropped


def labels_of(data: Tokens | Documents) -> Labels | None:
    """What a classifier of these documents has; None of plain text."""
    return Labels(len(data.names), data.pad) if isinstance(data, Documents) else None


def make_model(config: TrainConfig, labels: Labels | None, attention: Attention = "sdpa") -> nn.Module:
    """The whole model that a config asks for, with the weights that its seed decides: a GPT or a classifier, of ours
    or of Hugging Face's."""
    if config.model == "huggingface":
        return huggingface.make(config, labels, seed=config.seed, attention=attention)
    if labels is not None:
        return SequenceClassifier(config, labels.count, pad_id=labels.pad_id, attention=attention, seed=config.seed)
    return GPT(config, attention=attention, seed=config.seed)


def adapt(config: TrainConfig, labels: Labels | None, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of `make_model`'s model that begins with those of a GPT; a classifier's score begins anew."""
    if labels is not None:
        weights.pop("lm_head.weight", None)  # of weights whose head is not tied
    score = {} if labels is None else {"score.weight": initial_score(config, labels.count, config.seed)}
    if config.model == "huggingface":
        return dict(huggingface.publish(name, value, config) for name, value in weights.items()) | score
    return {f"transformer.{name}" if score else name: value for name, value in weights.items()} | score


def first_weights(config: TrainConfig, labels: Labels | None) -> Iterator[tuple[str, Tensor]]:
    """The weights that our model begins with, one after the other, by name: who holds a part never needs the whole."""
    for name, value in initial_weights(config.shape(), config.seed):
        if labels is None:
            yield name, value
        elif name != "lm_head.weight":
            yield f"transformer.{name}", value
    if labels is not None:
        yield "score.weight", initial_score(config, labels.count, config.seed)


def whole_shapes(config: TrainConfig, labels: Labels | None) -> dict[str, torch.Size]:
    """Shapes of the parameters of `make_model`'s model, by name, without making it."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes(config).items():
        if config.model == "huggingface":
            shape = cropped(name, shape, config)
            found[f"transformer.{name}"] = shape[::-1] if name.endswith(TRANSPOSED) else shape
        elif labels is None:
            found[name] = shape
        elif name != "lm_head.weight":
            found[f"transformer.{name}"] = shape
    if labels is not None:
        found["score.weight"] = (labels.count, config.n_embd)
    return {name: torch.Size(shape) for name, shape in found.items()}


def make_batches(config: TrainConfig, data: Tokens | Documents) -> Feed:
    """The global batches of a run on a split."""
    values: dict[str, Any] = {
        "block_size": config.block_size, "global_batch_size": config.global_batch_size, "order": config.data_order,
        "seed": config.seed,
    }  # fmt: skip
    return DocumentBatches(data, **values) if isinstance(data, Documents) else Batches(data, **values)
