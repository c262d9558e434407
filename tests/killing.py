"""Trains a run in one process after another, each of which kills itself at a chosen moment.

    python tests/killing.py RUN '[{"event": 3}, {"step": 7}, {"bytes": 30000, "eval_interval": 2}, {}]'

Each item is one attempt, on a process forked from this one, which has torch imported and has computed nothing:

    event N   before the N-th call, from the first save on, that opens, makes, renames or removes in `checkpoints`
    bytes N   in the middle of the first file that would grow past N bytes (the row that says so is shorter)
    step N    after step N (or the attempt's first, if that is later), once half of its row was written
    pause S   with `step`: that many seconds later, wherever training and saving are by then
    {}        not at all

`eval_interval` is put into run.json before the attempt. Prints a line of JSON an attempt: the signal that ended it (0
for none), and the checkpoints it left.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import gptlab.corpus
import gptlab.training  # noqa: F401 - each attempt finds it imported
from gptlab.checkpoint import fault
from gptlab.recording import Claim, RunWriter
from gptlab.runs import read_json, write_json
from gptlab.worker import run_rank

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_before_event(path: Path, nth: int) -> None:
    """By CPython's audit hooks, which hear of each such call before it is made."""
    folder, left, saving = str(path / "checkpoints"), nth, False

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left, saving
        if event in EVENTS:
            inside = event in ("os.remove", "os.rmdir") and arguments[1] != -1  # rmtree names what lies in its folder
            inside |= str(arguments[0]).startswith(folder)
            saving |= inside and event == "os.mkdir"
            left -= inside and saving
            if left == 0:
                die()

    sys.addaudithook(hear)


def die_past_bytes(size: int) -> None:
    """The system's own limit on a file: what is below it is written, then comes the signal."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def die_after_step(step: int, pause: float | None) -> None:
    whole, dying = RunWriter.log, False

    def log(self: RunWriter, row: dict[str, Any]) -> None:
        nonlocal dying
        if row["step"] >= step and "loss" in row and not dying:
            dying = True
            if pause is None:
                whole(self, {"step": -1})  # opens the file
                line = json.dumps({**row, "attempt": self.attempt}).encode()
                self._metrics.write(line[: len(line) // 2])  # type: ignore[union-attr,arg-type]
                die()
            else:
                threading.Timer(pause, die).start()
        whole(self, row)

    RunWriter.log = log  # type: ignore[method-assign]


def attempt(path: Path, plan: dict[str, Any]) -> None:
    """One attempt, in this process."""
    number = Claim(path).new_attempt()
    for stream, fd in (("out", 1), ("err", 2)):
        os.dup2(os.open(path / "attempts" / f"{number:02d}" / f"rank-0.{stream}", os.O_CREAT | os.O_WRONLY), fd)
    torch.set_num_threads(1)
    if "event" in plan:
        die_before_event(path, plan["event"])
    if "bytes" in plan:
        die_past_bytes(plan["bytes"])
    if "step" in plan:
        die_after_step(plan["step"], plan.get("pause"))
    run_rank(path, attempt=number, rank=0, world_size=1, rendezvous="")


def main(path: Path, plans: list[dict[str, Any]]) -> None:
    for plan in plans:
        if "eval_interval" in plan:
            info = read_json(path / "run.json") or {}
            info["config"]["eval_interval"] = plan["eval_interval"]
            write_json(path / "run.json", info)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                attempt(path, plan)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        there = {folder.name: fault(folder) for folder in sorted((path / "checkpoints").glob("step-*"))}
        halves = len(list((path / "checkpoints").glob(".step-*")))
        code = os.waitstatus_to_exitcode(status)
        end = {"signal": max(0, -code), "code": code, "checkpoints": there, "halves": halves}
        print(json.dumps(end), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), json.loads(sys.argv[2]))
