"""torch.compile over the model, or over the update of the weights too, and what it cost.

    model = compiled(model, "model")
    before = seconds()
    ...                       # steps
    seconds() - before        # spent in compilers meanwhile: no part of any step's time

`model` compiles forward and backward; `step` also clipping and the optimizer, as one graph. Compiling happens when
something is first called, and again when a guard fails: both are counted, and a run's record keeps them apart from its
training time.

Left out on purpose: the kernel of our own, which needs no torch.compile (`native/`).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def choose(asked: str, device: str, kernels: str, strategy: str = "ddp") -> tuple[str, str]:
    """`off`, `model` or `step`, and why: what cannot be compiled runs eagerly, and the reason says so."""
    if asked == "off":
        return "off", "as asked"
    if kernels == "native":
        return "off", "NOT AS ASKED: the kernel of our own is compiled already"
    if strategy != "ddp":
        return "off", f"NOT AS ASKED: torch.compile is for whole models here, and strategy is {strategy}"
    compiler = os.environ.get("CXX", "g++")
    if device == "cpu" and shutil.which(compiler) is None:
        return "off", f"NOT AS ASKED: torch.compile needs a C++ compiler on a CPU, and {compiler} was not found"
    return asked, "as asked"


def compiled(model: nn.Module, how: str) -> nn.Module:
    """The model as a step calls it; its parameters stay where they are."""
    return model if how == "off" else cast(nn.Module, torch.compile(model))


class CompiledUpdate:
    """Clipping and the optimizer's step as one compiled graph; the plain twin is `optimizer.update`.

    Args:
        optimizer: neither fused nor foreach, so that the compiler sees its arithmetic.
    """

    def __init__(self, optimizer: Optimizer, gradients: Callable[[], list[Tensor]]) -> None:
        device = optimizer.param_groups[0]["params"][0].device
        self._lr, self._divisor = (
            torch.zeros((), device=device),
            torch.ones((), device=device),
        )  # numbers would be guards

        def update() -> None:
            torch._foreach_div_(gradients(), self._divisor)
            optimizer.step()

        self._optimizer, self._update = optimizer, torch.compile(update)

    @torch.no_grad()
    def __call__(self, lr: float, divisor: float) -> None:
        """Takes a step with the gradients over `divisor`."""
        self._lr.fill_(lr)
        self._divisor.fill_(divisor)
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr
        self._update()
        for group in self._optimizer.param_groups:
            group["lr"] = lr  # a plain number, as checkpoints keep it


def seconds() -> float:
    """Seconds that torch.compile has spent in this process so far."""
    if "torch._dynamo" not in sys.modules:
        return 0.0
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent().get("total_wall_time", 0.0))


def graphs() -> int:
    """Graphs that torch.compile has made in this process so far."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
