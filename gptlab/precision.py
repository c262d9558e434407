"""In which numbers a step computes: float32, tfloat32, bfloat16, or float16 with a scaled loss.

    >>> import torch
    >>> from gptlab.precision import precision
    >>> with precision(torch.device("cpu"), "bfloat16"):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.bfloat16

Weights, gradients and the optimizer's state are float32 in all of them (Micikevicius et al. 2018, "Mixed precision
training"). bfloat16 has float32's range. float16 ends at 65504 and loses what is under 6e-8, so the loss is multiplied
before backward and the gradients divided after it.

Left out on purpose: which of them a device can do (`hardware.resolve_dtype`), and eight-bit numbers.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Precisions in which matrix products take narrower numbers than the weights are."""


def precision(device: torch.device, dtype: str) -> contextlib.AbstractContextManager[None]:
    """What a forward pass runs under: autocast for bfloat16 and float16, nothing for the others."""
    if dtype not in AUTOCAST:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST[dtype])


def allow_tfloat32(dtype: str) -> None:
    """Lets this process's products of float32 matrices round their inputs to tfloat32 on a GPU, or forbids it: a
    backward pass, which runs outside of `precision`, is to be as the forward pass was."""
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tfloat32"


@dataclass
class LossScaler:
    """The factor on a float16 loss: halved when gradients overflow, doubled after many steps that did not.

    The rule and the numbers are torch.amp.GradScaler's, whose scale this equals. It is our own since the step knows
    from the gradient's norm whether it overflowed, and divides while it clips: GradScaler would read and write every
    gradient once more. Only gradients move it: a loss that is not finite is not mended by a smaller factor.
    """

    scale: float = 2.0**16
    good_steps: int = 0
    """Since the scale last changed."""
    growth_interval: int = 2000

    def overflowed(self) -> bool:
        """Halves the scale after gradients that are not finite; false where it is 1 and cannot mend them."""
        self.good_steps = 0
        if self.scale <= 1.0:
            return False
        self.scale = max(1.0, self.scale / 2)
        return True

    def succeeded(self) -> None:
        """Counts a step that was taken."""
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale, self.good_steps = min(2 * self.scale, 2.0**60), 0

    def state(self) -> dict[str, float]:
        """Plain values for a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def restore(self, state: dict[str, float]) -> None:
        """Goes on from what `state` gave."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
