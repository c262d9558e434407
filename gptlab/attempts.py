"""The attempts of a run, told: which ended how, how long the next one took, and why the run is where it is.

    >>> from gptlab.runs import Run
    >>> print(*Run("runs/first").why(), sep="\\n")

Left out on purpose: what makes an attempt end (`launcher/`).
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gptlab.records import read_record

LINES = 12
"""Last lines of a traceback or a stack that are told; the files have the rest."""


def attempts_table(
    folders: Sequence[Path], spans: Mapping[int, tuple[int, int]], *, active: bool
) -> list[dict[str, Any]]:
    """Rows of `Run.attempts_table`.

    Args:
        folders: the attempts, oldest first.
        spans: by attempt, the first and the last step that it did.
        active: whether the last one still lasts.
    """
    rows: list[dict[str, Any]] = []
    for folder in folders:
        number = int(folder.name)
        ranks = [read_record(path) or {} for path in sorted(folder.glob("rank-*.json"))]
        main = next((rank for rank in ranks if rank.get("rank") == 0), {})
        error = read_record(folder / "error.json") or {}
        first, last = spans.get(number, (None, None))
        lasts = active and folder is folders[-1]
        begun = (read_record(folder / "attempt.json") or {}).get("began", main.get("began"))
        first_step, before = main.get("first_step"), rows[-1]["ended"] if rows else None
        rows.append(
            {
                "attempt": number,
                "world_size": main.get("world_size"),
                "began": begun,
                "ended": None if lasts else _ended(folder, error, ranks),
                "from_step": first - 1 if first is not None else main.get("from_step") if lasts else None,
                "to_step": last,
                "rank": error.get("rank"),
                "error": _sentence(error) if error else None,
                "recovery_s": first_step - before if first_step is not None and before is not None else None,
            }
        )
    return rows


def _ended(folder: Path, error: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> float | None:
    """When an attempt ended: by its error, its pause, or the last heartbeat that it left."""
    paused = read_record(folder / "paused.json") or {}
    beats = [rank["time"] for rank in ranks if "time" in rank]
    return error.get("time") or paused.get("time") or (max(beats) if beats else None)


def _sentence(error: Mapping[str, Any]) -> str:
    """Type, rank and message of an error.json, once each."""
    kind, message = str(error.get("type")), str(error.get("message"))
    if kind.startswith("Worker"):  # its message names the rank
        return message
    where = f" on rank {error['rank']}" if error.get("rank") is not None else ""
    return f"{kind}{where}: {message}"


def why(
    name: str, status: Mapping[str, Any], result: Mapping[str, Any] | None, error: Mapping[str, Any] | None,
    folders: Sequence[Path], rows: Sequence[Mapping[str, Any]],
) -> list[str]:  # fmt: skip
    """Lines of `Run.why`."""
    state = str(status.get("state"))
    lines = [f"{state}: {_reason(state, status, result, error)}"]
    if state in ("failed", "lost", "diverged", "restarting") and folders and error:
        lines += _kept(folders[-1], error)
    if len(rows) > 1 or any(row["error"] for row in rows):
        lines += [_attempt_line(row) for row in rows]
    passed = [
        line for folder in folders[-1:] if (folder / "rank-0.out").exists()
        for line in (folder / "rank-0.out").read_text(errors="replace").splitlines() if " is passed over: " in line
    ]  # fmt: skip
    lines += passed
    if state in ("failed", "lost", "stopped"):
        lines.append(f"to go on from its newest good checkpoint: gptlab train --resume {shlex.quote(name)}")
    return lines


def _reason(
    state: str, status: Mapping[str, Any], result: Mapping[str, Any] | None, error: Mapping[str, Any] | None
) -> str:
    """The state, in a sentence."""
    result = result or {}
    step = result.get("step", status.get("step"))
    at = f"at step {step}" if step is not None else "before its first step"
    if state == "lost":
        last = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.get("updated", 0)))
        return f"its supervisor ended without a word {at}, last heard of at {last}"
    if state in ("failed", "diverged", "stopped") and (message := result.get("message") or status.get("message")):
        return f"{message}, {at}" if state == "stopped" else str(message)
    if state == "stopped":
        return f"as asked, {at}"
    if state == "restarting":
        return str(status.get("message") or (error and _sentence(error)) or at)
    if state == "planned":
        return "it was made, and nothing has started it yet"
    if state == "queued":
        return f"its job waits for its turn in SLURM's queue, {at}"
    straggler = status.get("straggler")
    return at + (f", the others wait for rank {straggler}" if straggler is not None else "")


def _kept(folder: Path, error: Mapping[str, Any]) -> list[str]:
    """What an attempt left of its error, and where."""
    lines: list[str] = []
    if text := str(error.get("traceback") or "").rstrip():
        shown = text.splitlines()
        lines += ["  ..."] * (len(shown) > LINES) + [f"  {line}" for line in shown[-LINES:]]
    files = sorted(path.name for path in folder.iterdir() if path.suffix in (".out", ".err", ".stack"))
    return [*lines, f"output of its ranks in {folder}: {', '.join(files)}"]


def _attempt_line(row: Mapping[str, Any]) -> str:
    """An attempt, in a line."""
    world = (
        f"{row['world_size']} worker{'s' if row['world_size'] != 1 else ''}" if row["world_size"] else "no worker yet"
    )
    steps = "no step" if row["to_step"] is None else f"steps {row['from_step'] + 1} to {row['to_step']}"
    line = f"attempt {row['attempt']}: {world}, {steps}"
    if row["recovery_s"] is not None:
        line += f", its first {row['recovery_s']:.2f} s after the end of the one before"
    return line + (f"; {row['error']}" if row["error"] else "")
