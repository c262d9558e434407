"""When the stages of a pipeline really worked: a clock around each pass, and each stage's own times.

    clock = Clock(device)
    clock.start()
    with clock.note("F", 0, 3):
        ...
    clock.spans(process=0)

On a GPU the clock is made of events, which cost no synchronisation while it runs. Left out on purpose: what should come
out (`simulator.py`), and when to look (`pipelined.py`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gptlab.parallel.pipeline.schedules import Action, TorchStage
from gptlab.parallel.pipeline.simulator import Span, StageTimes

REPEATS = 3
"""How often a stage is timed; the median counts."""


class Clock:
    """Takes down when passes began and ended, while it is on."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.on = False
        self._zero: Any = None
        self._marks: list[tuple[Action, Any, Any]] = []

    def start(self) -> None:
        """Begins anew, at 0 seconds."""
        self._marks, self.on, self._zero = [], True, self._now()

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, since: Any, until: Any) -> float:
        return float(since.elapsed_time(until)) / 1000 if self.cuda else float(until - since)

    @contextmanager
    def note(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        """Around a pass."""
        if not self.on:
            yield
            return
        began = self._now()
        yield
        self._marks.append((Action(kind, stage, micro_batch), began, self._now()))

    def spans(self, process: int) -> list[Span]:
        """What was taken down since `start`, by a process; the clock is off afterwards."""
        self.on = False
        if self.cuda:
            torch.cuda.synchronize()
        return [
            Span(process, action, self._seconds(self._zero, began), self._seconds(self._zero, ended))
            for action, began, ended in self._marks
        ]

    def timed(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds that a piece of work takes, and what it gives."""
        began = self._now()
        found = work()
        ended = self._now()
        if self.cuda:
            torch.cuda.synchronize()
        return self._seconds(began, ended), found


def time_stage(stage: TorchStage, ids: Tensor, targets: Tensor, clock: Clock) -> StageTimes:
    """Times a stage by itself, on a micro-batch of noise. Gradients are left behind.

    Args:
        ids: (b, T) int64.
        targets: (b, T) int64.
    """
    config, first, last = stage.config, stage.is_first, stage.is_last
    noise = torch.randn(*ids.shape, config.n_embd, device=ids.device)  # (b, T, C)
    seed = 0 if config.dropout > 0 else None
    taken: dict[str, list[float]] = {kind: [] for kind in "FBIW"}

    def forward() -> dict[str, Any]:
        x = ids if first else noise.clone().requires_grad_()
        seconds, out = clock.timed(
            lambda: stage.forward_maybe_with_nosync(x, ids=ids, targets=targets, dropout_seed=seed)
        )
        taken["F"].append(seconds)
        gradients = None if last else (noise,)
        return {"stage_output": (out,), "output_grads": gradients, "input_values": [x]}

    def backward(kind: str, **given: Any) -> Any:
        word = {"B": "full", "I": "input", "W": "weight"}[kind]
        seconds, (_, groups) = clock.timed(lambda: stage.backward_maybe_with_nosync(word, given))
        taken[kind].append(seconds)
        return groups

    for _ in range(REPEATS):
        whole = forward()
        backward("B", **(whole | ({"stage_output": whole["stage_output"][0]} if last else {})))
        if not first:  # the first has no inputs to go back to: all of its backward is the second half
            halves = forward()
            groups = backward("I", **halves)
            backward("W", stage_output=halves["stage_output"], param_groups=groups)
    median = {kind: statistics.median(found) if found else 0.0 for kind, found in taken.items()}
    return StageTimes(
        forward=median["F"], backward=median["B"], inputs=median["I"],
        weights=median["B"] if first else median["W"],
    )  # fmt: skip
