"""How many: the parameters of a GPT, by name and by group, and the FLOPs of training it.

    >>> from gptlab.presets import preset
    >>> from gptlab.counts import parameters
    >>> parameters(preset("gpt2")).total
    124439808

FLOPs are counted as torch's FlopCounterMode counts them (a multiply and an add are two), attention over the whole T x T
square although it is causal (Chowdhery et al. 2022, appendix B), windowed or parted by documents: it is the convention
of every published MFU.

Left out on purpose: bytes and time (`costs.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gptlab.config import GPTConfig


def block_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Parameters of a block by name, with their shapes, in the model's order."""
    C, D, F = config.n_embd, config.head_dim, config.mlp_width
    norms: dict[str, tuple[int, ...]] = (
        {"attn.q_norm.weight": (D,), "attn.k_norm.weight": (D,)} if config.qk_norm else {}
    )
    return (
        _norm("ln_1", config)
        | _linear("attn.c_attn", C + 2 * config.kv_heads * D, C, config)
        | _linear("attn.c_proj", C, C, config)
        | norms
        | _norm("ln_2", config)
        | _linear("mlp.c_fc", 2 * F if config.mlp == "swiglu" else F, C, config)
        | _linear("mlp.c_proj", C, F, config)
    )


def shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of `GPT(config)` by name, with its shape, in the model's order."""
    V, C = config.padded_vocab_size, config.n_embd
    found: dict[str, tuple[int, ...]] = {"wte.weight": (V, C)}
    if not config.rope:
        found["wpe.weight"] = (config.block_size, C)
    block = block_shapes(config)
    for layer in range(config.n_layer):
        found |= {f"h.{layer}.{name}": shape for name, shape in block.items()}
    found |= _norm("ln_f", config)
    if not config.tie_head:
        found["lm_head.weight"] = (V, C)
    return found


def _norm(name: str, config: GPTConfig) -> dict[str, tuple[int, ...]]:
    shape: tuple[int, ...] = (config.n_embd,)
    biased = config.bias and not config.rmsnorm
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape} if biased else {})


def _linear(name: str, rows: int, columns: int, config: GPTConfig) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    return found | ({f"{name}.bias": (rows,)} if config.bias else {})


@dataclass(frozen=True)
class Parameters:
    """Parameters of a GPT by group."""

    token_embedding: int
    """V x C, without padding rows; the head too, where it is tied."""
    position_embedding: int
    """T x C; none with rotary positions."""
    attention: int
    """c_attn and c_proj of all blocks, with biases, and the norms of queries and keys."""
    mlp: int
    """c_fc and c_proj of all blocks, with biases."""
    layer_norm: int
    """Gains and biases of the 2 L + 1 norms."""
    head: int
    """V x C of a head with weights of its own, without padding rows."""
    padding: int
    """Rows of embedding and head past the vocabulary times C: allocated, never read; not part of the total."""

    @property
    def groups(self) -> dict[str, int]:
        """The groups that sum to the total; the head where it has weights of its own."""
        names = ("token_embedding", "position_embedding", "attention", "mlp", "layer_norm", "head")
        return {name: getattr(self, name) for name in names if name != "head" or self.head}

    @property
    def total(self) -> int:
        """All parameters of the model as published."""
        return sum(self.groups.values())

    @property
    def non_embedding(self) -> int:
        """Without both embeddings and the head: N of Kaplan et al. (2020)."""
        return self.total - self.token_embedding - self.position_embedding - self.head

    @property
    def allocated(self) -> int:
        """Numbers that the weights really hold: the total and the padding."""
        return self.total + self.padding


def parameters(config: GPTConfig) -> Parameters:
    """Parameters by group, exactly as `model.py` allocates them."""
    L, C = config.n_layer, config.n_embd
    block = {name: math.prod(shape) for name, shape in block_shapes(config).items()}
    norm = sum(math.prod(shape) for shape in _norm("ln_f", config).values())
    untied = 0 if config.tie_head else 1
    return Parameters(
        token_embedding=config.vocab_size * C,
        position_embedding=0 if config.rope else config.block_size * C,
        attention=L * sum(count for name, count in block.items() if name.startswith("attn.")),
        mlp=L * sum(count for name, count in block.items() if name.startswith("mlp.")),
        layer_norm=(2 * L + 1) * norm,
        head=untied * config.vocab_size * C,
        padding=(1 + untied) * (config.padded_vocab_size - config.vocab_size) * C,
    )


def classifies(config: GPTConfig) -> bool:
    """Whether a config is that of a run that classifies."""
    return getattr(config, "task", "lm") == "classify"


def published(config: GPTConfig) -> bool:
    """Whether a config is that of a run that trains Hugging Face's module."""
    return getattr(config, "model", "gptlab") == "huggingface"


def matmul_parameters(config: GPTConfig) -> int:
    """Weights that every token is multiplied with: the blocks' matrices (12 C^2 a block in GPT-2) and the head with its
    padding (Hugging Face's has none); no biases, no lookups."""
    block = sum(math.prod(shape) for shape in block_shapes(config).values() if len(shape) == 2)
    rows = 0 if classifies(config) else config.vocab_size if published(config) else config.padded_vocab_size
    return config.n_layer * block + rows * config.n_embd


def attention_flops_per_token(config: GPTConfig) -> int:
    """FLOPs a token of q k^T and of weights times v, both ways: 12 L T C (Chowdhery et al. 2022, appendix B);
    as many where heads share keys and values."""
    return 12 * config.n_layer * config.block_size * config.n_embd


def flops_per_token(config: GPTConfig) -> int:
    """FLOPs of one training step (forward and backward) a token, at full context.

    A weight takes a multiply and an add in the forward pass and twice that in the backward pass, hence 6 a weight
    (Kaplan et al. 2020, section 2.1); attention comes on top. A classifier has no head over the vocabulary, and its own
    works once a sequence, which is not counted.
    """
    return 6 * matmul_parameters(config) + attention_flops_per_token(config)


def mfu(config: GPTConfig, tokens_per_s: float, peak_flops: float | None) -> float | None:
    """Model FLOPs utilisation, 0..1: what the tokens need over what the devices could do; None where that is unknown.

    Args:
        tokens_per_s: of all processes together.
        peak_flops: of all *distinct* devices together (`hardware.total_peak`), FLOP/s.
    """
    return tokens_per_s * flops_per_token(config) / peak_flops if peak_flops else None


LOGIT_BYTES = 64 * 2**20
"""Most bytes that the logits of a chunk take in float32 (`loss.py`); two tensors of them are alive at once. Smaller
chunks would add to the head's gradient more often than its products are worth."""


def logit_rows(rows: int, columns: int) -> int:
    """Rows of such a chunk: `rows` cut evenly, so that the logits of each have LOGIT_BYTES at most."""
    most = max(1, LOGIT_BYTES // (4 * max(1, columns)))  # of a text not read yet the vocabulary is not known
    return max(1, -(-rows // max(1, -(-rows // most))))


def logit_columns(config: GPTConfig) -> int:
    """Scores that a token gets: the vocabulary's, or none in a classifier, which scores a sequence once."""
    return 0 if classifies(config) else config.vocab_size


def loss_in_chunks(config: GPTConfig, tokens: int) -> bool:
    """Whether a micro-batch of so many tokens takes its loss in chunks: where its logits are more than one, and no soft
    cap bends them."""
    chunked = not config.logit_softcap and logit_rows(tokens, config.padded_vocab_size) < tokens
    return chunked and not classifies(config)
