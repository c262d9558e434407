"""A cell in processes of its own, with a limit: whatever becomes of them, a row comes back.

    >>> from gptlab.benchmark.cells import Plan, grid
    >>> from gptlab.benchmark.isolation import run
    >>> run(grid(Plan("train", "tiny", options={"pairs": 2}), {})[0][0])["accuracy"]
    'pass'

Each process writes into files of its own; what this one reads there goes into the row alone. Left out on purpose: what
they do (`cell.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gptlab.benchmark.cells import Cell
from gptlab.runs import read_json, write_json

POLL_S = 0.05
"""Seconds between two looks at processes."""
LINGER_S = 5.0
"""Seconds that the others get to follow one that failed: the first error is seldom the last."""
OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError", "can't allocate memory", "Cannot allocate memory", "bad_alloc")


def run(cell: Cell) -> dict[str, Any]:
    """Judges and races a cell, then measures each side's memory; returns the columns that came of it."""
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="gptlab-bench-") as name:
        folder = Path(name)
        write_json(folder / "cell.json", cell.to_dict())
        failure = start(cell, folder, "race")
        row = read_json(folder / "race.json") or {}
        if failure:
            row |= failure
        if cell.performance and cell.memory and "speedup" in row:
            row |= _memory(cell, folder)
    if "speedup" in row and not cell.accuracy and "accuracy" not in row:
        row["accuracy"] = None
    return row | {"began": began, "cell_s": time.time() - began}


def _memory(cell: Cell, folder: Path) -> dict[str, Any]:
    """Peak memory of each side, and the warm compile seconds of ours."""
    found: dict[str, Any] = {}
    for part, side in (("ours", ""), ("theirs", "against_")):
        if failure := start(cell, folder, part):
            found["memory_note"] = failure["note"]
            continue
        alone = read_json(folder / f"{part}.json") or {}
        found[f"{side}peak_bytes"] = alone.get("peak_bytes")
        if not side:
            found["warm_compile_s"] = alone.get("compile_s")
    return found


def start(cell: Cell, folder: Path, part: str) -> dict[str, Any] | None:
    """Runs a part of a cell in its processes; the columns of a failure, or None."""
    (folder / "stage").unlink(missing_ok=True)
    processes = [_process(folder, rank, part) for rank in range(cell.config.nproc)]
    end: float | None = time.monotonic() + cell.limit_s
    late = False
    try:
        while any(process.poll() is None for process in processes):
            if end is not None and time.monotonic() > end:
                late = not any(process.poll() for process in processes)
                break
            if any(process.poll() for process in processes):
                end = min(end or 0.0, time.monotonic() + LINGER_S) if end else end
            time.sleep(POLL_S)
    finally:
        codes = [process.poll() for process in processes]
        for process in processes:
            _kill(process)
    stage = (folder / "stage").read_text() if (folder / "stage").exists() else "prepare"
    if late:
        return {"accuracy": "timeout", "note": f"it took more than {cell.limit_s:.0f} s, the last in its {stage} part."}
    failed = next((rank for rank, code in enumerate(codes) if code), None)
    if failed is None:
        return None
    return _failure(folder / f"{part}-{failed}.err", codes[failed] or 0, stage, failed)


def _process(folder: Path, rank: int, part: str) -> subprocess.Popen[bytes]:
    home = str(Path(__file__).parents[2])
    path = os.pathsep.join(entry for entry in (home, os.environ.get("PYTHONPATH", "")) if entry)
    environment = {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    with open(folder / f"{part}-{rank}.out", "wb") as out, open(folder / f"{part}-{rank}.err", "wb") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "gptlab.benchmark.cell", str(folder), str(rank), part],
            stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True,
        )  # fmt: skip


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and what it started, compilers too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _failure(log: Path, code: int, stage: str, rank: int) -> dict[str, Any]:
    """What a process's end means."""
    words = log.read_text(errors="replace").strip().splitlines()
    last = next((line for line in reversed(words) if line.strip()), "it said nothing")[-300:]
    if any(sign in line for line in words[-30:] for sign in OUT_OF_MEMORY):
        return {"accuracy": "OOM", "note": f"memory ran out in the {stage} part: {last}"}
    if code == -signal.SIGKILL:
        return {"accuracy": "OOM", "note": f"process {rank} was killed in its {stage} part, as the system does when "
                                           "memory runs out."}  # fmt: skip
    status = "eager_fail_to_run" if stage in ("eager", "golden") else "fail_to_run"
    if code < 0:
        last = f"it was ended by {signal.Signals(-code).name}; its last words: {last}"
    return {"accuracy": status, "note": f"process {rank} failed in its {stage} part: {last}"}
