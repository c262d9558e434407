"""A stage of a GPT: the model with parts missing, and the stages that a process holds as one module.

    part = make_part(config, {0: range(0, 5)}, 3, attention="sdpa", dtype="float32", in_chunks=True)

What a stage does is written once, in `model.py`, and its parameters bear the whole model's names. Left out on purpose:
where the model is cut (`cuts.py`), models that are not ours.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor, nn

from gptlab.attention import Attention
from gptlab.config import GPTConfig
from gptlab.heads import Labels, SequenceClassifier, last_position, tally_scores
from gptlab.model import GPT
from gptlab.precision import precision


class Stage(GPT):
    """A stage of a GPT: some blocks, and the embedding or the head where it is the first or the last.

    Args:
        whole: the model that it is cut from; they share modules.
        layers: its blocks.
        dtype: what it computes in (`precision.py`).
        in_chunks: whether the loss may go in chunks.
        scored: whether the last one gives what a classifier's score reads, in place of a loss.
    """

    def __init__(
        self, whole: GPT, layers: range, *, first: bool, last: bool, dtype: str = "float32", in_chunks: bool = True,
        scored: bool = False,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        self.config, self.attention = whole.config, whole.attention
        self.layers, self.first, self.last, self.dtype, self.in_chunks = layers, first, last, dtype, in_chunks
        self.scored = scored
        if first or (last and whole.lm_head is None and not scored):
            self.wte = whole.wte
        self.wpe = whole.wpe if first else None
        self.h = nn.ModuleDict({str(layer): whole.h[layer] for layer in layers})  # type: ignore[assignment]
        if last:
            self.ln_f = whole.ln_f
        self.lm_head = whole.lm_head if last and not scored else None

    def forward(  # type: ignore[override]
        self, x: Tensor, *, ids: Tensor, targets: Tensor, dropout_seed: int | None = None, tally: bool = False
    ) -> Tensor:
        """What the next stage reads, (B, T, C) float32; from the last one the sum of losses in nats, (1,) float32.

        Args:
            x: (B, T, C) of the stage before; the first reads the ids.
            ids: (B, T) int64: attention may ask where documents end.
            targets: (B, T) int64, for the last.
            tally: of a classifier's stages alone (`ScoredStage`).
        """
        positions = torch.arange(ids.size(1), device=ids.device)  # (T,)
        with precision(ids.device, self.dtype):
            if self.first:
                x = self.embed(ids, positions, dropout_seed)
            x = self.through(self.blocks(), x, ids, positions, dropout_seed)
            if not self.last:
                return x
            x = self.ln_f(x)
            return x if self.scored else self.loss(x, targets, "sum", in_chunks=self.in_chunks).view(1)

    def blocks(self) -> Iterator[tuple[int, nn.Module]]:
        """Its blocks, each with its layer."""
        return zip(self.layers, self.h.values(), strict=True)  # type: ignore[operator]


class ScoredStage(nn.Module):
    """A stage of a classifier: of its GPT, and of the last one also the score.

    Args:
        transformer: the GPT's stage.
        score: of the last.
        pad_id: the id that fills rows up.
    """

    def __init__(self, transformer: Stage, score: nn.Module, pad_id: int | None) -> None:
        super().__init__()
        self.config, self.first, self.last = transformer.config, transformer.first, transformer.last
        self.transformer, self.pad_id = transformer, pad_id
        self.score = score if self.last else None

    def forward(
        self, x: Tensor, *, ids: Tensor, targets: Tensor, dropout_seed: int | None = None, tally: bool = False
    ) -> Tensor:
        """As for `Stage`.

        Args:
            targets: (B,) labels, for the last.
            tally: whether the last one gives (2,), with the number of labels that it has right.
        """
        x = self.transformer(x, ids=ids, targets=targets, dropout_seed=dropout_seed)
        if self.score is None:
            return x
        with precision(ids.device, self.transformer.dtype):
            scores = self.score(x[torch.arange(ids.size(0), device=ids.device), last_position(ids, self.pad_id)])
            found = tally_scores(scores, targets)  # (2,)
        return found if tally else found[:1]


class Part(nn.Module):
    """The stages that a process holds, as one module whose parameters are named as in the whole model.

    Args:
        stages: by number, rising. An embedding that is the head too is one module to both of them, or has a twin.
    """

    stages: dict[int, Stage] | dict[int, ScoredStage]

    def __init__(self, stages: dict[int, Stage]) -> None:
        super().__init__()
        self.stages = stages
        for stage in stages.values():
            for name, module in stage.named_children():
                if name != "h" and name not in self._modules:
                    self.add_module(name, module)
        self.h = nn.ModuleDict({str(layer): block for stage in stages.values() for layer, block in stage.blocks()})

    def train(self, mode: bool = True) -> Self:
        """Training or evaluation, of the stages too."""
        for stage in self.stages.values():
            stage.train(mode)
        return super().train(mode)


class ScoredPart(Part):
    """The same of a classifier's stages."""

    def __init__(self, stages: dict[int, ScoredStage]) -> None:
        nn.Module.__init__(self)
        self.stages = stages
        self.transformer = Part({number: stage.transformer for number, stage in stages.items()})
        for stage in stages.values():
            if stage.score is not None:
                self.score = stage.score


def make_part(
    config: GPTConfig, numbers: dict[int, range], count: int, *, attention: Attention, dtype: str, in_chunks: bool,
    labels: Labels | None = None, twins: bool = False,
) -> Part:  # fmt: skip
    """A process's stages on the meta device, cut from a model that never takes memory.

    Args:
        numbers: the stages by number, each with its blocks.
        count: stages of the whole pipeline.
        labels: of a classifier.
        twins: whether an embedding that is the head too is a module of its own in either stage.
    """
    with torch.device("meta"):
        classifier = None if labels is None else SequenceClassifier(
            config, labels.count, pad_id=labels.pad_id, attention=attention
        )  # fmt: skip
        whole = GPT(config, attention=attention) if classifier is None else classifier.transformer
    stages = {
        number: Stage(
            whole, numbers[number], first=number == 0, last=number == count - 1, dtype=dtype, in_chunks=in_chunks,
            scored=classifier is not None,
        )
        for number in sorted(numbers)
    }  # fmt: skip
    if twins and {0, count - 1} <= set(stages) and whole.lm_head is None and classifier is None:
        stages[count - 1].wte = copy.deepcopy(whole.wte)
    if classifier is None:
        return Part(stages)
    return ScoredPart({n: ScoredStage(stage, classifier.score, classifier.pad_id) for n, stage in stages.items()})
