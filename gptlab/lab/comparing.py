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

from gptlab.runs import Run


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """By setting or result one value a run: settings that are not the same for all, then what was measured.

    `loss at step N` compares at the last step that all of them have done.
    """
    configs = [run.config.to_dict() for run in runs]
    found: dict[str, list[Any]] = {}
    for name in configs[0] if configs else ():
        values = [config[name] for config in configs]
        if any(value != values[0] for value in values):
            found[name] = values
    summaries = [run.summary() for run in runs]
    common = min((row["step"] for row in summaries), default=0)
    if common:
        losses = [{row["step"]: row.get("loss") for row in run.metrics() if "loss" in row} for run in runs]
        found[f"loss at step {common}"] = [by_step.get(common) for by_step in losses]
    for name in ("loss", "val_loss", "tokens_per_s", "mfu", "seconds", "step"):
        found[name] = [row[name] for row in summaries]
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
