"""Rows held against older ones: faster, same, slower, or too noisy to say.

    >>> from gptlab.benchmark.baseline import compare
    >>> old = {"kind": "train", "name": "tiny", "accuracy": "pass", "speedup": 2.0, "speedup_low": 1.9,
    ...        "speedup_high": 2.1}
    >>> compare([old | {"speedup": 1.0, "speedup_low": 0.9, "speedup_high": 1.1}], [old])[0]["against_baseline"]
    'slower'

What is compared is the ratio of a row's two sides, not its seconds: it is nearly the same on a machine that is busier
or another one of its kind. Left out on purpose: reading and writing (`table.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from gptlab.benchmark.accuracy import RAN
from gptlab.benchmark.table import Row, right

KEY = (
    "dev", "name", "kind", "backend", "against", "recipe", "dtype", "attention", "nproc", "strategy", "batch_size",
    "block_size", "prompt_tokens", "new_tokens",
)  # fmt: skip
"""What makes two rows the same question."""
SLACK = 0.03
"""Share of a ratio that it may move without being another."""
WIDE = 0.10
"""Half an interval's width, as a share of the ratio, from which on it says nothing."""

WRONG, NOT_RUN, SLOWER = 1, 3, 4
"""Exit codes: a row is wrong; not all ran; a row is slower than its baseline."""


def _key(row: Row) -> tuple[str, ...]:
    found = []
    for name in KEY:
        value = row.get(name)
        found.append("" if value is None else f"{value:g}" if isinstance(value, int | float) else str(value))
    return tuple(found)


def compare(rows: Sequence[Row], old: Sequence[Row]) -> list[Row]:
    """The rows with the old ratio and `against_baseline`: faster, same, slower, noise, broken (it was right), mended
    (it was not) or new."""
    before = {_key(row): row for row in old}
    return [row | _judged(row, before.get(_key(row))) for row in rows]


def _judged(row: Row, old: Row | None) -> Row:
    if old is None:
        return {"against_baseline": "new"}
    found: Row = {"baseline_speedup": old.get("speedup")}
    if right(old) and not right(row):
        return found | {"against_baseline": "broken"}
    if not row.get("speedup") or not old.get("speedup"):
        return found | {"against_baseline": "same" if right(row) == right(old) else "mended"}
    change = row["speedup"] / old["speedup"]
    found["change"] = change
    if row["speedup_low"] <= old["speedup_high"] and old["speedup_low"] <= row["speedup_high"]:
        wide = any((one["speedup_high"] - one["speedup_low"]) / 2 > WIDE * one["speedup"] for one in (row, old))
        return found | {"against_baseline": "noise" if wide else "same"}
    if abs(change - 1) <= SLACK:
        return found | {"against_baseline": "same"}
    return found | {"against_baseline": "faster" if change > 1 else "slower"}


def exit_code(rows: Sequence[Row]) -> int:
    """0, or the first of the codes above that is called for."""
    if any(row.get("accuracy") not in ("pass", None) and row["accuracy"] in RAN for row in rows):
        return WRONG
    if any(row.get("accuracy") not in (*RAN, None) for row in rows):
        return NOT_RUN
    return SLOWER if any(row.get("against_baseline") == "slower" for row in rows) else 0
