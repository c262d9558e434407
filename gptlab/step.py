"""The training step: forward and backward over micro-batches, one optimizer step.

    >>> from gptlab.config import preset
    >>> from gptlab.step import learning_rate
    >>> round(learning_rate(preset("tiny"), step=1999), 6)    # the last of 2000: a tenth of the highest
    0.0001

Gradients are those of the mean loss over the *global* batch: each micro-batch contributes its sum, divided by the
number of targets of the whole batch, so neither accumulation nor uneven shares tilt the mean. A step whose loss or
gradient is not finite is skipped on every process alike: AdamW would turn every weight into NaN.

Left out on purpose: the loop around it (`training.py`) and the sums over processes (`parallel/`).
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

import torch
from torch import nn

from gptlab.batches import Batches, micro_batches, share, stream_seed
from gptlab.config import TrainConfig
from gptlab.parallel.replicas import Replicas
from gptlab.parallel.world import World


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step, counted from 0: a linear rise over warmup_iters, then a half cosine down to min_lr
    at lr_decay_iters (Loshchilov & Hutter 2017, eq. 5), then min_lr. It is positive from the first step on."""
    low = config.learning_rate / 10 if config.min_lr is None else config.min_lr
    end = config.max_iters if config.lr_decay_iters is None else config.lr_decay_iters
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if step >= end:
        return low
    progress = (step - config.warmup_iters) / (end - config.warmup_iters)  # 0..1
    return low + 0.5 * (1 + math.cos(math.pi * progress)) * (config.learning_rate - low)


def make_optimizer(model: nn.Module, config: TrainConfig, *, fused: bool = True) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019); weight decay on matrices (two dimensions and more) alone.

    Every parameter is in exactly one group.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.dim() >= 2]
    kept = [p for p in parameters if p.dim() < 2]
    assert len(decayed) + len(kept) == len(parameters)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=fused,
        foreach=None if fused else False,
    )


def precision(device: torch.device, dtype: str) -> contextlib.AbstractContextManager[None]:
    """Autocast for bfloat16, nothing for float32. Weights stay float32 in both."""
    if dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


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


class TrainStep:
    """One optimizer step over the global batch.

    Args:
        model: a GPT, compiled or not; called with (ids, targets, reduction="sum", dropout_seed=...).
        micro_batch_size: sequences a forward pass sees.
        dtype: float32, or bfloat16 through autocast.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, replicas: Replicas, batches: Batches,
        config: TrainConfig, world: World, *, micro_batch_size: int, dtype: str,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.replicas, self.batches = model, optimizer, replicas, batches
        self.config, self.world, self.micro_batch_size, self.dtype = config, world, micro_batch_size, dtype
        self.share = share(micro_batches(config.global_batch_size, micro_batch_size), world.rank, world.size)

    def __call__(self, step: int, *, stop: bool = False) -> StepResult:
        """Takes step number `step`, from 0. Collective.

        Args:
            stop: whether this process was asked to stop; the result tells all of them.
        """
        config, device = self.config, self.world.device
        targets_in_batch = config.global_batch_size * config.block_size
        self.replicas.zero_grad()
        total = torch.zeros((), device=device)
        for index in self.share:
            ids, targets = self.batches.micro_batch(step, index, self.micro_batch_size)  # each (b, T)
            ids, targets = ids.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            self.replicas.reduce_next(index == self.share[-1])
            seed = stream_seed("dropout", config.seed, step, index) if config.dropout > 0 else None
            with precision(device, self.dtype):
                loss = self.model(ids, targets, reduction="sum", dropout_seed=seed)
            (loss / targets_in_batch).backward()
            total += loss.detach()
        self.replicas.finish()
        loss_sum, stops = self.world.sum([total.item(), float(stop)])
        return self._update(loss_sum / targets_in_batch, step, stops > 0)

    def _update(self, loss: float, step: int, stop: bool) -> StepResult:
        """Clips and steps; the gradients are complete and the same on every process."""
        gradients = [p.grad for p in self.replicas.parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        lr, norm_value = learning_rate(self.config, step), norm.item()
        skipped = not (math.isfinite(loss) and math.isfinite(norm_value))
        if not skipped:
            if self.config.grad_clip > 0:
                nn.utils.clip_grads_with_norm_(self.replicas.parameters, self.config.grad_clip, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        return StepResult(loss, norm_value, lr, skipped, stop)
