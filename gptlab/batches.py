"""Which windows of the text a step sees: a pure function of (seed, step), with no state to save or lose.

    >>> import numpy as np
    >>> from gptlab.batches import Batches
    >>> b = Batches(np.arange(1000, dtype=np.uint16), block_size=8, global_batch_size=4, order="random", seed=1)
    >>> b.starts(7).tolist() == b.starts(7).tolist()
    True

Step s draws its global batch from a counter-based generator (Philox; Salmon et al. 2011, "Parallel random numbers: as
easy as 1, 2, 3") keyed by the seed, with s as the stream. The batch is cut into micro-batches *before* processes share
them, so any number of processes trains on the same windows, and what a micro-batch draws (dropout) does not depend on
who computes it. A resumed run needs to know its step and nothing else.

Left out on purpose: where the tokens come from (`corpus.py`).
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Tokens = npt.NDArray[Any]
"""Token ids, 1-d, uint16 or uint32, mostly mapped from a file."""


def stream_seed(*parts: int | str) -> int:
    """A 62-bit seed for a stream named by its parts: the same everywhere, unrelated for parts that differ."""
    text = b"".join(struct.pack("<q", p) if isinstance(p, int) else p.encode() + b"\0" for p in parts)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2


class Feed(Protocol):
    """What a step knows of its data."""

    @property
    def targets(self) -> int:
        """Predictions that the loss of a step is the mean of."""

    def micro_batch(self, step: int, index: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Micro-batch `index` of a step: up to `size` sequences and what is to be predicted of them, on the CPU."""


class Batches:
    """The global batches of a run.

    Args:
        tokens: the training split; at least block_size + 1 ids.
        order: `random` draws each window anew (as nanoGPT does); `epoch` deals non-overlapping windows without putting
            them back until all were seen, each epoch from an offset of its own.
    """

    def __init__(
        self, tokens: Tokens, *, block_size: int, global_batch_size: int, order: Literal["random", "epoch"], seed: int
    ) -> None:
        self.tokens, self.block_size, self.size, self.order, self.seed = (
            tokens,
            block_size,
            global_batch_size,
            order,
            seed,
        )
        self._permutation = lru_cache(maxsize=2)(self._deal)

    @property
    def targets(self) -> int:
        """Predictions that the loss of a step is the mean of: every token has one."""
        return self.size * self.block_size

    def starts(self, step: int) -> npt.NDArray[np.int64]:
        """Where the windows of a step begin: (global_batch_size,) int64. Steps count from 0."""
        if self.order == "random":
            generator = np.random.Generator(np.random.Philox(key=stream_seed("batch", self.seed, step)))
            return generator.integers(0, len(self.tokens) - self.block_size, size=self.size, dtype=np.int64)
        first = step * self.size
        epoch_size = max(1, (len(self.tokens) - 1) // self.block_size - 1)  # one window less leaves room for the offset
        wanted = np.arange(first, first + self.size)
        starts = np.empty(self.size, dtype=np.int64)
        for epoch in np.unique(wanted // epoch_size):
            here = wanted // epoch_size == epoch
            starts[here] = self._permutation(int(epoch), epoch_size)[wanted[here] % epoch_size]
        return starts

    def _deal(self, epoch: int, count: int) -> npt.NDArray[np.int64]:
        """The windows of an epoch in their order: (count,) int64."""
        generator = np.random.Generator(np.random.Philox(key=stream_seed("epoch", self.seed, epoch)))
        slack = len(self.tokens) - 1 - count * self.block_size
        offset = int(generator.integers(0, slack + 1))
        return generator.permutation(count).astype(np.int64) * self.block_size + offset

    def micro_batch(self, step: int, index: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Micro-batch `index` of a step: ids and targets, each (up to size, block_size) int64 on the CPU."""
        return windows(self.tokens, self.starts(step)[index * size : (index + 1) * size], self.block_size)


def micro_batches(global_batch_size: int, micro_batch_size: int) -> int:
    """How many micro-batches a global batch is cut into; the last may be smaller."""
    return -(-global_batch_size // micro_batch_size)


def share(count: int, rank: int, world_size: int) -> range:
    """The micro-batches of a rank: contiguous, and as even as whole ones allow (8 over 3 is 3, 3, 2)."""
    base, extra = divmod(count, world_size)
    first = rank * base + min(rank, extra)
    return range(first, first + base + (rank < extra))


def windows(tokens: Tokens, starts: npt.NDArray[np.int64], block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets (the ids one further) of windows: each (len(starts), block_size) int64.

    The cast to int64 comes after the gather: torch cannot index with uint16.
    """
    import torch

    rows = np.lib.stride_tricks.sliding_window_view(tokens, block_size + 1)[starts]  # (B, T + 1), a copy
    both = torch.from_numpy(rows.astype(np.int64))
    return both[:, :-1], both[:, 1:]
