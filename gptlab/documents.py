"""Which labelled documents a step sees: a pure function of (seed, step), as for windows of a text.

    >>> import numpy as np
    >>> from gptlab.documents import Documents
    >>> found = Documents(np.array([5, 6, 9, 7, 9], np.uint16), np.array([0, 1]), names=["bad", "good"], pad=9)
    >>> found.rows(np.array([1, 0]), block_size=3)[0].tolist()
    [[7, 9, 9], [5, 6, 9]]

A document is cut after block_size ids, or filled up on the right with the end-of-text id, which no document has inside:
its last other id is where the classifier reads. Global batches are drawn as `batches.py` draws them, and cut into
micro-batches before processes share them. Left out on purpose: rows of other lengths than block_size, which would save
work on short documents and have every kernel see many shapes.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from gptlab.batches import Tokens, stream_seed

if TYPE_CHECKING:
    import torch

Indices = npt.NDArray[np.int64]
"""Numbers of documents, (n,)."""


class Documents:
    """The labelled documents of a split.

    Args:
        tokens: their ids in a row, each document's followed by `pad`.
        labels: the class of each, (n,).
        names: of the classes.
        pad: the end-of-text id.
    """

    def __init__(self, tokens: Tokens, labels: npt.ArrayLike, *, names: list[str], pad: int) -> None:
        self.tokens, self.names, self.pad = tokens, names, pad
        self.labels = np.asarray(labels, dtype=np.int64)

    @cached_property
    def ends(self) -> Indices:
        """Where the end-of-text id behind each document stands, (n,)."""
        return np.flatnonzero(self.tokens == self.pad)

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, chosen: Indices, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids (len(chosen), block_size) and labels (len(chosen),) of documents, both int64."""
        import torch

        ids = np.full((len(chosen), block_size), self.pad, dtype=np.int64)
        for row, index in enumerate(chosen):
            start = 0 if index == 0 else self.ends[index - 1] + 1
            piece = self.tokens[start : min(self.ends[index], start + block_size)]
            ids[row, : len(piece)] = piece
        return torch.from_numpy(ids), torch.from_numpy(self.labels[chosen])

    def fixed(self, count: int) -> Indices:
        """`count` documents, or all where there are not so many: the same at each look and in each run."""
        generator = np.random.Generator(np.random.Philox(key=stream_seed("eval")))
        return np.sort(generator.permutation(len(self))[:count]).astype(np.int64)

    def hash(self, chosen: Indices, block_size: int) -> str:
        """Hex SHA-256 of what `rows` gives, ids and then labels, as little-endian uint32."""
        ids, labels = self.rows(chosen, block_size)
        return hashlib.sha256(ids.numpy().astype("<u4").tobytes() + labels.numpy().astype("<u4").tobytes()).hexdigest()


class DocumentBatches:
    """The global batches of a run that classifies; to `batches.Batches` what documents are to windows.

    Args:
        order: `random` draws each document anew, `epoch` deals them without putting them back until all were seen.
    """

    def __init__(
        self, documents: Documents, *, block_size: int, global_batch_size: int, order: Literal["random", "epoch"],
        seed: int,
    ) -> None:  # fmt: skip
        self.documents, self.block_size, self.size = documents, block_size, global_batch_size
        self.order, self.seed = order, seed

    @property
    def targets(self) -> int:
        """Predictions that the loss of a step is the mean of: a document has one."""
        return self.size

    def chosen(self, step: int) -> Indices:
        """The documents of a step, (global_batch_size,). Steps count from 0."""
        count = len(self.documents)
        if self.order == "random":
            generator = np.random.Generator(np.random.Philox(key=stream_seed("batch", self.seed, step)))
            return generator.integers(0, count, size=self.size, dtype=np.int64)
        wanted = np.arange(step * self.size, (step + 1) * self.size)
        found = np.empty(self.size, dtype=np.int64)
        for epoch in np.unique(wanted // count):
            here = wanted // count == epoch
            generator = np.random.Generator(np.random.Philox(key=stream_seed("epoch", self.seed, int(epoch))))
            found[here] = generator.permutation(count)[wanted[here] % count]
        return found

    def micro_batch(self, step: int, index: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Micro-batch `index` of a step: ids (up to size, block_size) and labels (up to size,), int64 on the CPU."""
        return self.documents.rows(self.chosen(step)[index * size : (index + 1) * size], self.block_size)
