"""GPT-2, exactly: the transformer of Radford et al. (2019), readable from top to bottom.

    >>> import torch
    >>> from gptlab.config import preset
    >>> from gptlab.model import GPT
    >>> model = GPT(preset("tiny"))
    >>> model(torch.zeros(1, 8, dtype=torch.long)).shape    # logits (B, T, V)
    torch.Size([1, 8, 257])

Pre-norm blocks, tanh GELU, learned positions, and a head tied to the token embedding. Modules bear the names of the
published checkpoint (`wte wpe h ln_f`, `c_attn c_proj c_fc`). Shape letters: B batch, T time, C = n_embd, H = n_head,
D = C / H, V vocabulary, L layers.

Two notable choices. The embedding has `padded_vocab_size` rows, a multiple of 64; logits are cropped to V, so an id
that no tokenizer knows can be neither predicted nor sampled. And dropout is drawn from a seed that the caller gives
(`dropout_seed`), a layer's own each, so that neither the number of processes nor what ran before changes it.

Left out on purpose: how a step is taken (`step.py`), how it is spread (`parallel/`), how text is sampled
(`sampling.py`).
"""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlab.config import ConfigError, GPTConfig
from gptlab.kvcache import KVCache

Attention = Literal["sdpa", "math"]


def causal_attention_math(q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Tensor | None = None) -> Tensor:
    """Causal attention, written out: the plain twin of torch's fused one.

    softmax(q k^T / sqrt(D) + mask) v, with a mask of -inf above the diagonal (Vaswani et al. 2017, eq. 1). The last
    query is the last key's, however many keys came before.

    Shapes: q (B, H, T, D), k and v (B, H, S, D) with S >= T; mask bool, broadcastable to (B, H, T, S), in causality's
    place; returns (B, H, T, D).
    """
    T, S = q.size(2), k.size(2)
    scores = q @ k.transpose(2, 3) / math.sqrt(q.size(3))  # (B, H, T, S)
    if mask is None:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)  # (T, S)
    weights = F.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
    return F.dropout(weights, dropout) @ v if dropout else weights @ v


def causal_attention_sdpa(q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Tensor | None = None) -> Tensor:
    """The same through torch's fused kernels. `is_causal` aligns the first query with the first key, so it serves only
    where both are as many; a single query sees every key and needs no mask."""
    T, S = q.size(2), k.size(2)
    if mask is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    if T != S and T != 1:
        return causal_attention_math(q, k, v, dropout)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=T == S and T > 1)


class SelfAttention(nn.Module):
    """Multi-head causal self-attention."""

    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        self.n_head, self.dropout, self.attention = config.n_head, config.dropout, attention
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, cache: KVCache | None, layer: int, mask: Tensor | None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)  # (B, T, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        if cache is not None:
            k, v = cache.extend(layer, k, v)  # each (B, H, S, D)
        attend = causal_attention_sdpa if self.attention == "sdpa" else causal_attention_math
        y = attend(q, k, v, self.dropout if self.training else 0.0, mask)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, C)
        return F.dropout(self.c_proj(y), self.dropout, self.training)


class MLP(nn.Module):
    """Two linear layers, four times as wide between, with the tanh approximation of GELU (Hendrycks & Gimpel 2016)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return F.dropout(x, self.dropout, self.training)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = SelfAttention(config, attention)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: KVCache | None, layer: int, mask: Tensor | None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.attn(self.ln_1(x), cache, layer, mask)
        return x + self.mlp(self.ln_2(x))


@torch.compiler.disable
def _seed_dropout(seed: int) -> None:
    torch.manual_seed(seed)


class GPT(nn.Module):
    """A GPT-2.

    Args:
        config: its shape; a TrainConfig will do.
        attention: `sdpa` (torch's fused kernels) or `math` (the plain twin).
        seed: decides the initial weights, the same on every device and process.

    Raises:
        ConfigError: a vocabulary that isn't known yet.
    """

    def __init__(self, config: GPTConfig, *, attention: Attention = "sdpa", seed: int = 0) -> None:
        super().__init__()
        if config.vocab_size == 0:
            raise ConfigError("vocab_size is not known yet: give one, or open the corpus whose tokenizer has it.")
        self.config = config.shape()
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList([Block(config, attention) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.lm_head: nn.Module | None = None  # tied: the head is wte
        if self.wte.weight.device.type != "meta":
            initialise(self, seed)

    @overload
    def forward(self, ids: Tensor, targets: None = None, *, cache: KVCache | None = None) -> Tensor: ...
    @overload
    def forward(
        self, ids: Tensor, targets: Tensor, *, reduction: str = "mean", dropout_seed: int | None = None
    ) -> Tensor: ...

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        *,
        reduction: str = "mean",
        dropout_seed: int | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Logits, or the loss where targets are given.

        Args:
            ids: (B, T) int64, T <= block_size.
            targets: (B, T) int64, the id after each position; -100 is left out of the loss.
            reduction: `mean` over the targets, or their `sum` (nats).
            dropout_seed: with it, dropout depends on nothing else.
            cache: keys and values of the tokens before `ids`; theirs are appended.

        Returns:
            (B, T, V) logits, cropped to the vocabulary; or a scalar loss, in float32.
        """
        logits = self.logits(self.hidden(ids, dropout_seed=dropout_seed, cache=cache))  # (B, T, V)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)

    def hidden(self, ids: Tensor, *, dropout_seed: int | None = None, cache: KVCache | None = None) -> Tensor:
        """What the head reads: (B, T) -> (B, T, C). Arguments as for `forward`."""
        T = ids.size(1)
        positions = torch.arange(T, device=ids.device) if cache is None else cache.positions(T)  # (T,) or (B, T)
        mask = None if cache is None else cache.mask(T)
        drops = self.training and self.config.dropout > 0
        if drops and dropout_seed is not None:
            _seed_dropout(dropout_seed)
        x = self.wte(ids) + self.wpe(positions)  # (B, T, C)
        x = F.dropout(x, self.config.dropout, self.training)
        for layer, block in enumerate(self.h):
            if drops and dropout_seed is not None:
                _seed_dropout(dropout_seed + 1 + layer)
            x = block(x, cache, layer, mask)
        if cache is not None:
            cache.advance(T)
        return self.ln_f(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., C) -> (..., V), cropped to the vocabulary."""
        logits = F.linear(hidden, self.wte.weight) if self.lm_head is None else self.lm_head(hidden)
        return logits[..., : self.config.vocab_size]


@torch.no_grad()
def initialise(model: GPT, seed: int) -> None:
    """GPT-2's initial weights (Radford et al. 2019, section 2.3; the published code for the spreads).

    | parameters                      | start                                                       |
    |---------------------------------|-------------------------------------------------------------|
    | wte, wpe, weights of c_attn, c_fc | normal, deviation 0.02                                    |
    | weights of c_proj               | normal, deviation 0.02 / sqrt(2 L): 2 L of them add up in x |
    | gains of LayerNorms             | 1                                                           |
    | biases                          | 0                                                           |
    | wte's rows past the vocabulary  | 0; nothing reads them                                       |

    Drawn on the CPU in float32 from a generator of its own, so every device and process starts alike.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif "ln_" in name:
            parameter.fill_(1.0)
        else:
            deviation = 0.02 / math.sqrt(2 * model.config.n_layer) if name.endswith("c_proj.weight") else 0.02
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, deviation, generator=generator))
    model.wte.weight[model.config.vocab_size :].zero_()
