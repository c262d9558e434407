"""What a choice costs, in words, before it runs: runs, invalid cells, parameters, FLOPs, predicted time.

    >>> from gptlab.lab import plan
    >>> plan.describe(TrainConfig(), {"n_layer": [2, 4], "n_head": [6], "n_embd": [384]})

Left out on purpose: the figures themselves (`costs.py`) and what is refused (`config.py`, `sweeps.py`).
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from gptlab.config import TrainConfig
from gptlab.lab.figures import TIMES, short
from gptlab.lab.tables import duration

MOST_PRICED = 100
"""Cells whose memory and time are looked up one by one; a larger grid is told by its parameters and FLOPs alone."""


def describe(base: TrainConfig, grid: Mapping[str, Sequence[Any]]) -> str:
    """The choice as a line of HTML, with the invalid cells and their reasons under it.

    Raises:
        ConfigError: a field that does not exist or has no values.
    """
    from gptlab import costs
    from gptlab import grid as grids

    cells = grids.cells(base, grid)
    invalid = [(cell.name, cell.reason or "") for cell in cells if cell.config is None]
    configs = {cell.name: cell.config for cell in cells if cell.config is not None}
    seconds: list[float | None] = []
    device = dtype = ""
    if len(configs) <= MOST_PRICED:
        for name, config in list(configs.items()):
            found = costs.cost(config)
            device, dtype = found["device"], found["dtype"]
            seconds.append(found["predicted_s"])
            if not found["fits"]:
                invalid.append((name, found["refusal"]))
                del configs[name]
    if not configs:
        return f"<b>Nothing to run.</b> {_reasons(invalid)}"
    sizes = [costs.parameters(config).total for config in configs.values()]
    flops = [
        costs.flops_per_token(config) * config.max_iters * config.global_batch_size * config.block_size
        for config in configs.values()
    ]
    some = next(iter(configs.values()))
    parts = [
        f"<b>{len(configs)} run{'s' * (len(configs) > 1)}</b>",
        f"{_range([short(size) for size in (min(sizes), max(sizes))])} parameters",
        f"{short(some.max_iters * some.global_batch_size * some.block_size)} tokens each",
        f"{_flops(sum(flops))} in all",
    ]
    known = [one for one in seconds if one is not None]
    if len(known) == len(configs):
        parts.append(f"<b>about {duration(sum(known))}</b> of training predicted ({html.escape(f'{device}, {dtype}')})")
    elif device:
        parts.append(f"time unknown until a run has measured this {html.escape(device)} while it was idle")
    return " · ".join(parts) + (f"<br>{_reasons(invalid)}" if invalid else "")


def _flops(value: float) -> str:
    """1.09 TFLOPs."""
    text = short(value)
    return f"{text[:-1]} {text[-1]}FLOPs" if text[-1].isalpha() else f"{text} FLOPs"


def _range(words: Sequence[str]) -> str:
    return words[0] if words[0] == words[-1] else f"{words[0]} to {words[-1]}"


def _reasons(invalid: Sequence[tuple[str, str]]) -> str:
    """Invalid cells by reason; those that differ in depth alone share one."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in invalid:
        by_reason.setdefault(reason, []).append(name.replace("x", TIMES))
    told = [f"{', '.join(names[:6])}{' …' * (len(names) > 6)}: {reason}" for reason, names in by_reason.items()]
    word = f"{len(invalid)} invalid" if invalid else ""
    return html.escape(f"{word} ({'; '.join(told)})")
