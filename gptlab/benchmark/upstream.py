"""The command line of torch's dynamo benchmarks, in gptlab's terms, and what is done instead where there is no GPU.

    gptlab bench --float16 -dcuda --training --backend=inductor --ddp --multiprocess --accuracy --only nanogpt

Left out on purpose: flags of that harness that do not concern a GPT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gptlab import hardware
from gptlab.config import ConfigError

PRECISIONS = ("float32", "float16", "bfloat16", "amp")
PROCESSES = 2
"""Of a benchmark with --ddp on a machine without GPUs, as far as it has cores."""


@dataclass
class Asked:
    """What such a command line asks for."""

    kind: str
    model: str
    axes: dict[str, list[Any]] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def translate(flags: Mapping[str, Any], kind: str | None, model: str | None) -> Asked:
    """A command line with or without upstream's flags.

    Args:
        flags: training, inference, only, ddp, multiprocess, a precision's name, and d, the device; missing or None
            where not given.
        kind, model: the words in front, as gptlab's own form has them.

    Raises:
        ConfigError: nothing says what to bench.
    """
    if flags.get("only") and model:
        raise ConfigError(
            f"bench {kind} has its model from --only {flags['only']} or from the word {model}: give one of them."
        )
    kind = kind or ("train" if flags.get("training") else "generate" if flags.get("inference") else None)
    model = model or flags.get("only")
    if kind is None or model is None:
        raise ConfigError("bench needs train, generate or all, and a model: `gptlab bench train tiny`.")
    asked = Asked(kind, "torchbench" if model == "nanogpt" else model)
    if flags.get("inference") and kind == "generate":
        asked.notes.append("--inference: upstream times one forward pass; here tokens are sampled one by one.")
    gpus = [device for device in hardware.devices() if device.kind == "cuda"]
    device = flags.get("d")
    if device:
        asked.changes["device"] = device
        if device == "cuda" and not gpus:
            asked.changes["device"] = "cpu"
            asked.notes.append("-dcuda: there is no GPU that torch sees here, so it runs on the CPU.")
    on_cpu = asked.changes.get("device") == "cpu" or not gpus
    precisions = [name for name in PRECISIONS if flags.get(name)]
    if len(precisions) > 1:
        raise ConfigError(f"--{precisions[0]} and --{precisions[1]} exclude each other: give one of them.")
    if precisions:
        asked.axes["dtype"] = [_precision(precisions[0], kind, on_cpu, asked.notes)]
    if flags.get("ddp") or flags.get("multiprocess"):
        count = min(PROCESSES, hardware.cores()) if on_cpu else len(gpus)
        asked.axes["nproc"], asked.axes["strategy"] = [count], ["ddp"]
        if on_cpu and kind != "generate":
            asked.notes.append(f"--ddp --multiprocess: without GPUs it is {count} processes on the CPU, over gloo.")
    return asked


def _precision(name: str, kind: str, on_cpu: bool, notes: list[str]) -> str:
    """What a precision's flag becomes."""
    wanted = "bfloat16" if name == "amp" else name
    if wanted == "float16" and (on_cpu or kind == "generate"):
        found = "bfloat16" if not on_cpu or hardware.cpu_bfloat16() else "float32"
        why = "CPUs have no fast float16" if on_cpu else "sampling has no float16"
        notes.append(f"--float16: {why}, so it is {found}.")
        return found
    return wanted
