"""Times a cell's two sides by turns, and turns seconds into rates.

    race_training(cell, ours, theirs, setting, world, counts)    # columns of a row

Left out on purpose: taking turns (`pairing.py`), what is timed (`training.py`, `generating.py`), whether it is right
(`judging.py`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from gptlab import costs, hardware
from gptlab.assembly import Setting
from gptlab.benchmark.cells import Cell
from gptlab.benchmark.inside.counting import Counts
from gptlab.benchmark.inside.generating import TORCHBENCH_SAMPLING, Way
from gptlab.benchmark.inside.training import Trainee
from gptlab.benchmark.pairing import interval, median, spread, take_turns, verdict, warm_up
from gptlab.benchmark.provenance import Quiet
from gptlab.counts import mfu
from gptlab.parallel.world import World

APART = 0.05
"""Relative distance of the two sides' losses in a timed step above which one of them is wrong."""
SHORT = 3
"""Timed runs of a prompt alone."""
SIDES = ("", "against_")
"""What a column's name begins with: ours, and the opponent's."""


def race_training(
    cell: Cell, ours: Trainee, theirs: Trainee, setting: Setting, world: World, counts: Counts
) -> dict[str, Any]:
    """Collective; the main process's columns count."""
    losses: tuple[list[float], list[float]] = ([], [])
    sides = lambda: losses[0].append(ours.step()), lambda: losses[1].append(theirs.step())
    agree = lambda end: world.sum([float(end and world.is_main)])[0] > 0  # noqa: E731
    warm_up(*sides, agree=agree)
    quiet = Quiet(world.size)
    seconds = take_turns(*sides, cell.pairs, budget_s=cell.budget_s, agree=agree)
    row = _columns(cell, seconds) | quiet.columns()
    gap = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(*losses, strict=True))
    row |= {"timed_loss_gap": gap, "recompiles": counts.recompiles()}
    if gap > APART:
        row |= {"accuracy": "timed_differ", "note": f"the two sides' losses went apart by {gap:.1%} while timed."}
    if not cell.recipe:
        flops = costs.flops_per_token(cell.config)
        peak = hardware.total_peak(setting.device, setting.dtype, world.size, measure=True) if world.is_main else None
        row["peak_flops"] = peak.flops if peak else None  # of our precision, for both: their MFUs compare as rates do
        for side in SIDES:
            rate = row[f"{side}tokens_per_s"]
            row[f"{side}tflops"] = rate * flops / 1e12
            row[f"{side}mfu"] = mfu(cell.config, rate, peak.flops if peak else None)
    return row


def race_generation(cell: Cell, ours: Way, theirs: Way, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Columns of a row."""
    seed = torch.Generator().manual_seed(0)
    shape = (cell.config.global_batch_size, cell.prompt)
    prompts = torch.randint(0, cell.config.vocab_size, shape, generator=seed).to(device)
    options: dict[str, Any] = TORCHBENCH_SAMPLING if cell.recipe else {"temperature": 0.0}
    a, b = (functools.partial(way, prompts, cell.new_tokens, options) for way in (ours, theirs))
    warm_up(a, b)
    quiet = Quiet()
    seconds = take_turns(a, b, cell.pairs, budget_s=cell.budget_s)
    row = _columns(cell, seconds) | quiet.columns()
    rates = hardware.rates(device, str(dtype).removeprefix("torch."), measure=True)
    steps = cell.new_tokens - 1
    for side, way in zip(SIDES, (ours, theirs), strict=True):
        first = _seconds(lambda way=way: way(prompts, 1, options))  # type: ignore[misc]
        rest = max(row[f"{side}median_s"] - first, 1e-9)
        row |= {
            f"{side}prefill_ms": 1e3 * _seconds(lambda way=way: way.read(prompts)),  # type: ignore[misc]
            f"{side}ttft_ms": 1e3 * first, f"{side}decode_tokens_per_s": steps * shape[0] / rest,
        }  # fmt: skip
        if rates and steps:
            row[f"{side}bandwidth_share"] = decode_bytes(cell, dtype) * steps / rest / rates.copy_bytes_per_s
    return row


def decode_bytes(cell: Cell, dtype: torch.dtype) -> int:
    """Bytes that a decode step by itself cannot avoid to read: every weight once (of the embeddings, only the head's),
    and the keys and values of half the new tokens and of the prompt. Who checks several ids in one reading of the
    weights (`drafting.py`) may seem to read faster than the memory can."""
    config, width = cell.config, dtype.itemsize
    weights = costs.parameters(config).non_embedding + config.padded_vocab_size * config.n_embd
    seen = cell.prompt + cell.new_tokens // 2
    kept = 2 * config.n_layer * config.kv_heads * config.head_dim * seen * config.global_batch_size
    return (weights + kept) * width


def _seconds(work: Callable[[], object]) -> float:
    """The median of a few runs."""
    times = []
    for _ in range(SHORT):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return median(times)


def _columns(cell: Cell, seconds: tuple[list[float], list[float]]) -> dict[str, Any]:
    """What times of two sides say."""
    low, high = interval(seconds[1], seconds[0])
    ours, theirs = (median(times) for times in seconds)
    row: dict[str, Any] = {
        "speedup": theirs / ours, "speedup_low": low, "speedup_high": high, "pairs": len(seconds[0]),
        "verdict": verdict(theirs / ours, low, high), "abs_latency": 1e3 * ours, "spread": spread(seconds[1]),
    }  # fmt: skip
    for side, middle, times in zip(SIDES, (ours, theirs), seconds, strict=True):
        row |= {f"{side}median_s": middle, f"{side}tokens_per_s": cell.tokens / middle, f"{side}seconds": times}
    return row
