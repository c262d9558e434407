"""The strategy `ddp`: every process holds the whole model and computes its share of the micro-batches.

    strategy = Replicated(model, work)
    strategy.compute(0, 1.0)

In a world of one it is plain training. Left out on purpose: how gradients are summed (`replicas.py`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gptlab import checkpoint
from gptlab.heads import tally
from gptlab.native.engine import Engine
from gptlab.optimizer import make_optimizer, squares
from gptlab.parallel.replicas import Replicas
from gptlab.parallel.strategy import Files, Work
from gptlab.precision import precision


class Replicated:
    """A `Strategy` over whole models.

    Args:
        model: a GPT or a classifier on this process's device; the same on all of them.
        callee: what a forward pass calls: the model, compiled perhaps; called with (ids, targets, reduction="sum",
            dropout_seed=...).
        engine: computes loss and gradients in the model's place.
        fused: whether the optimizer is a fused one.
    """

    collective_score = False

    def __init__(
        self, model: nn.Module, work: Work, *, callee: nn.Module | None = None, engine: Engine | None = None,
        fused: bool = True,
    ) -> None:  # fmt: skip
        self.part, self.work, self.engine = model, work, engine
        self.callee = model if callee is None else callee
        self.optimizer = make_optimizer(model, work.config, fused=fused)
        self.replicas = Replicas(model, work.world, keep=engine is not None)
        self.score_rows = work.micro_batch_size

    @property
    def gradients(self) -> list[Tensor]:
        """All gradients, in as few tensors as there are."""
        return self.replicas.gradients

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the parameters, by name."""
        return {name: value.shape for name, value in self.part.state_dict().items()}

    def compute(self, step: int, scale: float) -> float:
        """Forward and backward over this process's micro-batches, and the sums. Collective."""
        work, device = self.work, self.work.world.device
        self.replicas.zero_grad()
        if self.engine is not None:
            self.engine.begin()
        total = torch.zeros((), device=device)
        for index in work.share:
            ids, targets = work.micro_batch(step, index)  # each (b, T)
            if self.engine is not None:  # does both passes in one go
                total += self.engine(ids, targets, 1 / work.targets)
                continue
            self.replicas.reduce_next(index == work.share[-1])
            with precision(device, work.dtype):
                loss = self.callee(ids, targets, reduction="sum", dropout_seed=work.dropout_seed(step, index))
            work.world.pace.enter("backward")
            (loss / (work.targets / scale)).backward()
            total += loss.detach()
        work.world.pace.enter("other")
        self.replicas.finish()
        return float(total.item())

    def norm(self) -> float:
        """Norm of the gradient."""
        return math.sqrt(squares(self.gradients))

    def score(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The summed loss of sequences, and how many are classed rightly, without gradients."""
        with torch.no_grad(), precision(self.work.world.device, self.work.dtype):
            return tally(self.part, ids, targets)

    def observe(self) -> None:
        """Nothing that the metrics do not say."""

    def gather(self) -> Files | None:
        """The training state itself, on the main process."""
        return checkpoint.tensors(self.part, self.optimizer) if self.work.world.is_main else None

    def load(self, files: Files) -> None:
        """Takes over a training state, or weights alone."""
        checkpoint.load_tensors(files, self.part, self.optimizer)
