"""Causal attention: one meaning, several kernels, and what a query may not see.

    >>> import torch
    >>> from gptlab.attention import attend, attend_math
    >>> q = k = v = torch.randn(1, 2, 8, 4)
    >>> torch.allclose(attend("sdpa", q, k, v), attend_math(q, k, v), atol=1e-5)
    True

A query sees the keys up to its own; a sliding window keeps the nearest of them, and document masking those of its own
document. Without either no mask is made: kernels know causality, and a single query at the end sees every key. Masks
are made once a forward pass and serve every layer.

`math` is written out, the plain twin of all others. `sdpa` is torch's own choice among its fused kernels, which can be
asked for by name. `flex` (FlexAttention; Dong et al. 2024) computes only the blocks that a mask leaves, on GPUs.

Left out on purpose: the projections around it (`model.py`), keys and values that are kept (`kvcache.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from gptlab.config import ConfigError, GPTConfig
from gptlab.kvcache import KVCache

Attention = Literal["sdpa", "flash", "efficient", "cudnn", "flex", "math"]
Mask = Tensor | BlockMask | None
"""What a kernel takes: a bool tensor (math), a float one of 0 and -inf (fused), blocks (flex), each to be broadcast to
(B, 1, T, S); or None, which is plain causality."""

_FUSED = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_NEEDS = {
    "flash": "a half type and no mask on a GPU, and no dropout on a CPU",
    "efficient": "a GPU",
    "cudnn": "a GPU and a half type",
    "flex": "a GPU, Triton, heads of at least 16 features and no dropout",
}


def documents(ids: Tensor, end_of_text: int) -> Tensor:
    """The number of each position's document: (B, T) int64 -> (B, T) int64. End-of-text begins the next one: it is
    predicted from the old document and predicts the first token of the new one."""
    return (ids == end_of_text).cumsum(1)


def visible(length: int, device: torch.device, window: int = 0, docs: Tensor | None = None) -> Tensor:
    """Which keys (S = T) each query sees: bool, (T, T), or (B, 1, T, T) with documents (B, T)."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    seen = ones.tril()
    if window:
        seen = seen & ones.triu(1 - window)
    if docs is not None:
        seen = seen & (docs[:, :, None] == docs[:, None, :])[:, None]
    return seen


def nearest(mask: Tensor, window: int) -> Tensor:
    """A cache's bool mask (..., T, S) cut to each query's nearest `window` keys, wherever they lie: its own is the last
    that it sees, so the keys are counted from there."""
    return mask & (mask.flip(-1).cumsum(-1).flip(-1) <= window)


def make_mask(
    attention: Attention, config: GPTConfig, ids: Tensor, dtype: torch.dtype, cache: KVCache | None = None
) -> Mask:
    """The mask of a forward pass in the form that the kernel takes, or None.

    With a cache each row is one document.

    Args:
        ids: (B, T) int64, whole windows, or what follows the cache.
        dtype: of the weights. Under autocast the mask has the type of queries, else each layer would make its own.
    """
    length, window, device = ids.size(1), config.sliding_window, ids.device
    cached = None if cache is None else cache.mask(length)  # (B, 1, T, S)
    if cached is not None:
        seen = nearest(cached, window) if window else cached
    else:
        window = window if window < length else 0
        docs = documents(ids, config.vocab_size - 1) if config.mask_documents and cache is None else None
        if length == 1 or (not window and docs is None):
            return None
        if attention == "flex":
            return _blocks(length, device, window, docs)
        seen = visible(length, device, window, docs)
    if attention == "math":
        return seen
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -math.inf)


def _blocks(length: int, device: torch.device, window: int, docs: Tensor | None) -> BlockMask:
    """The same as `visible` for flex, which asks for one pair of positions at a time."""

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        if window:
            seen = seen & (query - key < window)
        if docs is not None:
            seen = seen & (docs[batch, query] == docs[batch, key])
        return seen

    return create_block_mask(sees, None if docs is None else docs.size(0), None, length, length, device=device)


def attend(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Mask = None, *, dropout: float = 0.0, window: int = 0
) -> Tensor:
    """Attention by one of the kernels.

    Args:
        q: (B, H, T, D).
        k: (B, G, S, D), and v alike; G divides H, and each of its heads serves H / G queries.
        mask: from `make_mask`, for the same kernel.
        dropout: share of weights dropped; 0 outside training.
        window: the config's; a single query without a mask looks at that many keys, the last ones.

    Returns:
        (B, H, T, D).
    """
    if window and mask is None and q.size(2) == 1:
        k, v = k[:, :, -window:], v[:, :, -window:]
    if attention == "math":
        return attend_math(q, k, v, mask, dropout=dropout)
    if attention == "flex" and isinstance(mask, BlockMask | None) and q.size(2) == k.size(2):
        return _attend_flex(q, k, v, mask)
    return _attend_fused(_FUSED.get(attention), q, k, v, mask, dropout)


