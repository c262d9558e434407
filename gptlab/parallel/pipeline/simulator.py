"""A schedule's timeline before it runs, from the times of its stages.

    >>> from gptlab.spread import Layout
    >>> from gptlab.parallel.pipeline.simulator import StageTimes, predict
    >>> even = [StageTimes(forward=1.0, backward=2.0, inputs=1.0, weights=1.0)] * 4
    >>> predict("gpipe", Layout(4, 1, 4, 1), 8, even).bubble     # (P - 1) / (M + P - 1)
    0.2727272727272727

A process takes its passes in the schedule's order, each as soon as what it reads is there: a forward pass after that of
the stage before, a backward pass after that of the stage behind. What crosses from one process to another takes `hop`
seconds more. Sending costs the processes no time of their own; several processes on one core are no part of it either,
except as the times of the stages were measured so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gptlab.parallel.pipeline.schedules import Action, order
from gptlab.spread import Layout, owners


@dataclass(frozen=True)
class StageTimes:
    """Seconds that a micro-batch takes in a stage."""

    forward: float
    backward: float
    inputs: float
    """First half of a backward pass in two halves, which together may take longer than the whole."""
    weights: float
    """Second half."""

    def of(self, kind: str) -> float:
        """Seconds of F, B, I or W."""
        return {"F": self.forward, "B": self.backward, "I": self.inputs, "W": self.weights}[kind]


@dataclass(frozen=True)
class Span:
    """A pass, and when a process was at it."""

    process: int
    """Of the pipeline."""
    action: Action
    start: float
    """Seconds since the pipeline began."""
    end: float


@dataclass(frozen=True)
class Timeline:
    """What the processes of a pipeline did, or will do, in one pass of its micro-batches."""

    processes: int
    spans: Sequence[Span]

    @property
    def seconds(self) -> float:
        """From the first pass's start to the last one's end."""
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    @property
    def bubble(self) -> float:
        """Share of the processes' time in which they did nothing, 0..1."""
        return 1 - sum(span.end - span.start for span in self.spans) / (self.seconds * self.processes)

    @property
    def in_flight(self) -> list[int]:
        """Most micro-batches whose activations each process holds at once, over its stages."""
        most, now = [0] * self.processes, [0] * self.processes
        for span in sorted(self.spans, key=lambda span: span.start):
            now[span.process] += {"F": 1, "I": 0}.get(span.action.kind, -1)
            most[span.process] = max(most[span.process], now[span.process])
        return most

    def to_dict(self) -> dict[str, Any]:
        """Plain values: seconds, bubble, in_flight, and spans as [process, kind, stage, micro-batch, start, end]."""
        spans = [[s.process, *s.action, round(s.start, 6), round(s.end, 6)] for s in self.spans]
        return {"seconds": self.seconds, "bubble": self.bubble, "in_flight": self.in_flight, "spans": spans}


def predict(name: str, place: Layout, micro_batches: int, times: Sequence[StageTimes], hop: float = 0.0) -> Timeline:
    """The timeline of a schedule.

    Args:
        times: of each stage.
        hop: seconds from one process to the next.
    """
    owner, plans = owners(name, place), order(name, place, micro_batches)
    ends: dict[Action, float] = {}
    spans: list[Span] = []
    free, at = [0.0] * place.processes, [0] * place.processes

    def ready(action: Action) -> float | None:
        """When what a pass reads is there; None where it is not known yet."""
        kind, stage, index = action
        if kind == "W":  # follows its own first half
            return ends.get(Action("I", stage, index))
        if kind == "F":
            if stage == 0:
                return 0.0
            before, found = stage - 1, ends.get(Action("F", stage - 1, index))
        elif stage == place.stages - 1:
            before, found = stage, ends.get(Action("F", stage, index))
        else:
            before = stage + 1
            found = ends.get(Action("B", before, index), ends.get(Action("I", before, index)))
        return None if found is None else found + (hop if owner[before] != owner[stage] else 0.0)

    while len(spans) < sum(map(len, plans)):
        before = len(spans)
        for process, plan in enumerate(plans):
            while at[process] < len(plan):
                action = plan[at[process]]
                since = ready(action)
                if since is None:
                    break
                start = max(free[process], since)
                free[process] = ends[action] = start + times[action.stage].of(action.kind)
                spans.append(Span(process, action, start, free[process]))
                at[process] += 1
        assert len(spans) > before, f"{name} waits for itself"
    return Timeline(place.processes, spans)
