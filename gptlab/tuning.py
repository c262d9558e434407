"""Measures what trains a config fastest here: precision, kernels, compile, attention and micro-batch size.

    >>> from gptlab.presets import preset
    >>> from gptlab.tuning import tune
    >>> tuned, rows = tune(preset("tiny"), budget_s=30)

One choice after another, each with the best of those before: a whole grid would take hours. Every candidate takes real
steps in a process of its own, so that none inherits another's memory or compiled code, and one that takes too long is
ended. What the cost model says cannot fit is not tried. The choice is a config in which nothing measured is `auto` any
more.

Left out on purpose: settings that change what is learned (batch, optimizer), and several processes: it tunes one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gptlab import costs, hardware, kernels, tasks
from gptlab.config import ConfigError, TrainConfig
from gptlab.fields import check_range

TUNED = ("dtype", "kernels", "compile", "attention", "micro_batch_size")
"""Fields that are measured."""
SAMPLE_TOKENS = 8192
"""Tokens of a measured step, at least a micro-batch: a larger global batch only repeats them."""
ENOUGH_S = 3.0
"""Seconds of steps after which a candidate's speed is known; three steps at least."""


@dataclass(frozen=True)
class Row:
    """A candidate and what became of it."""

    values: dict[str, Any]
    """The tuned fields."""
    tokens_per_s: float | None
    """None where it failed, or took too long."""
    peak_bytes: int | None = None
    compile_s: float | None = None
    note: str = ""


def default_budget(config: TrainConfig) -> float:
    """Seconds to spend: 60 up to ten million parameters (without embeddings), 600 from gpt2's size on."""
    count = costs.parameters(config).non_embedding
    return 60.0 if count <= 11e6 else min(600.0, 60 + (count - 11e6) / 74e6 * 540)


def tune(
    config: TrainConfig, *, budget_s: float | None = None, say: Callable[[str], None] = lambda line: None
) -> tuple[TrainConfig, list[Row]]:
    """The fastest setting that was found, and all that were tried, in their order.

    Args:
        budget_s: seconds; when they are over, the best so far is the choice.
        say: is told each candidate's result.

    Raises:
        ConfigError: nothing could be measured.
    """
    _check(config)
    if budget_s is not None:
        check_range("budget_s", budget_s, 0, 1e6)
    if config.vocab_size == 0:
        raise ConfigError("vocab_size is not known yet: give one, or open the corpus whose tokenizer has it.")
    end = time.monotonic() + (budget_s if budget_s is not None else default_budget(config))
    device, _ = hardware.resolve_device(config.device)
    base = config.alone()
    rows: list[Row] = []
    best: tuple[float, TrainConfig] | None = None
    for stage in (_precisions, _compilers, _attentions, _micro_batches):
        for candidate in stage(best[1] if best else base, device):
            left = end - time.monotonic()
            if left < 2 and rows:
                break
            row = measure(candidate, max(left, 10.0))
            if row.values in [known.values for known in rows]:
                continue
            rows.append(row)
            say(line(row))
            if row.tokens_per_s and (best is None or row.tokens_per_s > best[0]):
                best = row.tokens_per_s, candidate.replace(**row.values)
    if best is None:
        raise ConfigError(f"Nothing could be measured: {rows[-1].note if rows else 'no time'}.")
    return best[1].replace(nproc=config.nproc), rows


def tune_aloud(config: TrainConfig, budget_s: float | None) -> TrainConfig:
    """The tuned config; what was tried goes to the error stream as it is known."""
    _check(config)
    if not config.vocab_size:
        from gptlab import corpus

        config = config.replace(vocab_size=corpus.ensure(config.data, config.tokenizer).vocab_size)
    return tune(config, budget_s=budget_s, say=lambda line: print(line, file=sys.stderr, flush=True))[0]


def _check(config: TrainConfig) -> None:
    """Refuses what is not measured: candidates are steps of one process with the whole model."""
    tasks.check_measured(config, "tuned", "tune without it")
    if config.strategy != "ddp":
        raise ConfigError(
            f"strategy {config.strategy} is not tuned, one process with the whole model is: tune without it, and give "
            "it with what was found."
        )


def _precisions(config: TrainConfig, device: str) -> Iterator[TrainConfig]:
    """The two best precisions of this device, each with the kernels that there are; what the config fixes stays."""
    widths = {"cuda": ("bfloat16", "tfloat32", "float16", "float32"), "cpu": ("bfloat16", "float32")}
    here = [
        dtype for dtype in widths.get(device, ("float32",))
        if not hardware.resolve_dtype(dtype, device, config)[1].startswith(hardware.FALLBACK)
    ]  # fmt: skip
    for dtype in here[:2] if config.dtype == "auto" else (config.dtype,):
        ours = config.kernels == "auto" and kernels.serves(config, device, dtype)
        for which in ("native", "torch") if ours else (config.kernels,):
            yield config.replace(dtype=dtype, kernels=which)


