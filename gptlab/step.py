"""The training step: forward and backward over micro-batches, one optimizer step.

    step = TrainStep(model, make_optimizer(model, config), replicas, batches, config, world, micro_batch_size=8,
                     dtype="float32")
    step(0).loss

Gradients are those of the mean loss over the *global* batch: each micro-batch contributes its sum, divided by the
number of targets of the whole batch, so neither accumulation nor uneven shares tilt the mean. A step whose loss or
gradient is not finite is skipped on every process alike: AdamW would turn every weight into NaN. It moves neither the
weights nor the schedule, which counts the steps that were taken.

Left out on purpose: the loop around it (`training.py`), the sums over processes (`parallel/`), optimizers and schedules
(`optimizer.py`), precisions (`precision.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from gptlab.batches import Batches, micro_batches, share, stream_seed
from gptlab.compiling import CompiledUpdate
from gptlab.config import TrainConfig
from gptlab.native.engine import Engine
from gptlab.optimizer import clip_divisor, learning_rate, update
from gptlab.parallel.replicas import Replicas
from gptlab.parallel.world import World
from gptlab.precision import LossScaler, precision


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
        model: a GPT, compiled or not; called with (ids, targets, reduction="sum", dropout_seed=...).
        micro_batch_size: sequences a forward pass sees.
        dtype: float32, tfloat32, bfloat16 or float16 (`precision.py`).
        engine: computes loss and gradients in the model's place; `replicas` then keeps the gradients.
        compiled_update: clips and steps in the optimizer's place.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, replicas: Replicas, batches: Batches,
        config: TrainConfig, world: World, *, micro_batch_size: int, dtype: str, engine: Engine | None = None,
        compiled_update: CompiledUpdate | None = None,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.replicas, self.batches = model, optimizer, replicas, batches
        self.config, self.world, self.micro_batch_size, self.dtype = config, world, micro_batch_size, dtype
        self.engine, self.compiled_update = engine, compiled_update
        self.scaler = LossScaler() if dtype == "float16" else None
        self.skipped = 0
        """Steps so far that moved nothing."""
        count = micro_batches(config.global_batch_size, micro_batch_size)
        self.share = share(count, world.rank, world.size)
        self.portions = [len(share(count, rank, world.size)) for rank in range(world.size)]

    def __call__(self, step: int, *, stop: bool = False) -> StepResult:
        """Takes step number `step`, from 0. Collective.

        Args:
            stop: whether this process was asked to stop; the result tells all of them.
        """
        config, device, pace = self.config, self.world.device, self.world.pace
        targets_in_batch = config.global_batch_size * config.block_size
        scale = self.scaler.scale if self.scaler else 1.0
        self.replicas.zero_grad()
        if self.engine is not None:
            self.engine.begin()
        total = torch.zeros((), device=device)
        for index in self.share:
            pace.enter("windows")
            ids, targets = self.batches.micro_batch(step, index, self.micro_batch_size)  # each (b, T)
            ids, targets = ids.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            pace.enter("forward")  # the engine does both in one go
            if self.engine is not None:
                total += self.engine(ids, targets, 1 / targets_in_batch)
                continue
            self.replicas.reduce_next(index == self.share[-1])
            seed = stream_seed("dropout", config.seed, step, index) if config.dropout > 0 else None
            with precision(device, self.dtype):
                loss = self.model(ids, targets, reduction="sum", dropout_seed=seed)
            pace.enter("backward")
            (loss / (targets_in_batch / scale)).backward()
            total += loss.detach()
        pace.enter("other")
        self.replicas.finish()
        mine = total.item()  # on a GPU this waits for what was asked of it
        loss_sum, stops, *busy = self.world.sum([mine, float(stop), *pace.busy()])
        pace.compare(busy, self.portions)
        return self._update(loss_sum / targets_in_batch, step, stops > 0)

    def _update(self, loss: float, step: int, stop: bool) -> StepResult:
        """Clips and steps; the gradients are complete and the same on every process."""
        scale = self.scaler.scale if self.scaler else 1.0
        norm = nn.utils.get_total_norm(self.replicas.gradients).item() / scale
        lr = learning_rate(self.config, step - self.skipped)
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        rescaled = False
        if skipped:
            self.skipped += 1
            rescaled = self.scaler is not None and math.isfinite(loss) and self.scaler.overflowed()
        else:
            divisor = scale * clip_divisor(norm, self.config.grad_clip)
            if self.compiled_update is not None:
                self.compiled_update(lr, divisor)
            else:
                update(self.optimizer, lr=lr, divisor=divisor)
            if self.scaler:
                self.scaler.succeeded()
        return StepResult(loss, norm, lr, skipped, stop, scale if self.scaler else None, rescaled)
