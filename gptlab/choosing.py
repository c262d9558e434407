"""How the next id follows from the logits: the most likely one, or a draw from the likelier ones.

    >>> import torch
    >>> from gptlab.choosing import Choice
    >>> Choice(temperature=0)(torch.tensor([[0.1, 2.0, 0.3]])).tolist()
    [1]

In the order that transformers has: repetition penalty, temperature, top-k, top-p. A row's id depends on its own logits
and its own draw alone, by the inverse of its distribution, so batches and seeds repeat.

Left out on purpose: where logits and draws come from (`sampling.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gptlab.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How the next id follows from the logits."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely id."""
    top_k: int = 0
    """Only the k most likely ids are drawn (Fan et al. 2018, section 5.1); 0 for all."""
    top_p: float = 1.0
    """Only the most likely ids that together have this probability (Holtzman et al. 2020, section 3.1); 1 for all."""
    repetition_penalty: float = 1.0
    """Above 1, ids that the row has already lose: logits are divided by it, or multiplied where negative (Keskar et al.
    2019, section 4.1); below 1 they gain."""

    def __post_init__(self) -> None:
        for name, legal, bounds in (
            ("temperature", 0 <= self.temperature < math.inf, "of 0 or more"),
            ("top_k", self.top_k >= 0, "of 0 or more"),
            ("top_p", 0 <= self.top_p <= 1, "from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0"),
        ):
            if not legal:
                raise ConfigError(f"{name} {getattr(self, name)} is out of range: give a value {bounds}.")

    def __call__(self, logits: Tensor, seen: Tensor | None = None, draws: Tensor | None = None) -> Tensor:
        """The next id of each row.

        Args:
            logits: (B, V).
            seen: (B, V) bool, the ids that each row has; needed with a repetition penalty.
            draws: (B,) float64 in [0, 1), one a row; needed with a temperature.

        Returns:
            (B,) int64.

        Raises:
            ConfigError: logits that are no numbers, as a diverged model has them.
        """
        logits = logits.float()
        if seen is not None:
            penalty = self.repetition_penalty
            logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        largest, best = logits.max(-1, keepdim=True)  # each (B, 1)
        if not largest.isfinite().all():
            raise ConfigError("The model's logits are not finite: it has diverged, so sample an earlier checkpoint.")
        if self.temperature == 0:
            return best.squeeze(1)
        assert draws is not None
        ids = None  # (B, k), where candidates are sorted
        if self.top_p < 1:
            logits, ids = logits.sort(descending=True, stable=True)
            if self.top_k:
                logits, ids = logits[:, : self.top_k], ids[:, : self.top_k]
        elif 0 < self.top_k < logits.size(-1):
            logits, ids = logits.topk(self.top_k)
        # In float64, and the largest at 0, so that no temperature overflows.
        scaled = (logits.double() - largest) / self.temperature
        mass = torch.softmax(scaled, -1).cumsum(-1)  # (B, k)
        if self.top_p < 1:  # an id is in while those before it do not have the probability yet; the first always is
            before = F.pad(mass[:, :-1], (1, 0))
            last = (before < self.top_p).sum(-1, keepdim=True).clamp(min=1) - 1  # (B, 1)
            whole = mass.gather(1, last)
        else:
            whole = mass[:, -1:]
        # The first id whose mass is above the draw: one without probability never is.
        below = torch.nextafter(whole, torch.zeros_like(whole))
        found = torch.searchsorted(mass, torch.minimum(draws[:, None].to(mass) * whole, below), right=True)  # (B, 1)
        return (found if ids is None else ids.gather(1, found)).squeeze(1)
