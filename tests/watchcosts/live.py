"""Runs that seem to train: rows appended at a steady pace, with the moment each was written, and no training behind.

    >>> with Live(Path("runs"), runs=4, points=1000, every_s=0.5) as live:
    ...     live.written["live-1", 1001]

What watching costs does not hang on who writes; a writer that does next to nothing leaves the machine to be measured.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Self

import numpy as np

from gptlab.config import TrainConfig
from gptlab.recording import Claim, RunWriter, create_run


class Live:
    """Runs in a folder, each claimed as a trainer claims it, that grow until the end of the `with`.

    Args:
        points: rows that each has from the beginning.
        every_s: seconds between two rows of a run.
    """

    def __init__(self, folder: Path, *, runs: int = 4, points: int = 1000, every_s: float = 0.5) -> None:
        self.every_s = every_s
        self.written: dict[tuple[str, int], float] = {}
        """By name and step the moment (`time.time()`) after which a reader finds the row."""
        self._noise = np.random.default_rng(0)
        self._over = threading.Event()
        self._runs = []
        for place in range(runs):
            config = TrainConfig(n_layer=1 + place, n_head=2, n_embd=64, block_size=64, max_iters=10**6)
            run = create_run(config, f"live-{place + 1}", folder)
            claim = Claim(run.path)
            writer = RunWriter(run.path, claim.new_attempt())
            writer.status("running", world_size=1)
            self._runs.append((run.name, claim, writer))
        self.step = 0
        for _ in range(points):
            self._grow()
        self.written.clear()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        for _, claim, writer in self._runs:
            writer.status("stopped")
            claim.release()

    def _work(self) -> None:
        due = time.monotonic()
        while not self._over.is_set():
            self._grow()
            due = max(due + self.every_s, time.monotonic())
            self._over.wait(due - time.monotonic())

    def _grow(self) -> None:
        """Appends a row to each run."""
        self.step += 1
        for name, _, writer in self._runs:
            noise = float(self._noise.normal(0, 0.05))
            writer.log({
                "step": self.step, "tokens": self.step * 768, "loss": 2 + 3 / self.step**0.5 + noise, "lr": 1e-3,
                "grad_norm": 1.0 + noise, "step_s": 0.02, "tokens_per_s": 38_000.0 * (1 + noise),
                "mfu": 0.2 * (1 + noise), "time_s": self.step * 0.02, "world_size": 1,
            })  # fmt: skip
            self.written[name, self.step] = time.time()