def _compilers(config: TrainConfig, device: str) -> Iterator[TrainConfig]:
    """torch.compile, where torch's kernels lead: our own are compiled already."""
    if config.compile == "off" and config.kernels != "native":
        for how in ("model", "step"):
            yield config.replace(compile=how)


def _attentions(config: TrainConfig, device: str) -> Iterator[TrainConfig]:
    """Other kernels of attention, where torch's lead. On a CPU `sdpa` has one fused kernel; the other is written out,
    and wins only where the context is short."""
    if config.kernels == "native" or config.attention != "sdpa":
        return
    others = ("flash", "cudnn") if device == "cuda" else ("math",) if config.block_size <= 128 else ()
    for attention in others:
        yield config.replace(attention=attention)


def _micro_batches(config: TrainConfig, device: str) -> Iterator[TrainConfig]:
    """Half and twice the size so far, and so on while the memory holds them."""
    size = config.micro_batch_size
    memory = hardware.device_memory(device)
    for other in (size // 2, 2 * size, size // 4):
        if not 1 <= other <= config.global_batch_size or other == size:
            continue
        candidate = config.replace(micro_batch_size=other)
        try:
            costs.check_fits(candidate, memory, config.dtype, 1, device)
        except ConfigError:
            continue
        yield candidate


def measure(config: TrainConfig, limit_s: float) -> Row:
    """Steps of one candidate, in a process of its own that is ended after `limit_s` seconds."""
    values = {name: getattr(config, name) for name in TUNED}
    process = subprocess.Popen(
        [sys.executable, "-m", "gptlab.tuning"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, problem = process.communicate(json.dumps(config.to_dict()), timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # compilers too
        process.communicate()
        return Row(values, None, note=f"took more than {limit_s:.0f} s")
    if process.returncode:
        return Row(values, None, note=(problem.strip().splitlines() or ["failed"])[-1][-200:])
    found = json.loads(out.splitlines()[-1])
    return Row(found["values"], found["tokens_per_s"], found["peak_bytes"], found["compile_s"])


def main() -> None:
    """Reads a config, takes steps, prints what they were like: the other side of `measure`."""
    import statistics

    import numpy as np
    import torch

    from gptlab import compiling, memory
    from gptlab.assembly import assemble
    from gptlab.parallel.world import World
    from gptlab.worker import settle

    config = TrainConfig.from_dict(json.load(sys.stdin))
    setting, reasons = settle(config, {}, 1, 1)
    for name, reason in reasons.items():
        if reason.startswith("NOT AS ASKED"):
            raise SystemExit(f"{name}: {reason}")
    torch.set_num_threads(setting.threads)
    size = setting.micro_batch_size
    count = max(1, SAMPLE_TOKENS // (size * config.block_size)) * size
    batch = min(config.global_batch_size, count)
    config = config.replace(global_batch_size=batch)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, 4 * (config.block_size + 1) + 65536).astype(np.uint32)
    memory.reset_peak(setting.device)
    parts = assemble(config, setting, ids, World(0, 1, torch.device(setting.device)))
    parts.strategy.part.train()
    parts.step(0)
    parts.step(1)  # the optimizer's state is new in the first
    times: list[float] = []
    while len(times) < 3 or sum(times) < ENOUGH_S:
        began, compiled = time.perf_counter(), compiling.seconds()
        parts.step(2 + len(times))
        if setting.device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began - (compiling.seconds() - compiled))
    record = {
        "values": {name: getattr(setting, name) for name in TUNED},
        "tokens_per_s": batch * config.block_size / statistics.median(times),
        "peak_bytes": memory.peak_bytes(setting.device), "compile_s": compiling.seconds(),
    }  # fmt: skip
    print(json.dumps(record))


def line(row: Row) -> str:
    """A candidate for people."""
    what = "  ".join(f"{name} {value}" for name, value in row.values.items())
    if row.tokens_per_s is None:
        return f"{what}: {row.note}"
    peak = f", peak {row.peak_bytes / 2**20:,.0f} MiB" if row.peak_bytes else ""
    compiled = f", compiled in {row.compile_s:.0f} s" if row.compile_s else ""
    return f"{what}: {row.tokens_per_s:,.0f} tokens/s{peak}{compiled}"


if __name__ == "__main__":
    main()
