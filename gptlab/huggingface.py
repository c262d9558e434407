"""Hugging Face's own GPT-2 as a model that trains here: its modules, begun with our weights, called as ours is.

    >>> from gptlab.presets import preset
    >>> from gptlab.huggingface import make
    >>> make(preset("tiny"), None, seed=0).transformer.h[0].__class__.__module__    # doctest: +SKIP
    'transformers.models.gpt2.modeling_gpt2'

`GPT2LMHeadModel` and `GPT2ForSequenceClassification` of transformers keep their submodules, under their names, and are
called without a cache of keys, which training has no use for and torch.export cannot trace. Two things are ours: the
loss, as a sum over micro-batches, and where a classifier reads. That is found from the ids before anything else: the
published head finds it at the end, where a pipeline's last stage has no ids, and by a loop over rows.

transformers is an optional dependency, imported when a model is made. Left out on purpose: other architectures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlab.config import GPTConfig
from gptlab.counts import shapes
from gptlab.heads import Labels, initial_score, last_position
from gptlab.model import initial_weights
from gptlab.weights import TRANSPOSED, cropped


class Published(nn.Module):
    """transformers' GPT-2 with our calling convention. Parameters have its names; a tied head is `transformer.wte`.

    Args:
        module: GPT2LMHeadModel or GPT2ForSequenceClassification.
        pad_id: the id that fills a classifier's rows up on the right.
    """

    def __init__(self, module: nn.Module, pad_id: int | None) -> None:
        super().__init__()
        self.pad_id, self.classifies = pad_id, hasattr(module, "score")
        self.transformer: nn.Module = module.get_submodule("transformer")
        head = "score" if self.classifies else "lm_head"
        self.add_module(head, module.get_submodule(head))
        self.register_state_dict_post_hook(_leave_tied_head)
        self.register_load_state_dict_pre_hook(_give_tied_head)

    def forward(
        self, ids: Tensor, targets: Tensor | None = None, *, reduction: str = "mean", dropout_seed: int | None = None
    ) -> Tensor:
        """Logits (B, T, V) or a classifier's scores (B, K); or the loss where targets are given, in float32.

        Args:
            ids: (B, T) int64.
            targets: (B, T) int64, or (B,) labels; -100 is left out.
            reduction: `mean` or `sum`.
            dropout_seed: with it, dropout depends on nothing else.
        """
        if dropout_seed is not None:
            torch.manual_seed(dropout_seed)
        if self.classifies:
            last = last_position(ids, self.pad_id)  # (B,)
            hidden = self.transformer(ids, use_cache=False).last_hidden_state  # (B, T, C)
            out = self.get_submodule("score")(hidden[torch.arange(ids.size(0), device=ids.device), last])  # (B, K)
        else:
            hidden = self.transformer(ids, use_cache=False).last_hidden_state
            out = self.get_submodule("lm_head")(hidden)  # (B, T, V)
        return out if targets is None else loss(out, targets, reduction)


def loss(out: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Cross-entropy of logits (B, T, V) or scores (B, K), in float32."""
    return F.cross_entropy(out.flatten(0, -2).float(), targets.flatten(), reduction=reduction)


def is_tied(module: nn.Module) -> bool:
    """Whether a model has a head that is its embedding."""
    head = getattr(module, "lm_head", None)
    return head is not None and head.weight is module.get_parameter("transformer.wte.weight")


def _leave_tied_head(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A tied head's weights stand in a state once, as the embedding."""
    if is_tied(module):
        del state[f"{prefix}lm_head.weight"]


def _give_tied_head(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    if is_tied(module):
        state[f"{prefix}lm_head.weight"] = state[f"{prefix}transformer.wte.weight"]


def make(config: GPTConfig, labels: Labels | None, *, seed: int, attention: str = "sdpa") -> Published:
    """transformers' GPT2LMHeadModel, or with labels GPT2ForSequenceClassification, with the weights that ours begins
    with.

    Args:
        attention: `sdpa`, or `math` for scores that are written out.
    """
    import transformers

    values: dict[str, Any] = {
        "n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd, "n_positions": config.block_size,
        "vocab_size": config.vocab_size, "bos_token_id": None, "eos_token_id": None, "use_cache": False,
        "attn_implementation": "eager" if attention == "math" else "sdpa",
    } | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)  # fmt: skip
    if labels is None:
        model = Published(transformers.GPT2LMHeadModel(transformers.GPT2Config(**values)), None)
    else:
        # The padding's id is for their own pooling; with it their model warns of padding.
        values |= {"num_labels": labels.count}
        module = transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**values))
        model = Published(module, labels.pad_id)
    model.load_state_dict(dict(begin(config, labels, seed)))
    return model.train()


def begin(config: GPTConfig, labels: Labels | None, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Our initial weights under the published names."""
    for name, value in initial_weights(config, seed):
        yield publish(name, value, config)
    if labels is not None:
        yield "score.weight", initial_score(config, labels.count, seed)


def publish(name: str, value: Tensor, config: GPTConfig) -> tuple[str, Tensor]:
    """A weight of `GPT(config)`, by its published name and in the published layout."""
    value = value[: cropped(name, tuple(value.shape), config)[0]]
    return f"transformer.{name}", value.t().contiguous() if name.endswith(TRANSPOSED) else value


def ours(tensors: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """The weights of a `Published` model as our GPT has them, or with a score our classifier."""
    prefix = "transformer." if "score.weight" in tensors else ""
    found = {}
    for name, shape in shapes(config).items():
        value = tensors[f"transformer.{name}"]
        value = value.t().contiguous() if name.endswith(TRANSPOSED) else value
        missing = shape[0] - value.size(0)
        found[prefix + name] = torch.cat([value, value.new_zeros(missing, *shape[1:])]) if missing else value
    return found | {name: value for name, value in tensors.items() if name == "score.weight"}
