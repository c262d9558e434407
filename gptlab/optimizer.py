"""How gradients become steps: AdamW or Muon, the learning rate of a step, and clipping.

    >>> from gptlab.presets import preset
    >>> from gptlab.optimizer import learning_rate
    >>> round(learning_rate(preset("tiny"), 1999), 6)    # the last of 2000: a tenth of the highest
    0.0001

AdamW (Loshchilov & Hutter 2019) runs as torch's fused kernel on every device; `fused=False` is its plain twin. Muon
(Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks") is torch's own, for the matrices of the
blocks; embeddings, head, gains and biases stay with AdamW. Its steps are scaled to the size of AdamW's (Liu et al.
2025, "Muon is scalable for LLM training", section 2.2), so that one learning rate and one decay serve both.

Gradients are divided by one number, which undoes the loss scale and clips at once; the fused kernel does so while it
reads them. Left out on purpose: when a step is skipped (`step.py`), and Muon by parts of c_attn: q, k and v are one
matrix to it, as they are to the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from gptlab.config import TrainConfig

PART = 1 << 18
"""Elements of a gradient whose squares are added up in float32."""


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step, counted from 0; positive from the first step on.

    A linear rise over warmup_iters comes first in both schedules, then until `lr_decay_iters`

    - cosine: half a cosine down to min_lr (Loshchilov & Hutter 2017, eq. 5);
    - wsd (warm-up, stable, decay; Hu et al. 2024, "MiniCPM", section 4): the highest until the last cooldown_iters
      steps, in which it falls as 1 - sqrt(share of them that is over) (Haegele et al. 2024, "Scaling laws and
      compute-optimal training beyond fixed training durations", section 3);

    and min_lr from there on. A warm-up longer than the run never ends, and no decay at all is legal.
    """
    high = config.learning_rate
    low = high / 10 if config.min_lr is None else config.min_lr
    end = config.max_iters if config.lr_decay_iters is None else config.lr_decay_iters
    if step < config.warmup_iters:
        return high * (step + 1) / (config.warmup_iters + 1)
    if step >= end:
        return low
    if config.schedule == "wsd":
        length = end // 5 if config.cooldown_iters is None else config.cooldown_iters
        start = max(end - length, config.warmup_iters)
        left = 1.0 if step < start else 1 - math.sqrt((step - start) / (end - start))
    else:
        left = 0.5 * (1 + math.cos(math.pi * (step - config.warmup_iters) / (end - config.warmup_iters)))
    return low + left * (high - low)


def make_optimizer(model: nn.Module, config: TrainConfig, *, fused: bool = True) -> Optimizer:
    """The optimizer that the config asks for, of a model. Arguments as for `optimizer_of`."""
    return optimizer_of({name: p for name, p in model.named_parameters() if p.requires_grad}, config, fused=fused)


def optimizer_of(named: dict[str, nn.Parameter], config: TrainConfig, *, fused: bool = True) -> Optimizer:
    """The optimizer that the config asks for; every parameter is in exactly one of its groups.

    Weight decay falls on matrices (two dimensions and more) alone.

    Args:
        named: by the model's names; of a matrix this process may hold some rows.
        fused: torch's fused AdamW; without, the plain loop over parameters.
    """
    hidden = [
        p for name, p in named.items()
        if config.optimizer == "muon" and name.removeprefix("transformer.").startswith("h.") and p.dim() == 2
    ]  # fmt: skip
    taken = {id(p) for p in hidden}
    rest = [p for p in named.values() if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = AdamW(
        [group for group in groups if group["params"]], lr=config.learning_rate,
        betas=(config.beta1, config.beta2), fused=fused, foreach=None if fused else False,
    )  # fmt: skip
    made: Optimizer = adamw
    if hidden:
        made = MuonWithAdamW(
            Muon(
                hidden, lr=config.learning_rate, weight_decay=config.weight_decay, momentum=config.muon_momentum,
                adjust_lr_fn="match_rms_adamw",
            ),
            adamw,
        )  # fmt: skip
    check_coverage(named, made)
    return made


def check_coverage(named: dict[str, nn.Parameter], optimizer: Optimizer) -> None:
    """Fails unless each parameter is in exactly one group, and nothing else is in any."""
    counts = Counter(id(p) for group in optimizer.param_groups for p in group["params"])
    wrong = [name for name, p in named.items() if counts[id(p)] != 1]
    assert not wrong, f"not in exactly one group of the optimizer: {', '.join(wrong)}"
    assert len(counts) == len(named), "the optimizer has parameters that the model does not train"


class MuonWithAdamW(Optimizer):
    """Muon for some parameters and AdamW for the others, with one state and one list of groups."""

    def __init__(self, muon: Muon, adamw: AdamW) -> None:
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self.muon, self.adamw = muon, adamw

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, divisor: float = 1.0) -> None:  # type: ignore[override]
        """A step of both, with the gradients over `divisor`."""
        assert closure is None, "a step here is not evaluated again"
        count = len(self.muon.param_groups)
        self.muon.state = self.adamw.state = self.state  # a checkpoint was loaded into it, perhaps
        self.muon.param_groups, self.adamw.param_groups = self.param_groups[:count], self.param_groups[count:]
        step_divided(self.muon, divisor)
        step_divided(self.adamw, divisor)


def update(optimizer: Optimizer, *, lr: float, divisor: float = 1.0) -> None:
    """Takes a step with the gradients over `divisor`, which are so divided afterwards."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    if isinstance(optimizer, MuonWithAdamW):
        optimizer.step(divisor=divisor)
    else:
        step_divided(optimizer, divisor)


def squares(gradients: Iterable[Tensor]) -> float:
    """Sum of the squares of gradients' elements: what processes add up before they take the root.

    On a CPU by parts: torch's norm there adds a tensor's squares up one after another in float32, and is off by 1e-4 of
    itself at ten million, so that the same gradients in other tensors, as other processes hold them, would be clipped
    otherwise. A product of each part with itself is exact to 1e-7, and sooner done.
    """
    found = list(gradients)
    if any(gradient.device.type != "cpu" for gradient in found):
        return float(nn.utils.get_total_norm(found).item()) ** 2
    parts = [part for gradient in found for part in gradient.flatten().split(PART)]
    return math.fsum(torch.dot(part, part).item() for part in parts)


def clip_divisor(norm: float, limit: float) -> float:
    """What gradients of a norm are to be divided by so that it stays within a limit; 0 is no limit.

    1 where they are within, else as torch's clip_grad_norm_ has it.
    """
    return max(1.0, (norm + 1e-6) / limit) if limit > 0 else 1.0


def step_divided(optimizer: Optimizer, divisor: float) -> None:
    """One optimizer's step with the gradients over `divisor`: within the fused kernel, or before the plain one."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if divisor == 1.0 or not parameters:
        optimizer.step()
    elif optimizer.defaults.get("fused"):
        scaled: Any = optimizer  # where torch's gradient scaler leaves its scale for fused kernels
        scaled.grad_scale = torch.full((), divisor, dtype=torch.float32, device=parameters[0].device)
        try:
            optimizer.step()
        finally:
            del scaled.grad_scale
    else:
        with torch.no_grad():
            for p in parameters:
                p.grad.div_(divisor)
        optimizer.step()
