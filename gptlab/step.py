"""The training step: forward and backward over micro-batches, one optimizer step.

    work = Work(config, batches, world, micro_batch_size=8, dtype="float32")
    step = TrainStep(Replicated(model, work), work)
    step(0).loss

Gradients are those of the mean loss over the *global* batch: each micro-batch contributes its sum, divided by the
number of targets of the whole batch, so neither accumulation nor uneven shares tilt the mean. A step whose loss or
gradient is not finite is skipped on every process alike: AdamW would turn every weight into NaN. It moves neither the
weights nor the schedule, which counts the steps that were taken.

Left out on purpose: the loop around it (`training.py`), how gradients come about (`parallel/`), optimizers and
schedules (`optimizer.py`), precisions (`precision.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gptlab.compiling import CompiledUpdate
from gptlab.optimizer import clip_divisor, learning_rate, update
from gptlab.parallel.strategy import Strategy, Work
from gptlab.precision import LossScaler


@dataclass(frozen=True)
class StepResult:
    """What a step did."""

    loss: float
    """Mean nats a token over the global batch, before the update."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    lr: float
    """Learning rate of this step."""
    skipped: bool
    """Whether it was not finite, and moved nothing."""
    stop: bool
    """Whether some process was asked to stop."""
    scale: float | None = None
    """float16's factor on the loss in this step; None in other precisions."""
    rescaled: bool = False
    """Whether it was skipped for a gradient that a smaller factor, from the next step on, may mend."""


class TrainStep:
    """One optimizer step over the global batch.

    Args:
        strategy: computes loss and gradients.
        compiled_update: clips and steps in the optimizer's place.
    """

    def __init__(self, strategy: Strategy, work: Work, *, compiled_update: CompiledUpdate | None = None) -> None:
        self.strategy, self.work, self.compiled_update = strategy, work, compiled_update
        self.scaler = LossScaler() if work.dtype == "float16" else None
        self.skipped = 0
        """Steps so far that moved nothing."""
        self.portions = [len(work.share_of(rank)) for rank in range(work.world.size)]

    def __call__(self, step: int, *, stop: bool = False) -> StepResult:
        """Takes step number `step`, from 0. Collective.

        Args:
            stop: whether this process was asked to stop; the result tells all of them.
        """
        total = self.strategy.compute(step, self.scaler.scale if self.scaler else 1.0)
        pace = self.work.world.pace
        loss_sum, stops, *busy = self.work.world.sum([total, float(stop), *pace.busy()])
        pace.compare(busy, self.portions)
        return self._update(loss_sum / self.work.targets, step, stops > 0)

    def _update(self, loss: float, step: int, stop: bool) -> StepResult:
        """Clips and steps; the gradients are complete and the same on every process."""
        scale = self.scaler.scale if self.scaler else 1.0
        norm = self.strategy.norm() / scale
        lr = learning_rate(self.work.config, step - self.skipped)
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        rescaled = False
        if skipped:
            self.skipped += 1
            rescaled = self.scaler is not None and math.isfinite(loss) and self.scaler.overflowed()
        else:
            divisor = scale * clip_divisor(norm, self.work.config.grad_clip)
            if self.compiled_update is not None:
                self.compiled_update(lr, divisor)
            else:
                update(self.strategy.optimizer, lr=lr, divisor=divisor)
            if self.scaler:
                self.scaler.succeeded()
        return StepResult(loss, norm, lr, skipped, stop, scale if self.scaler else None, rescaled)
