"""The cost model held against runs: what `gptlab cost` foretells of a step's time and of memory, and what they took.

    python -m gptlab.benchmark.predictions            # 0 where all are within the limits

Rates are measured first, where they are not known yet; each run is one process with all cores, as `gptlab train` makes
it. Left out on purpose: the model itself (`costs.py`, `footprint.py`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptlab import costs
from gptlab.config import TrainConfig
from gptlab.launcher import launch

TIME_WITHIN, MEMORY_WITHIN = 0.25, 0.10
"""Of what was measured."""
WARM = 3
"""First steps that do not count: memory is touched for the first time."""
CASES: Mapping[str, dict[str, Any]] = {
    "4/4/128, T 64, float32": {
        "n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "global_batch_size": 12, "dtype": "float32",
        "max_iters": 200,
    },
    "10m, T 256, bfloat16": {
        "n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "global_batch_size": 16, "dtype": "bfloat16",
        "max_iters": 24,
    },
    "10m, T 256, float32, torch": {
        "n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "global_batch_size": 16, "dtype": "float32",
        "kernels": "torch", "max_iters": 12,
    },
    "25m, T 512, bfloat16": {
        "n_layer": 8, "n_head": 8, "n_embd": 512, "block_size": 512, "global_batch_size": 8, "dtype": "bfloat16",
        "max_iters": 16,
    },
    "gpt2, T 1024, bfloat16": {
        "n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "global_batch_size": 4, "dtype": "bfloat16",
        "max_iters": 10,
    },
}  # fmt: skip


def check(name: str, fields: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Trains a config for a few steps, in a folder of its own.

    Returns:
        A row: `name`, and of `step_s` and `peak_bytes` what was `predicted_`, what was `measured_`, and how far the
        first is `off_` the second, signed, as a share of it.
    """
    steps = fields["max_iters"]
    # A checkpoint near the end: the copy that it is written from is part of the peak, and writing it takes a core.
    saved = steps - 2
    interval = {"eval_interval": 10 * steps, "eval_iters": 1, "checkpoint_interval": saved, "log_interval": 1}
    # A small text: the pages of a larger one that a run touches are the system's cache, and count as the process's.
    text = {"data": argparse.__file__, "tokenizer": "gpt2" if name.startswith("gpt2") else "char"}
    handle = launch(TrainConfig(**{**fields, **interval, **text}), name="run", runs_dir=folder)
    status = handle.wait()
    if status["status"] != "finished":
        raise RuntimeError(f"{name}: the run is {status['status']}: {handle.log()[-2000:]}")
    rows = [row for row in handle.metrics() if "loss" in row]
    found = costs.cost(TrainConfig.from_dict(handle.run.info["config"]))
    row: dict[str, Any] = {"name": name}
    measured = {
        "step_s": statistics.median(one["step_s"] for one in rows[WARM:saved]),
        "peak_bytes": max(one["peak_bytes"] for one in rows) - handle.run.info["base_bytes"],
    }
    for what, figure in (("step_s", found["predicted_step_s"]), ("peak_bytes", found["peak_bytes"])):
        row |= {f"predicted_{what}": figure, f"measured_{what}": measured[what]}
        row[f"off_{what}"] = figure / measured[what] - 1
    return row


def within(row: Mapping[str, Any]) -> bool:
    """Whether both figures of a row are as near as they should be."""
    return abs(row["off_step_s"]) <= TIME_WITHIN and abs(row["off_peak_bytes"]) <= MEMORY_WITHIN


def main(cases: Mapping[str, dict[str, Any]] = CASES) -> int:
    """Prints a row a case, as it ends."""
    print(f"{'':28} {'predicted':>10} {'measured':>10} {'off':>6}   {'predicted':>10} {'measured':>10} {'off':>6}")
    rows = []
    for name, fields in cases.items():
        with tempfile.TemporaryDirectory(prefix="gptlab-") as folder:
            row = check(name, fields, Path(folder))
        rows.append(row)
        pair = [1e3 * row["predicted_step_s"], 1e3 * row["measured_step_s"]]
        time = f"{pair[0]:7.0f} ms {pair[1]:7.0f} ms {row['off_step_s']:+6.0%}"
        pair = [row["predicted_peak_bytes"] / 1e6, row["measured_peak_bytes"] / 1e6]
        memory = f"{pair[0]:7.0f} MB {pair[1]:7.0f} MB {row['off_peak_bytes']:+6.0%}"
        print(f"{name:28} {time}   {memory}", flush=True)
    good = sum(map(within, rows))
    print(f"{good} of {len(rows)} within {TIME_WITHIN:.0%} in time and {MEMORY_WITHIN:.0%} in memory")
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
