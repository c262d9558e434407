"""Keys and values of the tokens seen so far, so that a new token costs one position and not the whole window.

    >>> import torch
    >>> from gptlab.config import GPTConfig
    >>> from gptlab.kvcache import KVCache
    >>> cache = KVCache(GPTConfig(n_layer=1), batch=1, length=8, device=torch.device("cpu"), dtype=torch.float32)
    >>> cache.positions(2).tolist()
    [0, 1]

The model asks four things of a cache and nothing else: where the next tokens stand (`positions`), all keys and values
of a layer with theirs appended (`extend`), which keys each of them sees (`mask`), and to move on (`advance`).

Left out on purpose: how text is sampled with it (`sampling.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gptlab.config import GPTConfig


class KVCache:
    """Buffers of fixed size for rows of one length.

    Args:
        config: shape of the model.
        batch: rows B.
        length: most tokens S that it holds.
    """

    def __init__(self, config: GPTConfig, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (config.n_layer, 2, batch, config.kv_heads, length, config.head_dim)  # (L, 2, B, G, S, D)
        self.buffer = torch.zeros(shape, device=device, dtype=dtype)
        self.length = length
        self.used = 0

    def positions(self, new: int) -> Tensor:
        """Places of the next T tokens: (T,) int64."""
        return torch.arange(self.used, self.used + new, device=self.buffer.device)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends T keys and values (B, G, T, D) of a layer and returns all so far, each (B, G, used + T, D)."""
        end = self.used + k.size(2)
        self.buffer[layer, 0, :, :, self.used : end] = k
        self.buffer[layer, 1, :, :, self.used : end] = v
        return self.buffer[layer, 0, :, :, :end], self.buffer[layer, 1, :, :, :end]

    def mask(self, new: int) -> Tensor | None:
        """Which keys the next T tokens see: bool (1, 1, T, used + T); None where plain causality says it (an empty
        cache) or a single token sees all."""
        if self.used == 0 or new == 1:
            return None
        ones = torch.ones(new, self.used + new, dtype=torch.bool, device=self.buffer.device)
        return ones.tril(self.used)[None, None]

    def advance(self, new: int) -> None:
        """Counts T tokens as seen, once every layer has appended theirs."""
        self.used += new