def attend_math(q: Tensor, k: Tensor, v: Tensor, mask: Mask = None, *, dropout: float = 0.0) -> Tensor:
    """Causal attention, written out: the plain twin of the kernels.

    softmax(q k^T / sqrt(D) + mask) v, with a mask of -inf where a query does not see (Vaswani et al. 2017, eq. 1).
    Without a mask given the last query is the last key's, however many keys came before. Shapes as for `attend`.
    """
    T, S, group = q.size(2), k.size(2), q.size(1) // k.size(1)
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)  # each (B, H, S, D)
    scores = q @ k.transpose(2, 3) / math.sqrt(q.size(3))  # (B, H, T, S)
    if mask is None:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)  # (T, S)
    assert isinstance(mask, Tensor)
    weights = F.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
    return F.dropout(weights, dropout) @ v if dropout else weights @ v


def _attend_fused(kernel: SDPBackend | None, q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> Tensor:
    """torch's fused kernels. `is_causal` aligns the first query with the first key, so it serves only where both are as
    many; elsewhere the alignment is written into a mask, but for a single query, which needs none."""
    T, S = q.size(2), k.size(2)
    if mask is None and T != S and T != 1:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    assert not isinstance(mask, BlockMask)
    causal, grouped = mask is None and T > 1, q.size(1) != k.size(1)
    # A kernel asked for by name trains; rows of a cache are as torch likes, which knows what takes their mask.
    named = contextlib.nullcontext() if kernel is None or T != S else sdpa_kernel(kernel)
    with named:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, enable_gqa=grouped
        )


@functools.cache
def _flex(device: str) -> Callable[..., Any]:
    """FlexAttention is a kernel once it is compiled; uncompiled it writes the scores out."""
    plain: Callable[..., Any] = flex_attention
    return torch.compile(plain, dynamic=False) if device == "cuda" else plain


def _attend_flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None) -> Tensor:
    mask = _blocks(q.size(2), q.device, 0, None) if mask is None else mask
    out = _flex(q.device.type)(q, k, v, block_mask=mask, enable_gqa=q.size(1) != k.size(1))
    assert isinstance(out, Tensor)
    return out


def choose(asked: str, config: GPTConfig, device: str) -> tuple[Attention, str]:
    """What the config's `attention` becomes on a kind of device, and the reason, for run.json."""
    if asked != "auto":
        return asked, "as asked"  # type: ignore[return-value]
    hides = config.mask_documents or 0 < config.sliding_window < config.block_size
    if hides and device == "cuda":
        if _flex_serves(config, device):
            return "flex", "auto: FlexAttention leaves out the blocks that the mask hides"
        return "sdpa", f"auto: torch's own choice; FlexAttention needs {_NEEDS['flex']}"
    return "sdpa", "auto: torch's own choice among its fused kernels"


def _flex_serves(config: GPTConfig, device: str) -> bool:
    from torch.utils._triton import has_triton

    return device == "cuda" and config.dropout == 0 and config.head_dim >= 16 and has_triton()


def check(attention: Attention, config: GPTConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Tries a fused kernel that was asked for by name, forward and backward, on a short window. FlexAttention would be
    compiled for that, so it is held against what it needs.

    Raises:
        ConfigError: torch has no such kernel for this device, type, mask or dropout.
    """
    if attention in ("sdpa", "math"):
        return
    if attention == "flex":
        served = _flex_serves(config, device.type)
    else:
        served = _fused_serves(attention, config, device, dtype)
    if not served:
        kind = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"attention {attention!r} has no kernel for this run, on {device.type} in {kind} (it needs "
            f"{_NEEDS[attention]}): choose auto, sdpa or math."
        )


def _fused_serves(attention: Attention, config: GPTConfig, device: torch.device, dtype: torch.dtype) -> bool:
    length = min(config.block_size, 128)
    config = dataclasses.replace(config.shape(), sliding_window=min(config.sliding_window, length // 2))
    ids = torch.full((1, length), max(config.vocab_size - 1, 0), device=device)
    heads = (config.n_head, config.kv_heads, config.kv_heads)
    shapes = [(1, n, length, config.head_dim) for n in heads]
    q, k, v = (torch.zeros(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
    try:
        mask = make_mask(attention, config, ids, dtype)
        attend(attention, q, k, v, mask, dropout=config.dropout).sum().backward()
    except RuntimeError:  # what torch lacks for a device or a type is one, too
        return False
    return True
