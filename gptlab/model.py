"""GPT-2, exactly: the transformer of Radford et al. (2019), readable from top to bottom.

    >>> import torch
    >>> from gptlab.presets import preset
    >>> from gptlab.model import GPT
    >>> model = GPT(preset("tiny"))
    >>> model(torch.zeros(1, 8, dtype=torch.long)).shape    # logits (B, T, V)
    torch.Size([1, 8, 257])

Pre-norm blocks, tanh GELU, learned positions, and a head tied to the token embedding. Modules bear the names of the
published checkpoint (`wte wpe h ln_f`, `c_attn c_proj c_fc`). Shape letters: B batch, T time, C = n_embd, H = n_head,
G = kv_heads, D = C / H, V vocabulary, L layers. What came after GPT-2 (rotary positions, RMSNorm, gated MLPs, grouped
heads and more) are switches of the config, each with its paper there; all off is GPT-2.

Two notable choices. The embedding has `padded_vocab_size` rows, a multiple of 64; logits are cropped to V, so an id
that no tokenizer knows can be neither predicted nor sampled. And dropout is drawn from a seed that the caller gives
(`dropout_seed`), a layer's own each, so that neither the number of processes nor what ran before changes it.

Left out on purpose: attention's kernels and masks (`attention.py`), files of weights (`weights.py`), classification
(`heads.py`), how a step is taken (`step.py`), how it is spread (`parallel/`), how text is sampled (`sampling.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from typing import Self, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlab import weights
from gptlab.attention import Attention, Mask, attend, make_mask
from gptlab.config import ConfigError, GPTConfig
from gptlab.counts import loss_in_chunks, shapes
from gptlab.kvcache import KVCache
from gptlab.loss import head_loss

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the angles by which queries and keys turn, each (T, 1, D / 2) or (B, T, 1, D / 2), float32."""

NORM_EPS = 1e-5
"""Added to variances, as GPT-2 does."""
ROPE_BASE = 10_000.0
"""The slowest pair of features turns by 1 / base a token (Su et al. 2021, section 3.2.2)."""


class RMSNorm(nn.RMSNorm):
    """Root mean square norm (Zhang & Sennrich 2019, eq. 4). Under autocast the gains follow the input's type: with two
    types torch falls back to a slow path."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.type_as(x), self.eps)


def make_norm(config: GPTConfig) -> nn.Module:
    """LayerNorm (Ba et al. 2016) over C, or RMSNorm."""
    if config.rmsnorm:
        return RMSNorm(config.n_embd, eps=NORM_EPS)
    return nn.LayerNorm(config.n_embd, eps=NORM_EPS, bias=config.bias)


def rotation(positions: Tensor, head_dim: int) -> Rotation:
    """Angles of rotary positions (Su et al. 2021, eq. 15): pair i turns by position * base^(-2 i / D).

    Args:
        positions: (T,) or (B, T) int64.
    """
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)  # (D / 2,)
    angles = positions.float()[..., None, None] * ROPE_BASE ** (-pairs / head_dim)  # the same for every head
    return angles.cos(), angles.sin()


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Turns queries or keys (B, T, H, D). Feature i is paired with i + D / 2, as in GPT-NeoX and Llama."""
    cos, sin = by
    a, b = x.chunk(2, dim=-1)  # each (B, T, H, D / 2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class SelfAttention(nn.Module):
    """Multi-head causal self-attention; G < H key and value heads are shared by H / G queries each."""

    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        self.attention, self.dropout, self.window = attention, config.dropout, config.sliding_window
        self.head_dim = config.head_dim
        self.widths = [config.n_embd] + 2 * [config.kv_heads * config.head_dim]  # of q, k, v
        self.c_attn = nn.Linear(config.n_embd, sum(self.widths), bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.q_norm = RMSNorm(config.head_dim, eps=NORM_EPS) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, eps=NORM_EPS) if config.qk_norm else None

    def forward(self, x: Tensor, layer: int, mask: Mask, turn: Rotation | None, cache: KVCache | None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(self.widths, dim=2)
        q, k, v = (part.view(B, T, -1, self.head_dim) for part in (q, k, v))  # (B, T, H, D), then twice (B, T, G, D)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D), then twice (B, G, T, D)
        if cache is not None:
            k, v = cache.extend(layer, k, v)  # each (B, G, S, D)
        drop = self.dropout if self.training else 0.0
        y = attend(self.attention, q, k, v, mask, dropout=drop, window=self.window)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, C)
        return F.dropout(self.c_proj(y), self.dropout, self.training)


