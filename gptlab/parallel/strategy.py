"""What the training step knows of how it is spread over processes: a strategy, and the work that it is given.

    work = Work(config, batches, world, micro_batch_size=8, dtype="float32")
    strategy = Replicated(model, work)      # or another one
    loss_sum = strategy.compute(0, 1.0)     # forward, backward and sums: gradients are complete
    strategy.norm()

A strategy holds this process's part of the model and its optimizer. The step, the loop, evaluation and checkpoints know
nothing else of it, so each is written once. Parameters bear the same names everywhere, and `gather` and `load` speak of
the whole model: a checkpoint is the same file whatever wrote it.

Left out on purpose: the strategies themselves, one a file beside this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gptlab.batches import Feed, micro_batches, share, stream_seed
from gptlab.config import TrainConfig
from gptlab.heads import Labels
from gptlab.parallel.world import World

Files = Mapping[str, Mapping[str, Tensor]]
"""A training state: tensors by file, then by name, as `checkpoint.tensors` gives them."""


@dataclass(frozen=True)
class Work:
    """What a step has to compute, however it is spread."""

    config: TrainConfig
    batches: Feed
    world: World
    micro_batch_size: int
    """Sequences a forward pass sees."""
    dtype: str
    """float32, tfloat32, bfloat16 or float16 (`precision.py`)."""
    labels: Labels | None = None
    """What a classifier has besides; None of a model of language."""

    @property
    def count(self) -> int:
        """Micro-batches of the global batch."""
        return micro_batches(self.config.global_batch_size, self.micro_batch_size)

    @property
    def share(self) -> range:
        """Those of this process's replica; may be empty."""
        return self.share_of(self.world.rank)

    def share_of(self, rank: int) -> range:
        """Those of a rank's replica."""
        return share(self.count, rank // self.world.stages, self.world.replicas)

    @property
    def targets(self) -> int:
        """Targets of the global batch, over which the loss is a mean."""
        return self.batches.targets

    def micro_batch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Ids (up to micro_batch_size, T) and targets, the same or (up to micro_batch_size,) labels, of a micro-batch,
        int64 on this process's device.

        The process's pace is told that a forward pass follows.
        """
        self.world.pace.enter("windows")
        ids, targets = self.batches.micro_batch(step, index, self.micro_batch_size)
        device = self.world.device
        both = ids.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        self.world.pace.enter("forward")
        return both

    def dropout_seed(self, step: int, index: int) -> int | None:
        """What a micro-batch draws its dropout from; None where nothing is dropped."""
        return stream_seed("dropout", self.config.seed, step, index) if self.config.dropout > 0 else None


class Scorer(Protocol):
    """What evaluation knows of a model."""

    @property
    def part(self) -> nn.Module:
        """What this process holds of the model; parameters are named as in the whole one."""

    @property
    def score_rows(self) -> int:
        """Most sequences of a call of `score`."""

    @property
    def collective_score(self) -> bool:
        """Whether `score` is collective: then each call has exactly `score_rows` sequences, and all processes call it
        equally often; sequences too many have no targets."""

    def score(self, ids: Tensor, targets: Tensor) -> Tensor:
        """`heads.tally` of sequences: their summed loss and, of a classifier, how many it classes rightly; without
        gradients. In a pipeline 0 on all stages but one.

        Args:
            ids: (B, T) int64 on this process's device.
            targets: (B, T) int64, or (B,) labels; -100 is left out.
        """


class Strategy(Scorer, Protocol):
    """One way to spread a step. What is marked collective is called by all processes alike, in the same order."""

    optimizer: Optimizer
    """Of this process's part."""

    @property
    def gradients(self) -> list[Tensor]:
        """This process's gradients, plain tensors, in as few as there are."""

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the whole model's parameters, by name."""

    def compute(self, step: int, scale: float) -> float:
        """Forward and backward over this process's share of the global batch. Collective.

        Afterwards gradients are complete: those of the mean loss over the global batch, times scale.

        Returns:
            A sum of losses, in nats; over all processes each target is counted once.
        """

    def norm(self) -> float:
        """Norm of the whole model's gradient, each parameter counted once; the same everywhere. Collective."""

    def observe(self) -> dict[str, Any] | None:
        """What the step that was just taken showed of this way to spread it, as plain values for the run's record, on
        the main process; None where there is nothing new to say. Collective, asked after every step."""

    def gather(self) -> Files | None:
        """The whole training state on the main process, None elsewhere. Collective. Tensors may be those that training
        goes on with: who keeps them copies them."""

    def load(self, files: Files) -> None:
        """Takes this process's part of a whole training state, or of weights alone.

        Args:
            files: with names and shapes that were checked (`checkpoint.read`).
        """
