"""Runs side by side: the settings in which they differ, and what came of it.

    >>> from gptlab.lab.comparing import differences
    >>> differences([gptlab.Run.open("a"), gptlab.Run.open("b")])["n_layer"]
    [2, 4]

Left out on purpose: their curves (`figures.py`).
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from gptlab.config import ConfigError
from gptlab.runs import Run


def settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """By setting one value a run, where these are not the same for all."""
    configs = [_config(run) for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    found = {name: [config.get(name) for config in configs] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def _config(run: Run) -> dict[str, Any]:
    try:
        return run.config.to_dict()
    except ConfigError:  # damaged, or another version's: what it says
        return run.info.get("config") or {}


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """By setting or result one value a run: settings that are not the same for all, then what was measured.

    `loss at step N` compares at the last step that all of them have done.
    """
    found = settings(runs)
    rows = [run.row() for run in runs]
    common = min((row["step"] for row in rows if "step" in row), default=0)
    if common:
        losses = [{row["step"]: row.get("loss") for row in run.metrics() if "loss" in row} for run in runs]
        found[f"loss at step {common}"] = [by_step.get(common) for by_step in losses]
    for name in ("loss", "val_loss", "tokens_per_s", "mfu", "seconds", "step"):
        found[name] = [row.get(name) for row in rows]
    return found


def comparison(runs: Sequence[Run]) -> str:
    """The differences as an HTML table, a column a run."""
    names = "".join(f'<th scope="col">{html.escape(run.name)}</th>' for run in runs)
    lines = []
    for name, values in differences(runs).items():
        cells = "".join(f"<td>{html.escape(_said(value))}</td>" for value in values)
        lines.append(f'<tr><th scope="row" class="text">{html.escape(name)}</th>{cells}</tr>')
    return (
        f'<div style="overflow-x:auto"><table class="gptlab-table gptlab-compared" style="width:auto"><thead><tr>'
        f'<th class="text">differs</th>{names}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


def _said(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
