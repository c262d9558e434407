"""Rows of a bench as a table, as CSV and as JSON lines; their summary.

    >>> from gptlab.benchmark.table import summary
    >>> summary([{"accuracy": "pass", "speedup": 2.0}, {"accuracy": "pass", "speedup": 8.0}])["geomean_speedup"]
    4.0

The columns that users of the dynamo dashboard know come first, in its order; ours stand behind. A row is flat: a list
(the seconds of each turn) is in the JSON lines alone. Left out on purpose: making rows (`isolation.py`), comparing them
with older ones (`baseline.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptlab import csvfile
from gptlab.benchmark.accuracy import RAN
from gptlab.benchmark.cells import Cell
from gptlab.benchmark.provenance import noise, of_code

Row = dict[str, Any]

SPEED = (
    "speedup", "abs_latency", "compilation_latency", "compression_ratio", "eager_peak_mem", "dynamo_peak_mem",
)  # fmt: skip
GRAPHS = (
    "calls_captured", "unique_graphs", "fallbacks_to_eager", "graph_breaks", "unique_graph_breaks",
    "autograd_captures", "autograd_compiles", "cudagraph_skips",
)  # fmt: skip
OURS = (
    "kind", "backend", "against", "verdict", "speedup_low", "speedup_high", "pairs", "dtype", "attention", "nproc",
    "strategy", "block_size", "tokens_per_s", "against_tokens_per_s", "tflops", "mfu", "against_mfu", "prefill_ms",
    "ttft_ms", "decode_tokens_per_s", "bandwidth_share", "compile_s", "warm_compile_s", "break_even_steps",
    "recompiles", "graph_break_reasons", "note", "noise", "worst_tensor", "rmse", "eager_rmse", "limit",
)  # fmt: skip
"""Columns of our own that come first among them; what else a row has follows."""
SHOWN = (
    "kind", "name", "backend", "dtype", "attention", "nproc", "accuracy", "speedup", "95%", "pairs", "tokens_per_s",
    "compile_s", "memory", "note",
)  # fmt: skip
"""What the table for people has."""
GB = 1e9
"""The dashboard's unit of memory."""


def finish(cell: Cell, found: Row) -> Row:
    """A cell's row: what it is, what came of it, where it comes from, the known columns first."""
    config = cell.config
    ours = found.pop("ours", None) or {}
    other = found.pop("other", None) or {}
    setting = found.pop("setting", None) or {}
    row: Row = {
        "dev": found.pop("dev", config.device), "name": cell.model, "batch_size": config.global_batch_size, **found,
        "kind": cell.kind, "backend": cell.backend, "against": cell.against, "recipe": cell.recipe or None,
        "dtype": ours.get("dtype", config.dtype), "attention": ours.get("attention", config.attention),
        "nproc": config.nproc, "strategy": config.strategy, "block_size": config.block_size,
        "micro_batch_size": setting.get("micro_batch_size") if cell.kind == "train" else None,
        "kernels": setting.get("kernels"), "compile": ours.get("compile"), "seed": config.seed,
        "against_dtype": other.get("dtype"), "against_compile": other.get("compile"),
        "config": json.dumps(config.to_dict()), **of_code(),
    }  # fmt: skip
    if cell.kind == "generate":
        row |= {"prompt_tokens": cell.prompt, "new_tokens": cell.new_tokens}
    mine, theirs = row.get("peak_bytes"), row.get("against_peak_bytes")
    if mine and theirs:
        row |= {"eager_peak_mem": theirs / GB, "dynamo_peak_mem": mine / GB, "compression_ratio": theirs / mine}
    if row.get("compile_s") and row.get("speedup", 0) > 1:
        saved = row["against_median_s"] - row["median_s"]
        row["break_even_steps"] = math.ceil(row["compile_s"] / saved)
    row["noise"] = noise(row)
    return {name: row.get(name) for name in columns([row], accuracy=cell.accuracy, performance=cell.performance)}


def columns(rows: Sequence[Row], *, accuracy: bool = True, performance: bool = True) -> list[str]:
    """The names of the rows' columns in their order."""
    known = ["dev", "name", "batch_size", *(SPEED if performance else ("accuracy",)), *GRAPHS]
    if performance and accuracy:
        known.append("accuracy")
    names = dict.fromkeys([*known, *OURS])
    for row in rows:
        names |= dict.fromkeys(row)
    return list(names)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """All rows, without their lists."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    plain = [name for name in names if not any(isinstance(row.get(name), list | dict) for row in rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    csvfile.write_csv(path, plain, rows)


def read_csv(path: Path) -> list[Row]:
    """Rows as `write_csv` wrote them: numbers where they are some, None where nothing stands."""
    return [{name: _value(text) for name, text in row.items()} for row in csvfile.read_rows(path)]


def _value(text: str | None) -> Any:
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        return text


def json_line(row: Row) -> str:
    """A row as one line of JSON."""
    return json.dumps({name: _plain(value) for name, value in row.items()})


def _plain(value: Any) -> Any:
    """What JSON knows: an infinite number is none."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def right(row: Row) -> bool:
    """Whether its figures count: it passed, or was not asked to."""
    return row.get("accuracy") in ("pass", None)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Pass rate, and over the rows that are right: geometric-mean speed-up, compile seconds, memory compression."""
    good = [row for row in rows if right(row)]
    judged = [row for row in rows if row.get("accuracy") is not None]
    return {
        "rows": len(rows),
        "passed": sum(row.get("accuracy") == "pass" for row in rows),
        "pass_rate": sum(row["accuracy"] == "pass" for row in judged) / len(judged) if judged else None,
        "not_run": sum(row.get("accuracy") not in (*RAN, None) for row in rows),
        "geomean_speedup": _geomean([row["speedup"] for row in good if row.get("speedup")]),
        "mean_compile_s": _mean([row["compile_s"] for row in good if row.get("compile_s")]),
        "geomean_compression": _geomean([row["compression_ratio"] for row in good if row.get("compression_ratio")]),
        "noisy": sum(bool(row.get("noise")) for row in rows),
    }


def _geomean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def shown(row: Row) -> Row:
    """What the table for people has of a row."""
    cells = {name: row.get(name) for name in SHOWN}
    if row.get("speedup") is not None:
        low, high = row["speedup_low"], row["speedup_high"]
        cells |= {"speedup": f"{row['speedup']:.2f}x", "95%": f"{low:.2f}-{high:.2f}"}
    if row.get("compile_s"):
        cells["compile_s"] = f"{row['compile_s']:.0f}"
    if row.get("compression_ratio"):
        cells["memory"] = f"{1 / row['compression_ratio']:.0%}"
    noisy = f"NOISY: {row['noise']}" if row.get("noise") else ""
    cells["note"] = " ".join(filter(None, (row.get("note"), noisy)))
    return cells


def summary_line(found: dict[str, Any]) -> str:
    """The summary for people."""
    judged = found["pass_rate"] is not None
    parts = [f"{found['passed']} of {found['rows']} rows pass" if judged else f"{found['rows']} rows, none judged"]
    if found["not_run"]:
        parts.append(f"{found['not_run']} did not run")
    if found["geomean_speedup"]:
        parts.append(f"geometric-mean speed-up {found['geomean_speedup']:.2f}x")
    if found["mean_compile_s"]:
        parts.append(f"{found['mean_compile_s']:.0f} s to compile")
    if found["geomean_compression"]:
        parts.append(f"memory compression {found['geomean_compression']:.2f}")
    if found["noisy"]:
        parts.append(f"{found['noisy']} rows on a noisy machine")
    return ", ".join(parts)
