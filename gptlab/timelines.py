"""A pipeline's timeline as text: what `gptlab pipeline RUN` prints.

    gptlab pipeline first

One line a process, time from left to right: the digit of a micro-batch (its last) while it goes forward, a letter while
it goes backward, a point where the process waits. Left out on purpose: measuring it and predicting it
(`parallel/pipeline/`), figures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from gptlab.config import ConfigError
from gptlab.runs import Run

WIDTH = 96
"""Characters of a line."""


def pipeline(arguments: argparse.Namespace) -> int:
    """`gptlab pipeline`: the newest record of a run's pipeline."""
    run = Run.open(arguments.run, arguments.runs_dir)
    found = run.pipeline()
    if found is None:
        if "pp" not in run.config.strategy:
            raise ConfigError(f"The run {run.name!r} has no pipeline: train one with --strategy pp and --nproc 2.")
        raise ConfigError(f"The run {run.name!r} has no timeline yet: it is taken down at an attempt's third step.")
    if arguments.json:
        print(json.dumps(found))
    else:
        print("\n".join(lines(found)))
    return 0


def lines(found: dict[str, Any]) -> list[str]:
    """A record in words and lines."""
    blocks = ", ".join(f"h.{a}-{b - 1}" if b > a + 1 else f"h.{a}" if b > a else "none" for a, b in found["blocks"])
    shown = [
        f"{found['schedule']}: {found['stages']} stages over {found['processes']} processes, "
        f"{found['micro_batches']} micro-batches a pass, step {found['step']}",
        f"blocks by stage: {blocks}",
        "stage    forward   backward = of inputs + of weights, ms",
    ]
    for stage, times in enumerate(found["stage_times"]):
        forward, backward, inputs, weights = (
            1000 * times[key] for key in ("forward_s", "backward_s", "inputs_s", "weights_s")
        )
        shown.append(f"{stage:5} {forward:10.2f} {backward:10.2f} {inputs:11.2f} {weights:12.2f}")
    for key in ("predicted", "measured"):
        timeline = found[key]
        shown += ["", f"{key}: {1000 * timeline['seconds']:.2f} ms, bubble {timeline['bubble']:.1%}"]
        shown += chart(timeline["spans"], found["processes"])
    for name, other in found["others"].items():
        shown.append(f"{name} would take {1000 * other['seconds']:.2f} ms, bubble {other['bubble']:.1%}")
    return shown


def chart(spans: Sequence[Sequence[Any]], processes: int) -> list[str]:
    """A line for each process.

    Args:
        spans: [process, kind, stage, micro-batch, start, end].
    """
    begin, end = min(span[4] for span in spans), max(span[5] for span in spans)
    scale = WIDTH / (end - begin) if end > begin else 0.0
    rows = [["."] * WIDTH for _ in range(processes)]
    for process, kind, _, index, start, stop in spans:
        sign = str(index % 10) if kind == "F" else chr(ord("a") + index % 26)
        first = min(WIDTH - 1, int((start - begin) * scale))
        for column in range(first, max(first + 1, int((stop - begin) * scale))):
            rows[process][column] = sign
    return [f"{process:3} {''.join(row)}" for process, row in enumerate(rows)]
