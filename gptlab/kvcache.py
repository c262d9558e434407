"""Keys and values of the tokens seen so far, so that a further token costs one query and not the whole text.

Buffers of fixed size, written in place; what is handed to attention is a view of them and never a copy. Rows of
different lengths stand flush right: a shorter row has empty places before it (left padding), which no query sees, and
its first token has position 0 all the same. So each row computes what it would compute alone.

    >>> import torch
    >>> from gptlab.presets import preset
    >>> from gptlab.kvcache import KVCache
    >>> from gptlab.model import GPT
    >>> model, ids = GPT(preset("tiny")).eval(), torch.zeros(1, 8, dtype=torch.long)
    >>> cache = KVCache(model.config, 1, 64, ids.device, torch.float32)
    >>> model.hidden(ids, cache=cache).shape, cache.used    # (B, T, C), and the next token is the ninth
    (torch.Size([1, 8, 64]), 8)

Left out on purpose: what is done when the buffers are full (`sampling.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gptlab.config import GPTConfig


class KVCache:
    """What the model asks of it: `positions`, `mask` and `extend` before and in the blocks, `advance` after them.

    Args:
        config: shape of the model.
        batch: rows B.
        length: most tokens a row that it holds, empty places included.
        padding: (B,) int64, empty places before each row's first token; none without.
        static: shapes never change with what was seen (attention then looks at the whole buffer through a mask), which
            is what a compiled step or a CUDA graph wants.
    """

    def __init__(
        self,
        config: GPTConfig,
        batch: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        padding: Tensor | None = None,
        static: bool = False,
    ) -> None:
        heads = config.kv_heads  # fewer than n_head with grouped queries
        # Zeros, since a masked place still takes part in the sum, with weight 0; pages never written cost nothing.
        self.buffer = torch.zeros(
            config.n_layer, 2, batch, heads, length, config.head_dim, device=device, dtype=dtype
        )  # (L, 2, B, H, S, D)
        self.batch, self.length, self.static = batch, length, static
        self.used = 0
        self.padding = torch.zeros(batch, dtype=torch.long) if padding is None else padding.cpu()
        self._first = self.padding.clone()  # the first place that is seen
        self._places = torch.arange(length, device=device)  # (S,)
        self._start = torch.zeros((), dtype=torch.long, device=device)  # `used`, as a tensor: a compiled step reads it
        self._settle()

    def _settle(self) -> None:
        """What follows from the padding of the rows there are."""
        self._shifted, self._hides = bool(self.padding.any()), bool(self._first.any())
        self._empty = self.padding.to(self.buffer.device)  # (B,)
        self.layers = list(self.buffer[:, :, : self.batch].unbind(0))  # L views, each (2, B, H, S, D)
        self._real = self._places >= self._first.to(self.buffer.device)[:, None]  # (B, S)

    def positions(self, T: int) -> Tensor:
        """Places in the text of the next T tokens: (T,), or (B, T) where rows are padded (0 for empty places)."""
        places = self._next(T)  # (T,)
        return (places - self._empty[:, None]).clamp(min=0) if self._shifted else places

    def mask(self, T: int) -> Tensor | None:
        """Which keys the next T queries see: bool, broadcastable to (B, 1, T, S). None where plain causality says it:
        nothing seen yet and no padding, or a single query that sees all."""
        if not self.static and not self._hides and (T == 1 or self.used == 0):
            return None
        places = self._next(T)[:, None]  # (T, 1)
        keys = self._places if self.static else self._places[: self.used + T]  # (S,)
        if T == 1 and not self.static:
            return self._real[:, None, None, : self.used + 1]  # (B, 1, 1, S)
        seen = keys <= places  # (T, S)
        if not self._hides:
            return seen[None, None]  # (1, 1, T, S)
        # An empty place sees itself: a query that saw nothing would be NaN, and NaN times a weight of 0 is NaN.
        return (seen & self._real[:, None, : keys.numel()] | (keys == places))[:, None]  # (B, 1, T, S)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends T keys and values (B, H, T, D) of a layer and returns views of all so far, each (B, H, S, D)."""
        keys, values = self.layers[layer].unbind(0)  # each (B, H, S, D)
        if self.static:
            places = self._next(k.size(2))
            return keys.index_copy_(2, places, k), values.index_copy_(2, places, v)
        end = self.used + k.size(2)
        keys[:, :, self.used : end] = k
        values[:, :, self.used : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, T: int) -> None:
        """T tokens are in, in every layer."""
        if self.static:
            self._start.add_(T)
        else:
            self.used += T

    def rewind(self, used: int) -> None:
        """Forgets all but the first `used` tokens a row."""
        self.used = used

    def hide(self, row: int, places: int) -> None:
        """No query sees a row's first `places` any more: they are another document's. Positions stay what they are."""
        self._first[row] = max(places, int(self.padding[row]))
        self._settle()

    def drop(self, row: int) -> None:
        """Takes a row out; the last row takes its place, so one row is copied and no other moves."""
        last = self.batch - 1
        if row != last:
            self.buffer[:, :, row, :, : self.used] = self.buffer[:, :, last, :, : self.used]
            self.padding[row], self._first[row] = self.padding[last], self._first[last]
        self.batch, self.padding, self._first = last, self.padding[:last], self._first[:last]
        self._settle()

    def _next(self, T: int) -> Tensor:
        """Places in the buffer of the next T tokens, (T,)."""
        return self._start + self._places[:T] if self.static else self._places[self.used : self.used + T]
