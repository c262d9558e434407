"""Whether one set of tensors is as right as another: the rule of torch's dynamo benchmarks, and what it leaves open.

    >>> import torch
    >>> from gptlab.benchmark.accuracy import compare
    >>> golden = {"loss": torch.ones(3, dtype=torch.float64)}
    >>> eager = {"loss": torch.ones(3)}
    >>> compare(golden, eager, {"loss": torch.ones(3) * 1.5}, half=False).status
    'fail_accuracy'

The rule (pytorch/benchmarks/dynamo): a float64 run is golden; a tensor passes if it is close to golden's within a
tolerance, or if its root mean square error is at most m times that of an eager run in the same precision, plus a tenth
of the tolerance. Here errors are relative to the golden tensor's own root mean square: a gradient of 1e-5 must be as
right as a logit of 10. What the rule cannot see has a status of its own: a gradient that is not there, numbers that are
not finite.

Left out on purpose: making the tensors (`inside/judging.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = {False: 1e-4, True: 1e-3}
"""By whether the products are of half types."""
SMALL = 1000
"""Elements under which a tensor is small, and its errors few enough to scatter."""

STATUSES = {
    "pass": "as right as eager",
    "fail_accuracy": "a tensor is farther from golden than rounding explains",
    "missing_gradient": "a parameter has no gradient where golden has one",
    "not_finite": "a tensor is not finite where golden is",
    "runs_differ": "two runs of the benched side give different numbers",
    "ranks_differ": "the processes hold different numbers after a step",
    "tokens_differ": "greedy tokens are others than rounding explains",
    "timed_differ": "the two sides' losses went apart while they were timed",
    "eager_two_runs_differ": "two eager runs give different numbers: nothing can be said",
    "eager_fail_to_run": "the eager side failed",
    "fail_to_run": "the benched side failed",
    "OOM": "memory ran out",
    "timeout": "it took longer than its limit",
    "unavailable": "it cannot run here as asked",
}
"""What a row can come to. The first ones ran; `pass` alone is right."""
RAN = tuple(STATUSES)[: tuple(STATUSES).index("eager_two_runs_differ")]


@dataclass(frozen=True)
class Verdict:
    """What a comparison came to."""

    status: str = "pass"
    note: str = ""
    """One sentence, naming the tensor."""
    worst: str = ""
    """The tensor that is nearest to its limit or farthest over it."""
    figures: dict[str, float] = field(default_factory=dict)
    """`rmse` and `eager_rmse` of the worst tensor, relative to golden, `limit` for the first, `compared` tensors. Of
    tokens: `logit_gap` of the worst choice and its `limit`, `first_difference` from eager's tokens and `first_gap`."""

    def to_dict(self) -> dict[str, Any]:
        """Columns of a row."""
        columns = {"accuracy": self.status, "note": self.note, "worst_tensor": self.worst}
        return columns | self.figures


def error(golden: Tensor, other: Tensor) -> float:
    """Root mean square error, relative to golden's root mean square (absolute where that is 0)."""
    scale = _rms(golden) or 1.0
    return _rms(other.double() - golden) / scale


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def limit(eager_error: float, elements: int, *, half: bool) -> float:
    """The largest error that passes where the tensor is not within the tolerance element by element."""
    factor = 3.0 if half or elements < SMALL else 2.0
    return factor * eager_error + TOLERANCE[half] / 10


def _close(golden: Tensor, other: Tensor, tolerance: float) -> bool:
    """allclose, with the absolute part relative to golden's root mean square."""
    gap = (other.double() - golden).abs()
    return bool((gap <= tolerance * ((_rms(golden) or 1.0) + golden.abs())).all())


def compare(
    golden: Mapping[str, Tensor], eager: Mapping[str, Tensor], candidate: Mapping[str, Tensor], *, half: bool
) -> Verdict:
    """Holds every tensor of golden against the candidate's of the same name.

    Args:
        golden: float64. Names that begin with `grad ` are gradients.
        eager: the same in the candidate's precision, computed plainly; errors of the same size are no fault.
    """
    for name, wanted in golden.items():
        there = name in candidate and (candidate[name] != 0).any()
        if name.startswith("grad ") and not there and (wanted != 0).any():
            return Verdict("missing_gradient", f"{name} is missing, and golden's is not zero.", name)
    for name, wanted in golden.items():
        if not candidate[name].isfinite().all() and wanted.isfinite().all():
            bad = 1 - float(candidate[name].isfinite().double().mean())
            also = "" if eager[name].isfinite().all() else " (eager overflows, too)"
            return Verdict("not_finite", f"{bad:.1%} of {name} is not finite, and golden's is{also}.", name)
    tolerance = TOLERANCE[half]
    ranked: list[tuple[float, str, float, float, float]] = []
    for name, wanted in golden.items():
        found = candidate[name]
        if found.shape != wanted.shape:
            return Verdict(
                "fail_accuracy", f"{name} has the shape {tuple(found.shape)}, golden's {tuple(wanted.shape)}.", name
            )
        mine, theirs = error(wanted, found), error(wanted, eager[name])
        most = limit(theirs, wanted.numel(), half=half)
        share = mine / most
        if share > 1 and _close(wanted, found, tolerance):
            share = 1.0
        ranked.append((share if math.isfinite(share) else math.inf, name, mine, theirs, most))
    if not ranked:
        return Verdict(figures={"compared": 0})
    share, name, mine, theirs, most = max(ranked)
    figures = {"rmse": mine, "eager_rmse": theirs, "limit": most, "compared": len(ranked)}
    if share <= 1:
        return Verdict("pass", "", name, figures)
    wrong = sum(entry[0] > 1 for entry in ranked)
    note = (
        f"{name} is off by {mine:.2e} of its size, where {most:.2e} is allowed and eager is off by {theirs:.2e} "
        f"({wrong} of {len(ranked)} tensors are over)."
    )
    return Verdict("fail_accuracy", note, name, figures)


def first_difference(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor that is not the same, bit for bit, in two runs; None where all are."""
    import torch

    for name, wanted in first.items():
        found = second.get(name)
        if found is None or not torch.equal(wanted.nan_to_num(), found.nan_to_num()):
            return name
    return None


def apart(first: Mapping[str, Tensor], second: Mapping[str, Tensor], *, half: bool) -> tuple[str, float] | None:
    """The tensor that differs most between two runs of one side, and by how much of its size, if that is more than the
    tolerance."""
    both = [(name, wanted) for name, wanted in first.items() if name in second and wanted.isfinite().all()]
    gap, name = max(((error(wanted.double(), second[name]), name) for name, wanted in both), default=(0.0, ""))
    return (name, gap) if gap > TOLERANCE[half] else None