class MLP(nn.Module):
    """Two linear layers and between them, wider, the tanh approximation of GELU (Hendrycks & Gimpel 2016), ReLU squared
    or SwiGLU. c_fc holds both of SwiGLU's first matrices, the gate's rows before the others."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout, self.kind = config.dropout, config.mlp
        rows = config.mlp_width * (2 if config.mlp == "swiglu" else 1)
        self.c_fc = nn.Linear(config.n_embd, rows, bias=config.bias)
        self.c_proj = nn.Linear(config.mlp_width, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = self.c_fc(x)
        if self.kind == "gelu":
            x = F.gelu(x, approximate="tanh")
        elif self.kind == "relu2":
            x = F.relu(x).square()
        else:
            gate, value = x.chunk(2, dim=-1)
            x = F.silu(gate) * value
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = SelfAttention(config, attention)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, layer: int, mask: Mask, turn: Rotation | None, cache: KVCache | None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.attn(self.ln_1(x), layer, mask, turn, cache)
        return x + self.mlp(self.ln_2(x))


@torch.compiler.disable
def _manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


class GPT(nn.Module):
    """A GPT-2.

    Args:
        config: its shape; a TrainConfig will do.
        attention: kernel of attention; `math` is the plain twin.
        seed: decides the initial weights, the same on every device and process.

    Raises:
        ConfigError: a vocabulary that isn't known yet.
    """

    def __init__(self, config: GPTConfig, *, attention: Attention = "sdpa", seed: int = 0) -> None:
        super().__init__()
        if config.vocab_size == 0:
            raise ConfigError("vocab_size is not known yet: give one, or open the corpus whose tokenizer has it.")
        self.config, self.attention = config.shape(), attention
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.wpe = None if config.rope else nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList([Block(config, attention) for _ in range(config.n_layer)])
        self.ln_f = make_norm(config)
        self.lm_head: nn.Module | None = None  # tied: the head is wte
        if not config.tie_head:
            self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        if self.wte.weight.device.type != "meta":
            initialise(self, seed)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        block_size: int | None = None,
        dropout: float = 0.0,
        attention: Attention = "sdpa",
    ) -> Self:
        """A GPT with the weights of a folder as transformers saves it, or of nanoGPT's ckpt.pt; float32, in eval mode.

        Args:
            block_size: a shorter context; learned positions past it are cut off.

        Raises:
            ConfigError: files that hold something else, and what.
        """
        config, tensors = weights.read(path, block_size=block_size, dropout=dropout)
        with torch.device("meta"):
            model = cls(config, attention=attention)
        model.load_state_dict(tensors, assign=True)
        return model.requires_grad_().eval()

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """Writes config.json and model.safetensors as transformers reads them; with switches that its GPT-2 lacks, as
        `from_pretrained` alone does. Rows past the vocabulary are left out."""
        weights.write(path, self.config, self.state_dict())

    @overload
    def forward(
        self, ids: Tensor, targets: None = None, *, dropout_seed: int | None = None, cache: KVCache | None = None
    ) -> Tensor: ...
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
        hidden = self.hidden(ids, dropout_seed=dropout_seed, cache=cache)  # (B, T, C)
        return self.logits(hidden) if targets is None else self.loss(hidden, targets, reduction)

    def hidden(self, ids: Tensor, *, dropout_seed: int | None = None, cache: KVCache | None = None) -> Tensor:
        """What the head reads: (B, T) -> (B, T, C). Arguments as for `forward`."""
        T = ids.size(1)
        positions = torch.arange(T, device=ids.device) if cache is None else cache.positions(T)  # (T,) or (B, T)
        x = self.embed(ids, positions, dropout_seed)
        x = self.through(enumerate(self.h), x, ids, positions, dropout_seed, cache)
        if cache is not None:
            cache.advance(T)
        return self.ln_f(x)

    def embed(self, ids: Tensor, positions: Tensor, dropout_seed: int | None) -> Tensor:
        """What the first block reads: (B, T) -> (B, T, C)."""
        self._seed_dropout(dropout_seed, 0)
        x = self.wte(ids)  # (B, T, C)
        if self.wpe is not None:
            x = x + self.wpe(positions)
        return F.dropout(x, self.config.dropout, self.training)

    def through(
        self, blocks: Iterable[tuple[int, nn.Module]], x: Tensor, ids: Tensor, positions: Tensor,
        dropout_seed: int | None, cache: KVCache | None = None,
    ) -> Tensor:  # fmt: skip
        """Takes x (B, T, C) through blocks, each with its layer, that read the ids (B, T) at these positions."""
        mask = make_mask(self.attention, self.config, ids, next(self.parameters()).dtype, cache)
        turn = rotation(positions, self.config.head_dim) if self.config.rope else None
        for layer, block in blocks:
            self._seed_dropout(dropout_seed, 1 + layer)
            x = block(x, layer, mask, turn, cache)
        return x

    def _seed_dropout(self, seed: int | None, place: int) -> None:
        if self.training and self.config.dropout > 0 and seed is not None:
            _manual_seed(seed + place)

    def loss(self, hidden: Tensor, targets: Tensor, reduction: str, *, in_chunks: bool = True) -> Tensor:
        """The loss of what the head reads, (B, T, C), in float32. Arguments as for `forward`.

        Args:
            in_chunks: whether it may go in chunks, whose gradients cannot be taken one at a time.
        """
        if in_chunks and loss_in_chunks(self.config, targets.numel()):
            return head_loss(
                hidden.flatten(0, 1), self.head, targets.flatten(), vocab_size=self.config.vocab_size,
                reduction=reduction,
            )  # fmt: skip
        logits = self.logits(hidden)  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)

    @property
    def head(self) -> Tensor:
        """The head's weights: (padded V, C)."""
        return self.wte.weight if self.lm_head is None else self.lm_head.get_parameter("weight")

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., C) -> (..., V), cropped to the vocabulary."""
        logits = F.linear(hidden, self.wte.weight) if self.lm_head is None else self.lm_head(hidden)
        logits = logits[..., : self.config.vocab_size]
        if cap := self.config.logit_softcap:
            logits = cap * torch.tanh(logits.float() / cap)
        return logits


@torch.no_grad()
def initialise(model: GPT, seed: int) -> None:
    """GPT-2's initial weights (Radford et al. 2019, section 2.3; the published code for the spreads).

    | parameters                               | start                                                       |
    |------------------------------------------|-------------------------------------------------------------|
    | wte, wpe, lm_head, weights of c_attn, c_fc | normal, deviation 0.02                                    |
    | weights of c_proj                        | normal, deviation 0.02 / sqrt(2 L): 2 L of them add up in x |
    | gains of norms (ln_*, q_norm, k_norm)    | 1                                                           |
    | biases                                   | 0                                                           |
    | rows of wte, lm_head past the vocabulary | 0; nothing reads them                                       |

    """
    for name, value in initial_weights(model.config, seed):
        model.get_parameter(name).copy_(value)


def initial_weights(config: GPTConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """GPT-2's initial weights by name, one after the other: who holds a part of the model never needs the whole.

    Drawn on the CPU in float32 from a generator of its own, so every device and process starts alike.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes(config).items():
        value = torch.zeros(shape)
        if "ln_" in name or "_norm" in name:
            value.fill_(float(name.endswith("weight")))
        elif name.endswith("weight"):
            deviation = 0.02 / math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 0.02
            value.normal_(0.0, deviation, generator=generator)
        if name in ("wte.weight", "lm_head.weight"):
            value[config.vocab_size :] = 0.0
        yield name, value
