"""One side of a race in a process of its own: its peak memory above what was held before the model.

    echo '{"kind": "train", "config": {...}, ...}' | python -m gptlab.benchmark.alone plain

Prints bytes. Left out on purpose: time, which is taken by turns in one process.
"""

from __future__ import annotations

import json
import sys

from gptlab import memory
from gptlab.benchmark import sides

TURNS = 2
"""The optimizer's state is there from the first on, the gradients that are kept from the second."""


def main() -> None:
    """Reads a job, takes turns, prints the peak."""
    job = sides.Job.from_dict(json.load(sys.stdin))
    device = sides.prepare(job)
    if sys.argv[1] == "transformers":
        import transformers.models.gpt2.modeling_gpt2  # noqa: F401 - code is no part of what is measured
    memory.reset_peak(device)
    before = memory.peak_bytes(device)
    side = sides.make(sys.argv[1], job)
    for _ in range(TURNS):
        side.turn()
    print(memory.peak_bytes(device) - before)


if __name__ == "__main__":
    main()
