"""What a choice costs, in words, before it runs: runs, invalid cells, parameters, memory, FLOPs, predicted time, MFU.

    >>> from gptlab.lab import plan
    >>> plan.describe(plan.cells(TrainConfig(), {"n_layer": [2, 4], "n_head": [6], "n_embd": [384]}))

Left out on purpose: the figures themselves (`costs.py`) and what is refused (`config.py`, `sweeps.py`).
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from gptlab.grid import Cell
from gptlab.grid import cells as cells
from gptlab.lab.curves import TIMES, short
from gptlab.wording import duration

MOST_PRICED = 100
"""Cells whose memory and time are looked up one by one; a larger grid is told by its parameters and FLOPs alone."""


def describe(wanted: Sequence[Cell], *, measuring: bool = False) -> str:
    """The choice as a line of HTML, with the invalid cells and their reasons under it.

    Args:
        measuring: whether this machine's speed, where it is unknown, is being measured.
    """
    from gptlab import costs

    invalid = [(cell.name, cell.reason or "") for cell in wanted if cell.config is None]
    configs = {cell.name: cell.config for cell in wanted if cell.config is not None}
    priced: list[dict[str, Any]] = []
    if len(configs) <= MOST_PRICED:
        for name, config in list(configs.items()):
            found = costs.cost(config)
            if found["fits"]:
                priced.append(found)
            else:
                invalid.append((name, found["refusal"]))
                del configs[name]
    if not configs:
        return f"<b>Nothing to run.</b> {_reasons(invalid)}"
    parts = [f"<b>{len(configs)} run{'s' * (len(configs) > 1)}</b>"] if len(wanted) > 1 else []
    sizes = [costs.parameters(config).total for config in configs.values()]
    parts.append(f"{_range(sizes)} parameters")
    if priced:
        parts.append(f"{_range([found['peak_bytes'] for found in priced], 'B')} of memory a process")
    flops = [costs.flops_per_token(config) for config in configs.values()]
    tokens = [config.max_iters * config.global_batch_size * config.block_size for config in configs.values()]
    each = " each" if len(configs) > 1 else ""
    parts.append(f"{short(tokens[0])} tokens{each}, {_range(flops, 'FLOPs')} a token")
    parts.append(f"{_unit(sum(one * count for one, count in zip(flops, tokens, strict=True)), 'FLOPs')} in all")
    if priced and all(found["predicted_s"] is not None for found in priced):
        device = html.escape(f"{priced[0]['device']}, {priced[0]['dtype']}")
        parts.append(f"<b>about {duration(sum(found['predicted_s'] for found in priced))}</b> predicted ({device})")
        if all(found["predicted_mfu"] is not None for found in priced):
            shares = [found["predicted_mfu"] for found in priced]
            low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
            parts.append(f"MFU {low if low == high else f'{low} to {high}'} predicted")
    elif priced and measuring:
        parts.append("measuring how fast this machine is, once, to predict the time …")
    elif priced:
        parts.append(f"time unknown until a run has measured this {html.escape(priced[0]['device'])} while it was idle")
    return " · ".join(parts) + (f"<br>{_reasons(invalid)}" if invalid else "")


def _unit(value: float, unit: str) -> str:
    """1.09 TFLOPs, 35.2 MB."""
    text = short(value)
    return f"{text[:-1]} {text[-1]}{unit}" if text[-1].isalpha() else f"{text} {unit}"


def _range(values: Sequence[float], unit: str = "") -> str:
    """From the least to the greatest, each with its unit."""
    low, high = (_unit(value, unit) if unit else short(value) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _reasons(invalid: Sequence[tuple[str, str]]) -> str:
    """Invalid cells by reason; those that differ in depth alone share one."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in invalid:
        by_reason.setdefault(reason, []).append(name.replace("x", TIMES))
    told = [f"{', '.join(names[:6])}{' …' * (len(names) > 6)}: {reason}" for reason, names in by_reason.items()]
    word = f"{len(invalid)} invalid" if invalid else ""
    return html.escape(f"{word} ({'; '.join(told)})")
