"""Words for people: tables, and the lines in which the command tells records.

    >>> from gptlab.wording import amount
    >>> amount(124439808), amount(2.5e10, "B")
    ('124.4 M', '25.0 GB')

Left out on purpose: where the records come from.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gptlab.config import TrainConfig
from gptlab.runs import Run

if TYPE_CHECKING:
    from rich.table import Table

_SHORT = {"tokens_per_s": "tok/s", "parameters": "params", "seconds": "time"}
"""Headings that stand for a longer name."""
_WIDE = 250
"""Columns that a table may take where no terminal sets a limit."""


def write(text: str) -> None:
    """Prints a text in one piece: who reads it from a pipe has either all of it or has left before it came."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def amount(number: float, unit: str = "") -> str:
    """A number with a prefix of its thousands: 1500 is 1.5 k."""
    for prefix in ("", "k", "M", "G", "T", "P", "E"):
        if abs(number) < 1000 or prefix == "E":
            break
        number /= 1000
    digits = f"{number:.0f}" if prefix == "" and number == int(number) else f"{number:.1f}"
    return f"{digits} {prefix}{unit}".rstrip()


def duration(seconds: float) -> str:
    """Seconds as one reads them: 0.25 s, 12 s, 3 min, 2.5 h, 3.1 days."""
    sizes = ((10, 1, ".2g", "s"), (120, 1, ".0f", "s"), (7200, 60, ".0f", "min"), (172_800, 3600, ".2g", "h"))
    for limit, size, form, unit in sizes:
        if seconds < limit:
            return f"{seconds / size:{form}} {unit}"
    return f"{seconds / 86_400:.3g} days"


def cell(name: str, value: Any) -> str:
    """A table's cell."""
    if value is None or value != value:
        return ""
    if name in ("loss", "val_loss"):
        return f"{value:.4f}"
    if name == "mfu":
        return f"{100 * value:.2f}%"
    if name in ("tokens_per_s", "parameters", "non_embedding", "tokens"):
        return amount(value)
    if name == "seconds":
        return duration(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> Table:
    """Rows as a table; numbers stand to the right."""
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        numbers = any(isinstance(row.get(name), int | float) for row in rows)
        drawn.add_column(_SHORT.get(name, name), justify="right" if numbers else "left", no_wrap=name != "reason")
    for row in rows:
        drawn.add_row(*(cell(name, row.get(name)) for name in columns))
    return drawn


def print_table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Prints rows; nothing is cut off where the output is no terminal."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=_WIDE)
    console.print(table(columns, rows))


def sweep_columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What a sweep's table shows: columns that say something, without the runs' names."""
    hidden = ("name", "non_embedding", "matmul_parameters", "flops", "max_iters")
    return [name for name in rows[0] if name not in hidden and any(row[name] is not None for row in rows)]


def end_line(run: Run, result: dict[str, Any]) -> str:
    """The last line of a run."""
    status = result["status"]
    if status in ("finished", "stopped"):
        loss = result.get("val_loss")
        text = f"{status} at step {result.get('step')}"
        text += f", val loss {loss:.4f}" if loss is not None else ""
        accuracy = result.get("val_accuracy")
        text += f", accuracy {accuracy:.4f}" if accuracy is not None else ""
        return f"{text}; run in {run.path}"
    error = run.error() or {}
    text = result.get("message") or f"{error.get('type')}: {error.get('message')}"
    attempts = run.attempts()
    place = f"; output and traceback in {attempts[-1]}" if attempts else ""
    return f"{status}: {text}{place}"


def eval_line(record: dict[str, Any]) -> str:
    """What `evaluation.evaluate` found."""
    what = record.get("file") or f"{record['split']} split"
    if record["accuracy"] is not None:
        found = f"loss {record['loss']:.4f} nats a document, accuracy {record['accuracy']:.4f}"
        how = f"{record['documents']:,} documents, {record['dtype']}"
    else:
        bits = record["bits_per_byte"]
        found = f"loss {record['loss']:.4f} nats a token, perplexity {record['perplexity']:.4g}"
        found += f", {bits:.4f} bits a byte" if bits is not None else ""
        how = f"{record['tokens']:,} tokens, {record['bytes']:,} bytes, {record['dtype']}"
    if record["dtype_reason"] != "as asked":
        how += f": {record['dtype_reason']}"
    return f"{record['run']} at step {record['step']}, {what}: {found} ({how})"


def show_lines(run: Run) -> list[str]:
    """A run at length."""
    lines = [f"{name:14} {cell(name, value)}" for name, value in run.row().items() if value is not None]
    lines.append(f"{'path':14} {run.path}")
    lines.append(f"{'config':14} {json.dumps(run.info.get('config'))}")
    for name in ("setting", "reasons", "device_name", "data"):
        if name in run.info:
            lines.append(f"{name:14} {json.dumps(run.info[name])}")
    return [*lines, *run.why()]


def cost_lines(config: TrainConfig, record: dict[str, Any]) -> list[str]:
    """What a config asks for, from `costs.cost`."""
    groups = ", ".join(
        f"{name.replace('_', ' ')} {amount(count)}" for name, count in record["parameter_groups"].items()
    )
    vocabulary = record["vocab_size"] or "not known before the text is prepared"
    shape = f"{config.n_layer} layers, {config.n_head} heads, width {config.n_embd}, context {config.block_size}"
    flops = {name: amount(record[f"flops{name}"], "FLOP") for name in ("_per_token", "_per_step", "")}
    memory = {name: amount(record[f"{name}_bytes"], "B") for name in ("peak", "state", "memory")}
    lines = [
        f"shape        {shape}, vocabulary {vocabulary}",
        f"parameters   {record['parameters']:,} ({record['non_embedding_parameters']:,} without embeddings)",
        f"             {groups}",
        f"FLOPs        {flops['_per_token']} a token, {flops['_per_step']} a step of {record['tokens_per_step']:,} "
        f"tokens, {flops['']} for {config.max_iters:,} steps",
        f"memory       {memory['peak']} a process at its peak, of that {memory['state']} training state; "
        f"micro-batch {record['micro_batch_size']}; this device has {memory['memory']}",
        f"device       {record['device']}, {record['dtype']}: {record['dtype_reason']}",
    ]
    if record["predicted_s"] is not None:
        mfu = f", mfu {100 * record['predicted_mfu']:.0f}%" if record["predicted_mfu"] is not None else ""
        step = duration(record["predicted_step_s"])
        lines.append(f"time         {duration(record['predicted_s'])}, {step} a step{mfu} (predicted)")
    else:
        lines.append("time         not known: --measure measures this machine once")
    if record["refusal"]:
        lines.append(record["refusal"])
    return lines


def doctor_lines(record: dict[str, Any]) -> list[str]:
    """What the machine offers and what is missing, from `hardware.report`."""
    lines = [f"{record['cpu']}, {record['cores']} cores, {amount(record['memory_bytes'], 'B')} of memory"]
    for device in record["devices"]:
        if device["kind"] != "cpu":
            lines.append(f"{device['name']}, {amount(device['memory_bytes'], 'B')}")
    for check in record["checks"]:
        mark = "ok     " if check["ok"] else "missing"
        lines.append(f"{mark}  {check['name']:16} {check['found'] if check['ok'] else check['mend']}")
    return lines
