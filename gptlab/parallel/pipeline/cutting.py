"""A stage of a GPT: the model with parts missing, and the stages that a process holds as one module.

    part = make_part(config, {0: range(0, 5)}, 3, attention="sdpa", dtype="float32", in_chunks=True)

What a stage does is written once, in `model.py`, and its parameters bear the whole model's names. Left out on purpose:
where the model is cut (`cuts.py`), models that are not ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor, nn

from gptlab.attention import Attention
from gptlab.config import GPTConfig
from gptlab.model import GPT
from gptlab.precision import precision


class Stage(GPT):
    """A stage of a GPT: some blocks, and the embedding or the head where it is the first or the last.

    Args:
        whole: the model that it is cut from; they share modules.
        layers: its blocks.
        dtype: what it computes in (`precision.py`).
        in_chunks: whether the loss may go in chunks.
    """

    def __init__(
        self, whole: GPT, layers: range, *, first: bool, last: bool, dtype: str = "float32", in_chunks: bool = True
    ) -> None:
        nn.Module.__init__(self)
        self.config, self.attention = whole.config, whole.attention
        self.layers, self.first, self.last, self.dtype, self.in_chunks = layers, first, last, dtype, in_chunks
        if first or (last and whole.lm_head is None):
            self.wte = whole.wte
        self.wpe = whole.wpe if first else None
        self.h = nn.ModuleDict({str(layer): whole.h[layer] for layer in layers})  # type: ignore[assignment]
        if last:
            self.ln_f = whole.ln_f
        self.lm_head = whole.lm_head if last else None

    def forward(  # type: ignore[override]
        self, x: Tensor, *, ids: Tensor, targets: Tensor, dropout_seed: int | None = None
    ) -> Tensor:
        """What the next stage reads, (B, T, C) float32; from the last one the sum of losses in nats, (1,) float32.

        Args:
            x: (B, T, C) of the stage before; the first reads the ids.
            ids: (B, T) int64: attention may ask where documents end.
            targets: (B, T) int64, for the last.
        """
        positions = torch.arange(ids.size(1), device=ids.device)  # (T,)
        with precision(ids.device, self.dtype):
            if self.first:
                x = self.embed(ids, positions, dropout_seed)
            x = self.through(self.blocks(), x, ids, positions, dropout_seed)
            return self.loss(self.ln_f(x), targets, "sum", in_chunks=self.in_chunks).view(1) if self.last else x

    def blocks(self) -> Iterator[tuple[int, nn.Module]]:
        """Its blocks, each with its layer."""
        return zip(self.layers, self.h.values(), strict=True)  # type: ignore[operator]


class Part(nn.Module):
    """The stages that a process holds, as one module whose parameters are named as in the whole model.

    Args:
        stages: by number, rising. An embedding that is the head too is one module to both of them.
    """

    def __init__(self, stages: dict[int, Stage]) -> None:
        super().__init__()
        self.stages = stages
        for stage in stages.values():
            for name, module in stage.named_children():
                if name != "h":
                    self.add_module(name, module)
        self.h = nn.ModuleDict({str(layer): block for stage in stages.values() for layer, block in stage.blocks()})

    def train(self, mode: bool = True) -> Self:
        """Training or evaluation, of the stages too."""
        for stage in self.stages.values():
            stage.train(mode)
        return super().train(mode)


def make_part(
    config: GPTConfig, numbers: dict[int, range], count: int, *, attention: Attention, dtype: str, in_chunks: bool
) -> Part:
    """A process's stages on the meta device, cut from a model that never takes memory.

    Args:
        numbers: the stages by number, each with its blocks.
        count: stages of the whole pipeline.
    """
    with torch.device("meta"):
        whole = GPT(config, attention=attention)
    return Part({
        number: Stage(
            whole, numbers[number], first=number == 0, last=number == count - 1, dtype=dtype, in_chunks=in_chunks
        )
        for number in sorted(numbers)
    })  # fmt: skip
