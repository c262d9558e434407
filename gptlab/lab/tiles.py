"""The processes of a run as tiles, and its attempts as a table: HTML from what the run directory says.

    >>> from gptlab.lab import tiles
    >>> tiles.tiles(run, run.status()), tiles.attempts(run.attempts_table())

Every value is escaped: run directories are data. Left out on purpose: the buttons (`clusterview.py`).
"""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gptlab.runs import ACTIVE, Run

FRESH_S = 5.0
"""Seconds since its last sign of life after which a rank's tile says that it is silent."""
PARTS = ("forward", "backward", "communication", "wait")
"""Shares of a rank's time, in the order of the bar."""
_COLOURS = ("#0072b2", "#56b4e9", "#e69f00", "#cc79a7")
STYLE = """<style>
.gptlab-tiles {display: flex; flex-wrap: wrap; gap: 8px; font: 12px/1.5 var(--jp-ui-font-family, sans-serif);
  color: var(--jp-ui-font-color1, #24292e); font-variant-numeric: tabular-nums}
.gptlab-tile {border: 1px solid var(--jp-border-color1, #bbb); border-left: 4px solid #009e73; border-radius: 4px;
  padding: 4px 10px 6px; min-width: 128px}
.gptlab-tile b {display: block} .gptlab-tile.late {border-left-color: #e69f00} .gptlab-tile.gone {border-left: 4px
  dashed var(--jp-error-color1, #b3261e); opacity: .75}
.gptlab-bar {display: flex; height: 6px; margin-top: 4px; border-radius: 3px; overflow: hidden; width: 110px}
.gptlab-key {display: inline-block; width: 10px; height: 6px; margin-right: 4px}
</style>"""
"""What a page needs once, beside its tiles."""
_KEY = "".join(
    f'<span><span class="gptlab-key" style="background:{colour}"></span>{part}</span>'
    for part, colour in zip(PARTS, _COLOURS, strict=True)
)
"""What the colours of a bar mean."""


def tiles(run: Run, status: Mapping[str, Any], now: float | None = None) -> str:
    """A tile a rank, for a page with `STYLE`: step, heartbeat, process, and where its time goes.

    Args:
        status: as `Run.status` gives it.
        now: in seconds since 1970, for tests.
    """
    now = time.time() if now is None else now
    pids, state = status.get("pids") or [], str(status.get("state"))
    world = int(status.get("world_size") or len(pids))
    beats, steps = status.get("heartbeats") or [], status.get("rank_steps") or []
    shares, straggler = status.get("shares") or [], status.get("straggler")
    found = []
    for rank in range(world):
        beat, step = _at(beats, rank), _at(steps, rank)
        age = max(0.0, now - beat) if isinstance(beat, int | float) else None
        alive = state in ACTIVE
        words = ["gone" if not alive else "no sign yet" if age is None else f"heartbeat {age:.1f} s ago"]
        kind = "gone" if not alive else "late" if age is None or age > FRESH_S else ""
        if alive and age is not None and age > FRESH_S:
            words.insert(0, "silent")
        if straggler == rank and alive:
            words.append("slowest")
            kind = kind or "late"
        lines = [html.escape(", ".join(words))]
        if step is not None:
            lines.append(f"step {html.escape(str(step))}")
        if (pid := _at(pids, rank)) is not None:
            lines.append(f"process {html.escape(str(pid))}")
        found.append(
            f'<div class="gptlab-tile {kind}" role="listitem"><b>rank {rank}</b>{"<br>".join(lines)}'
            f"{_bar(_at(shares, rank))}</div>"
        )
    said = f"{run.name}: {state}, attempt {status.get('attempt', 0)}, {world} process{'es' * (world != 1)}"
    key = _KEY if any(_bar(_at(shares, rank)) for rank in range(world)) else ""
    return (
        f'<div class="gptlab-tiles" style="margin-bottom:6px">{html.escape(said)}{key}</div>'
        f'<div class="gptlab-tiles" role="list" aria-label="{html.escape(said)}">{"".join(found)}</div>'
    )


def _at(values: Any, rank: int) -> Any:
    """A rank's value in a list or an object by rank."""
    if isinstance(values, Mapping):
        return values.get(str(rank), values.get(rank))
    return values[rank] if isinstance(values, Sequence) and rank < len(values) else None


def _bar(shares: Any) -> str:
    """Where a rank's time goes."""
    if not isinstance(shares, Mapping):
        return ""
    known = [(part, min(1.0, max(0.0, float(shares[part])))) for part in PARTS if part in shares]
    said = ", ".join(f"{part} {share:.0%}" for part, share in known)
    parts = "".join(
        f'<span style="width:{100 * share:.0f}%;background:{_COLOURS[PARTS.index(part)]}"></span>'
        for part, share in known
    )
    return f'<div class="gptlab-bar" role="img" aria-label="{said}" title="{said}">{parts}</div>'


def attempts(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row an attempt, for a page with `tables.STYLE`: its processes, steps, what ended it, and the seconds until the
    next one trained."""
    titles = ("attempt", "processes", "steps", "ended by", "recovery")
    lines = []
    for row in rows:
        first, last = row.get("from_step"), row.get("to_step")
        steps = "" if first is None else f"{first} to {last}" if last is not None else f"{first} on"
        recovery = row.get("recovery_s")
        cells = [row.get("attempt"), row.get("world_size"), steps, _cause(row),
                 f"{recovery:.2f} s" if isinstance(recovery, int | float) else ""]  # fmt: skip
        lines.append(
            "<tr>" + "".join(f"<td>{html.escape(str('' if cell is None else cell))}</td>" for cell in cells) + "</tr>"
        )
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<table class="gptlab-table" style="width:auto">{body}</table>'


def _cause(row: Mapping[str, Any]) -> str:
    """What ended an attempt."""
    error, rank = row.get("error"), row.get("rank")
    if not error:
        return ""
    text = error.get("message", error) if isinstance(error, Mapping) else error
    return f"rank {rank}: {text}" if rank is not None else str(text)
