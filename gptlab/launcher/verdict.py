"""Whether a run that lost a worker is worth another attempt.

What is certain to come again ends the run: an exception that came twice at the same step, or a setting that a worker
refuses. What may pass (a worker killed for memory, by hand, by a failing machine) is tried again, as long as a new
checkpoint comes between every eight of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

FRUITLESS = 8
"""Failures without a new checkpoint between them, of which the last ends the run."""
ECHO = re.compile(r"[Cc]onnection|[Pp]eer|[Bb]roken pipe|NCCL|nccl|[Ss]ocket")
"""Words of an exception whose cause is another rank's end."""


@dataclass(frozen=True)
class Failure:
    """Why an attempt ended early: the error of the rank that failed first."""

    rank: int | None
    step: int | None
    """Last step that was done; None where none was."""
    type: str
    message: str
    checkpoint: str | None = None
    """Name of the newest checkpoint at that time."""
    by_signal: bool = False
    traceback: str = field(default="", repr=False)
    """Of the exception; for a crash, the end of what the rank wrote to its error stream."""

    def repeats(self, other: Failure) -> bool:
        """Whether both are the same exception at the same step; numbers within (ports, addresses) may differ."""
        if self.by_signal or other.by_signal or self.step != other.step:
            return False
        return (self.type, _shape(self.message)) == (other.type, _shape(other.message))

    def to_dict(self) -> dict[str, Any]:
        """For error.json and result.json."""
        return {
            "rank": self.rank, "step": self.step, "type": self.type, "message": self.message,
            "traceback": self.traceback,
        }  # fmt: skip


def reason_to_end(failures: Sequence[Failure]) -> str | None:
    """Why no further attempt should follow the last of these, in a few words; None where one should."""
    *before, last = failures
    if last.type == "ConfigError":
        return "another attempt would be refused too"
    if any(last.repeats(failure) for failure in before):
        return "the same error came twice at the same step"
    fruitless = [failure for failure in failures if failure.checkpoint == last.checkpoint]
    if len(fruitless) >= FRUITLESS:
        return f"{len(fruitless)} attempts in a row failed without a new checkpoint"
    return None


def _shape(message: str) -> str:
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", message)
