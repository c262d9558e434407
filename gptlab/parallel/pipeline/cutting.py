"""Where a GPT is cut into stages, and a stage of it.

    >>> from gptlab.presets import preset
    >>> from gptlab.parallel.pipeline.cutting import layers_of_stages
    >>> layers_of_stages(preset("gpt2"), stages=3)    # the head costs as much as four blocks and a half
    [range(0, 5), range(5, 11), range(11, 12)]

By hand (`split`), or into stages whose dearest is as cheap as can be. A stage is a GPT with parts missing: what it does
is written once, in `model.py`, and its parameters bear the whole model's names.

Left out on purpose: what is a legal cut (`spread.py`), models that are not ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Self

import torch
from torch import Tensor, nn

from gptlab.attention import Attention
from gptlab.config import GPTConfig
from gptlab.counts import attention_flops_per_token, block_shapes, logit_columns
from gptlab.heads import Labels, SequenceClassifier, last_position, tally_scores
from gptlab.model import GPT
from gptlab.precision import precision
from gptlab.spread import cut_places, split_points


def piece_costs(config: GPTConfig) -> tuple[float, float, float]:
    """FLOPs of training, a token, of the embedding, of a block and of the head.

    A block's and the head's are those of `counts.flops_per_token`; the embedding has no product: reading a row, adding
    a position and adding its gradient are three operations a number.
    """
    block = 6 * sum(shape[0] * shape[1] for shape in block_shapes(config).values() if len(shape) == 2)
    block += attention_flops_per_token(config) // config.n_layer
    return 3.0 * config.n_embd, float(block), 6.0 * logit_columns(config) * config.n_embd


def layers_of_stages(config: GPTConfig, stages: int, split: str | None = None) -> list[range]:
    """The blocks of each stage. The first has the embedding besides, the last the head; either may have no block.

    Args:
        split: the cuts as text; None balances the stages by cost.
    """
    L = config.n_layer
    places = _balanced(config, stages) if split is None else cut_places(split_points(split), L)
    assert len(places) == stages - 1, f"{len(places)} cuts for {stages} stages"
    return [range(start, end) for start, end in zip([0, *places], [*places, L], strict=True)]


def _balanced(config: GPTConfig, stages: int) -> list[int]:
    """Cuts whose dearest stage is the cheapest that there is; of equal ones those with the most even stages."""
    L = config.n_layer
    embedding, block, head = piece_costs(config)

    @cache
    def best(start: int, left: int) -> tuple[float, float, tuple[int, ...]]:
        """Cost of the dearest stage, sum of squared costs, and cuts, of blocks from `start` in `left` stages."""
        first = embedding if left == stages else 0.0
        if left == 1:
            cost = first + (L - start) * block + head
            return cost, cost**2, ()
        found = []
        # Only the first and the last stage may be without a block, so that cuts differ.
        for end in range(start if left == stages else start + 1, L + 1 - max(0, left - 2)):
            cost = first + (end - start) * block
            dearest, squares, cuts = best(end, left - 1)
            found.append((max(cost, dearest), squares + cost**2, (end, *cuts)))
        return min(found)

    return list(best(0, stages)[2])


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
        self.tied = last and whole.lm_head is None and not scored
        if first or self.tied:
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

    tied = False
    """A score is no embedding."""

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
        stages: by number, rising. An embedding that is the head too is one module to both of them.
    """

    stages: dict[int, Stage] | dict[int, ScoredStage]

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
    labels: Labels | None = None,
) -> Part:  # fmt: skip
    """A process's stages on the meta device, cut from a model that never takes memory.

    Args:
        numbers: the stages by number, each with its blocks.
        count: stages of the whole pipeline.
        labels: of a classifier.
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
    if classifier is None:
        return Part(stages)
    return ScoredPart({n: ScoredStage(stage, classifier.score, classifier.pad_id) for n, stage in stages.items()})
