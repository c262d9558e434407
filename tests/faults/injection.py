"""What every rank of a run in the campaign executes: the worker, with the faults of the run's plan built in.

`RUN/plan.json` is a list of faults:

    {"attempt": 1, "rank": 0, "step": 7, "at": "after", "do": "kill"}

attempt   on which it strikes; absent: on each one
rank      on which it strikes; absent: on each one
step      from 0; with "from": true also at all later ones
at        start (before anything), before, amid (with the gradients of some micro-batches) or after a step; save
          (half of a checkpoint's files are written)
do        kill, stop (SIGSTOP), sleep (so many seconds), raise, leave (exit code 0), memory (no more of it), nan, fill
          (the disk, with a file), sync save (training waits for its checkpoints), wait (to be killed from outside)

Before it strikes, `RUN/struck` gets the time. Every micro-batch that a rank takes is written into a file of the
folder FAULTS_HISTORY, with the hash of each sequence.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_rank(path: Path, *, attempt: int, rank: int, world_size: int, rendezvous: str) -> None:
    """`gptlab.worker.run_rank`, with the plan's faults."""
    from gptlab.worker import run_rank as work

    inject(path, attempt, rank)
    work(path, attempt=attempt, rank=rank, world_size=world_size, rendezvous=rendezvous)


def inject(path: Path, attempt: int, rank: int) -> None:
    """Builds the faults into this process."""
    plan = json.loads((path / "plan.json").read_text()) if (path / "plan.json").exists() else []
    mine = [fault for fault in plan if fault.get("attempt", attempt) == attempt and fault.get("rank", rank) == rank]
    _strike(path, [fault for fault in mine if fault["at"] == "start"])
    _keep_history(path, attempt, rank, [fault for fault in mine if fault["at"] == "amid"])
    _around_steps(path, [fault for fault in mine if fault["at"] in ("before", "after")])
    _amid_saves(path, [fault for fault in mine if fault["at"] == "save"])
    if any(fault["do"] == "sync save" for fault in mine):
        from gptlab import saving

        saving.free_bytes = lambda: 0  # then checkpoints are written while training waits


def _keep_history(path: Path, attempt: int, rank: int, faults: list[dict[str, Any]]) -> None:
    from gptlab.batches import Batches

    whole = Batches.micro_batch
    place = Path(os.environ["FAULTS_HISTORY"]) / f"{path.name}.jsonl"  # on no disk that a fault fills
    file = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def micro_batch(self: Batches, step: int, index: int, size: int) -> Any:
        ids, targets = whole(self, step, index, size)
        digests = [
            hashlib.sha256(row.numpy().tobytes() + target.numpy().tobytes()).hexdigest()[:16]
            for row, target in zip(ids, targets, strict=True)
        ]
        line = json.dumps({"attempt": attempt, "rank": rank, "step": step, "first": index * size, "ids": digests})
        os.write(file, line.encode() + b"\n")
        _strike(path, [fault for fault in faults if fault["step"] == step and fault.get("index", index) == index])
        return ids, targets

    Batches.micro_batch = micro_batch  # type: ignore[method-assign]


def _around_steps(path: Path, faults: list[dict[str, Any]]) -> None:
    from gptlab.step import TrainStep

    whole = TrainStep.__call__

    def due(step: int, at: str) -> list[dict[str, Any]]:
        return [
            fault for fault in faults
            if fault["at"] == at and (step == fault["step"] or (fault.get("from") and step > fault["step"]))
        ]  # fmt: skip

    def call(self: TrainStep, step: int, *, stop: bool = False) -> Any:
        now = due(step, "before")
        if any(fault["do"] == "nan" for fault in now):
            compute = self.strategy.compute
            self.strategy.compute = lambda *given: compute(*given) * float("nan")  # type: ignore[method-assign]
            try:
                return whole(self, step, stop=stop)
            finally:
                del self.strategy.compute
        _strike(path, now)
        result = whole(self, step, stop=stop)
        _strike(path, due(step, "after"))
        return result

    if faults:
        TrainStep.__call__ = call  # type: ignore[method-assign]


def _amid_saves(path: Path, faults: list[dict[str, Any]]) -> None:
    from gptlab import checkpoint, manifest

    whole: Callable[..., None] = vars(checkpoint)["write_json"]

    def write_json(target: Path, value: Any, **more: Any) -> None:
        if target.name == manifest.STATE:  # the tensors lie there, but neither this nor a manifest
            _strike(path, [fault for fault in faults if value["step"] == fault["step"]])
        whole(target, value, **more)

    if faults:
        vars(checkpoint)["write_json"] = write_json


def _strike(path: Path, faults: list[dict[str, Any]]) -> None:
    for fault in faults:
        do = fault["do"]
        if not fault.get("from"):
            (path / "struck").write_text(str(time.time()))
        if do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif do == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif do == "sleep":
            time.sleep(fault["seconds"])
        elif do == "wait":
            time.sleep(600)
        elif do == "raise":
            raise ValueError(fault.get("message", "an exception of the campaign"))
        elif do == "fill":
            with contextlib.suppress(OSError), open(fault["file"], "wb") as file:
                room = os.statvfs(file.name)
                file.write(bytes(max(0, room.f_bavail * room.f_frsize - fault["leave"])))
        elif do == "memory":
            bytearray(1 << 60)
        elif do == "leave":
            sys.stdout.flush()
            os._exit(0)


def main() -> None:
    """Under torchrun: `injection.py RUN`. Faults come in once the worker knows its attempt, as a requeued job's first
    start is not its first attempt."""
    from gptlab import worker

    path, whole = Path(sys.argv[1]), vars(worker)["_run"]

    def run(path: Path, attempt: int, *given: Any, **more: Any) -> None:
        inject(path, attempt, int(os.environ["RANK"]))
        whole(path, attempt, *given, **more)

    vars(worker)["_run"] = run
    worker.main(["--run", str(path)])


if __name__ == "__main__":
    main()
