"""When the stages of a pipeline really worked: a clock around each pass, and each stage's own times.

    clock = Clock(device, pace)
    clock.start()
    with clock.note("F", 0, 3):
        ...
    clock.spans(process=0)

`record` puts both beside what the simulator makes of the times, as plain values for `attempts/NN/pipeline.json`.

On a GPU the clock is made of events, which cost no synchronisation while it runs. Left out on purpose: what should come
out (`simulator.py`), and when to look (`pipelined.py`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gptlab.pace import COMMUNICATION, Pace
from gptlab.parallel.pipeline.schedules import Action, TorchStage
from gptlab.parallel.pipeline.simulator import Span, StageTimes, Timeline, predict
from gptlab.spread import SCHEDULES, Layout, trouble

REPEATS = 3
"""How often a stage is timed; the median counts."""


class Clock:
    """Takes down when passes began and ended, while it is on; and tells the process's pace of them, always.

    Between two passes a process waits for another stage.
    """

    def __init__(self, device: torch.device, pace: Pace) -> None:
        self.cuda, self.pace = device.type == "cuda", pace
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
        self.pace.enter("forward" if kind == "F" else "backward")
        began = self._now() if self.on else None
        yield
        if self.on:
            self._marks.append((Action(kind, stage, micro_batch), began, self._now()))
        self.pace.enter(COMMUNICATION)

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
        out = out.squeeze(0) * 1.0 if last else out  # as the loss is
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


def times_of_spans(spans: Sequence[Span], stage: int) -> StageTimes:
    """A stage's times in a pass that was taken down, where it cannot be timed by itself: the medians of its passes. A
    backward pass that was never taken whole is its halves' sum, and halves that were never taken are halves."""
    taken = {
        kind: [span.end - span.start for span in spans if (span.action.kind, span.action.stage) == (kind, stage)]
        for kind in "FBIW"
    }
    median = {kind: statistics.median(found) if found else None for kind, found in taken.items()}
    inputs, weights = median["I"] or 0.0, median["W"] or 0.0
    backward = inputs + weights if median["B"] is None else median["B"]
    halved = median["W"] is None
    return StageTimes(
        forward=median["F"] or 0.0, backward=backward, inputs=backward / 2 if halved else inputs,
        weights=backward / 2 if halved else weights,
    )  # fmt: skip


def hop_seconds(group: ProcessGroup, like: Tensor, clock: Clock) -> float:
    """Seconds that a tensor takes to the next process, by this one's reckoning; 0 for the last. Collective.

    Args:
        like: what lies between two stages.
    """
    here, size = dist.get_rank(group), dist.get_world_size(group)
    found = [0.0]

    def there_and_back(peer: int, first: bool) -> None:
        for way in (first, not first):
            if way:
                dist.send(like, group=group, group_dst=peer)
            else:
                dist.recv(like, group=group, group_src=peer)

    for left in range(size - 1):
        for turn in range(REPEATS + 1):  # the first one waits for the other process
            if here == left:
                seconds, _ = clock.timed(lambda left=left: there_and_back(left + 1, True))  # type: ignore[misc]
                found = found if turn == 0 else [*found, seconds / 2]
            elif here == left + 1:
                there_and_back(left, False)
    return statistics.median(found[1:]) if len(found) > 1 else 0.0


def record(
    name: str, place: Layout, micro_batches: int, times: Sequence[StageTimes], hop: float, measured: Sequence[Span]
) -> dict[str, Any]:
    """What a pass took beside what was predicted of it, as plain values.

    Returns:
        `stage_times` and `hop_s` in seconds; `predicted` and `measured`, each as `Timeline.to_dict` has it; and by name
        what is predicted of other schedules that these stages could run.
    """
    others = {}
    for other, schedule in SCHEDULES.items():
        holds = not schedule.fixed or schedule.per_process == place.per_process
        if other != name and holds and trouble(other, micro_batches, place) is None:
            found = predict(other, place, micro_batches, times, hop).to_dict()
            others[other] = {key: found[key] for key in ("seconds", "bubble", "in_flight")}
    return {
        "schedule": name, "stages": place.stages, "per_process": place.per_process, "processes": place.processes,
        "replicas": place.replicas, "micro_batches": micro_batches,
        "stage_times": [
            {"forward_s": t.forward, "backward_s": t.backward, "inputs_s": t.inputs, "weights_s": t.weights}
            for t in times
        ],
        "hop_s": hop,
        "predicted": predict(name, place, micro_batches, times, hop).to_dict(),
        "measured": Timeline(place.processes, sorted(measured, key=lambda span: span.start)).to_dict(),
        "others": others,
    }  # fmt: skip
