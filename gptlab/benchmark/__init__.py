"""Races: gptlab's own training step or sampling against a plain one, in one process, by turns.

    >>> from gptlab.benchmark import bench
    >>> bench("train", "tiny", against="plain", pairs=5)["speedup"]

Both sides are set up once and warmed up untimed; then they take turns, A B A B, with the same threads, windows and
global batch, so that whatever else the machine does falls on both. The ratio is that of medians; its interval comes
from resampling the pairs. Peak memory is taken in a process for each side.

Left out on purpose: the sides themselves (`sides.py`), accuracy, and grids of configs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from typing import Any

from gptlab import costs, hardware, tuning
from gptlab.benchmark.pairing import interval, median, take_turns
from gptlab.config import ConfigError, TrainConfig, did_you_mean
from gptlab.presets import PRESETS, preset
from gptlab.runs import Run

AGAINST = {"train": ("plain", "transformers"), "generate": ("nocache", "transformers")}
"""Opponents by kind of race, the default first."""
OURS = "gptlab"


def config_of_model(name: str, runs_dir: str | None = None, **changes: Any) -> TrainConfig:
    """The config of a preset, a shape such as 4/4/128 (layers, heads, width) or a run; its vocabulary is known."""
    if name in PRESETS:
        return preset(name, **changes)
    if shape := re.fullmatch(r"(\d+)/(\d+)/(\d+)", name):
        n_layer, n_head, n_embd = map(int, shape.groups())
        return TrainConfig.from_dict({"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd} | changes)
    config = Run.open(name, runs_dir).config
    return TrainConfig.from_dict(config.to_dict() | changes)


def bench(
    kind: str, model: str, *, against: str = "", pairs: int = 10, new_tokens: int = 128, prompt: int = 16,
    memory: bool = False, tuned: bool = False, tune_budget_s: float | None = None, runs_dir: str | None = None,
    **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """Races one model, and returns plain values for JSON.

    Args:
        kind: `train` or `generate`.
        model: a preset or a run.
        against: `plain` (on a CPU float32, eager, full logits, torch's default AdamW; on a GPU bfloat16, compiled,
            fused), `nocache`, or `transformers` (its GPT-2 in the same loop and precision, or its `generate`).
        pairs: timed turns of each side.
        new_tokens, prompt: of `generate`; its texts are global_batch_size.
        tuned: gptlab's side trains with the fastest setting that `tuning.tune` finds, before the race.
        memory: also measure each side's peak memory, in processes of their own.
        changes: fields of the config.

    Raises:
        ConfigError: what is not there to race, or cannot be raced.
    """
    if kind not in AGAINST:
        raise ConfigError(f"bench cannot {kind!r}{did_you_mean(kind, AGAINST)}: choose train or generate.")
    against = against or AGAINST[kind][0]
    if against not in AGAINST[kind]:
        raise ConfigError(f"bench {kind} cannot race {against!r}: choose {' or '.join(AGAINST[kind])}.")
    if pairs < 1:
        raise ConfigError(f"pairs {pairs} is too few: give 1 or more.")
    if kind == "generate" and (new_tokens < 1 or prompt < 1):
        raise ConfigError("bench generate needs a prompt and new tokens: give 1 or more of each.")
    config = config_of_model(model, runs_dir, **changes)
    from gptlab.benchmark import sides

    job = sides.Job(kind, config, new_tokens, prompt)
    ours = job
    if tuned:
        if kind != "train":
            raise ConfigError("bench generate has nothing to tune: leave --tune out.")
        ours = sides.Job(kind, tuning.tune(config, budget_s=tune_budget_s)[0], new_tokens, prompt)
    jobs = {OURS: ours, against: job}
    load = os.getloadavg()[0]
    names = (OURS, against)
    ways = [sides.make(name, jobs[name]) for name in names]
    began = time.time()
    seconds = take_turns(ways[0].turn, ways[1].turn, pairs)
    load_after = os.getloadavg()[0]
    low, high = interval(seconds[1], seconds[0])
    middle = [median(times) for times in seconds]
    rates = [job.tokens / s for s in middle]
    record: dict[str, Any] = {
        "bench": kind, "model": model, "against": against, "speedup": middle[1] / middle[0], "interval": [low, high],
        "pairs": pairs, "tokens_per_turn": job.tokens,
        "tokens_per_s": dict(zip(names, rates, strict=True)),
        "median_s": dict(zip(names, middle, strict=True)),
        "seconds": dict(zip(names, seconds, strict=True)),
        "settings": {name: way.setting for name, way in zip(names, ways, strict=True)},
        "device": ways[0].device, "device_name": hardware.device_name(ways[0].device), "threads": job.threads,
        "load_before": load, "load_after": load_after, "began": began, "config": config.to_dict(),
    }  # fmt: skip
    if kind == "train":
        peak = hardware.peak(ways[0].device, ways[0].setting["dtype"], measure=True)
        record["peak_flops"] = peak.flops if peak else None
        record["mfu"] = {
            name: costs.mfu(config, rate, peak.flops if peak else None) for name, rate in zip(names, rates, strict=True)
        }
    else:
        record["prefill_ms"] = {name: way.prefill_ms() for name, way in zip(names, ways, strict=True)}
    del ways
    if memory:
        record["peak_bytes"] = {name: peak_alone(name, jobs[name].to_dict()) for name in names}
        record["memory_share"] = record["peak_bytes"][OURS] / record["peak_bytes"][against]
    return record


def peak_alone(name: str, job: dict[str, Any]) -> int:
    """Peak memory of a side, above what its process held before the model, in a process of its own; bytes."""
    done = subprocess.run(
        [sys.executable, "-m", "gptlab.benchmark.alone", name], input=json.dumps(job), capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"the process that measures {name}'s memory failed: {done.stderr.strip()[-2000:]}")
    return int(done.stdout.split()[-1])


def lines(record: dict[str, Any]) -> list[str]:
    """The record for people."""
    low, high = record["interval"]
    found = [
        f"{name}: {record['tokens_per_s'][name]:,.0f} tokens/s, {1e3 * record['median_s'][name]:,.1f} ms a turn"
        + (f", MFU {record['mfu'][name]:.1%}" if record.get("mfu", {}).get(name) else "")
        + (f", prefill {record['prefill_ms'][name]:,.1f} ms" if "prefill_ms" in record else "")
        + (f", peak {record['peak_bytes'][name] / 2**20:,.0f} MiB" if "peak_bytes" in record else "")
        + "  (" + ", ".join(f"{key} {value}" for key, value in record["settings"][name].items()) + ")"
        for name in (OURS, record["against"])
    ]  # fmt: skip
    found.append(
        f"speedup {record['speedup']:.2f}, 95 % between {low:.2f} and {high:.2f} ({record['pairs']} pairs, "
        f"{record['threads']} threads, load {record['load_before']:.1f} before and {record['load_after']:.1f} after)"
    )
    return found
