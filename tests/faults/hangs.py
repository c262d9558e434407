"""Workers that hang, are stopped, are slow, fail, or come and go."""

from __future__ import annotations

import functools
import os
import signal
import time
from typing import Any

from arena import STEPS, Arena, alive, check_close, check_equal, losses, steps, told, until
from verdicts import Case, Outcome

from gptlab.launcher import client
from gptlab.runs import read_json

LIMIT_S = 2.0
"""hang_timeout_s of these runs."""


def stuck(arena: Arena, do: str = "sleep", rank: int = 1) -> Outcome:
    fault = {"attempt": 1, "rank": rank, "step": 12, "at": "before", "do": do, "seconds": 600.0}
    handle = arena.start(fault, hang_timeout_s=LIMIT_S)
    until(lambda: (handle.run.path / "struck").exists())
    pid = arena.workers(handle.run)[rank]
    until(lambda: len(handle.run.attempts()) == 2)
    noticed = time.time() - float((handle.run.path / "struck").read_text())
    until(lambda: not alive(pid))
    arena.finish(handle)
    folder = handle.run.attempts()[0]
    error, stack = read_json(folder / "error.json") or {}, (folder / f"rank-{rank}.stack").read_text()
    assert error["rank"] == rank and error["step"] == 12, error
    if do == "sleep":
        assert error["type"] == "WorkerHung" and "made no progress" in error["message"], error
        assert "injection.py" in stack and "in _strike" in stack and "_strike" in error["traceback"], stack
    else:
        assert error["type"] == "WorkerStopped" and "SIGSTOP" in error["message"], error
        assert "stopped by a signal" in stack, stack
    other = (folder / f"rank-{1 - rank}.stack").read_text()
    assert "in finish" in other or "in sum" in other, other
    kept = "stack kept" if do == "sleep" else "no stack, and why"
    return Outcome(
        f"rank {rank} named after {noticed:.1f} s, {kept}; replaced", check_equal(handle.run, arena.unbroken())
    )


def slow(arena: Arena) -> Outcome:
    fault = {"rank": 1, "step": 0, "from": True, "at": "before", "do": "sleep", "seconds": 0.05}
    handle = arena.start(fault, hang_timeout_s=LIMIT_S)
    until(lambda: steps(handle.run) >= 15)
    until(lambda: handle.run.status().get("straggler") is not None or handle.status != "running")
    status = handle.run.status()
    assert status.get("straggler") == 1, status
    waits = [share and share["wait"] for share in status["shares"]]
    arena.finish(handle)
    assert len(handle.run.attempts()) == 1, told(handle.run)
    assert waits[0] > 0.15 and waits[0] > waits[1], waits
    return Outcome(
        f"rank 1 named as straggler, rank 0 waits {100 * waits[0]:.0f} % of its time",
        check_equal(handle.run, arena.unbroken()),
    )


def resized(arena: Arena) -> Outcome:
    hold = {"at": "before", "do": "sleep", "seconds": 0.05, "step": 0, "from": True}  # leaves time to be resized in
    handle = arena.start(hold, nproc=1, checkpoint_interval=1000)
    for goal, workers in ((8, 2), (20, 1)):
        until(lambda goal=goal: steps(handle.run) >= goal)  # type: ignore[misc]
        handle.scale(workers)
        until(lambda workers=workers: handle.run.metrics()[-1]["world_size"] == workers)  # type: ignore[misc]
    arena.finish(handle)
    rows = handle.run.attempts_table()
    assert [row["world_size"] for row in rows] == [1, 2, 1] and not any(row["error"] for row in rows), rows
    assert [row["from_step"] for row in rows[1:]] == [row["to_step"] for row in rows[:-1]], "a step was done twice"
    seconds = [row["recovery_s"] for row in rows[1:]]
    shown = " and ".join(f"{s:.2f}" for s in seconds)
    return Outcome(
        f"1 -> 2 -> 1, no step twice, {shown} s to the next step", check_close(handle.run, arena.unbroken(nproc=1))
    )


def uneven(arena: Arena) -> Outcome:
    three: dict[str, Any] = {"nproc": 3, "micro_batch_size": 1}
    reference = arena.unbroken(**three)
    handle = arena.start({"attempt": 1, "rank": 2, "step": 11, "at": "amid", "do": "kill"}, **three)
    arena.finish(handle)
    assert len(handle.run.attempts()) == 2
    check_equal(handle.run, reference)
    close = check_close(handle.run, arena.unbroken(nproc=1, micro_batch_size=1))
    return Outcome("3, 3 and 2; a rank killed on the way", f"bit for bit; to 1 worker: {close}")


def fails(arena: Arena, do: str = "raise", once: bool = False) -> Outcome:
    fault: dict[str, Any] = {"rank": 1, "step": 12, "at": "before", "do": do}
    handle = arena.start(fault | ({"attempt": 1} if once else {}))
    says = {
        "raise": "ValueError on rank 1: an exception of the campaign", "memory": "MemoryError on rank 1",
        "leave": "rank 1 left with exit code 0, though the run is not over, after step 12",
    }[do]  # fmt: skip
    if once:
        arena.finish(handle)
        row = handle.run.attempts_table()[0]
        assert row["error"].startswith(says) and row["rank"] == 1 and row["to_step"] == 12, row
        return Outcome("rank, step and cause named; replaced", check_equal(handle.run, arena.unbroken()))
    result = arena.finish(handle, "failed")
    assert len(handle.run.attempts()) == 2 and says in result["message"], result
    assert "came twice at the same step" in result["message"] and result["error"]["step"] == 12, result
    assert steps(handle.run) == 12
    lines = "\n".join(handle.why())
    assert says in lines and "attempt 1: 2 workers, steps 1 to 12" in lines and "--resume" in lines, lines
    if do != "leave":
        assert "in _strike" in lines, lines
    return Outcome("failed at its second time at step 12, with the first rank's error")


def out_of_memory(arena: Arena) -> Outcome:
    """The kernel's out-of-memory killer sends SIGKILL, and says so nowhere that a process could read it."""
    handle = arena.start({"attempt": 1, "rank": 1, "step": 12, "at": "amid", "do": "kill"})
    arena.finish(handle)
    row = handle.run.attempts_table()[0]
    assert "rank 1 was killed by SIGKILL (by hand, or for want of memory) after step 12" in row["error"], row
    return Outcome("rank, step and want of memory named; replaced", check_equal(handle.run, arena.unbroken()))


def not_a_number(arena: Arena) -> Outcome:
    handle = arena.start({"step": 12, "from": True, "at": "before", "do": "nan"})
    result = arena.finish(handle, "diverged")
    assert result["step"] == 17 and "5 steps in a row were not finite, the last at step 17" in result["message"], result
    assert len(handle.run.attempts()) == 1 and losses(handle.run)[:12] == losses(arena.unbroken())[:12]
    assert [path.name for path in handle.run.checkpoints()] == ["step-00000005", "step-00000010"]
    once = arena.start({"step": 12, "at": "before", "do": "nan"})
    assert arena.finish(once)["skipped_steps"] == 1 and steps(once.run) == STEPS
    return Outcome("diverged at step 17, last good checkpoint kept; a single one is skipped")


def old_generation(arena: Arena) -> Outcome:
    """Rank 0 is stopped before a save, its supervisor dies, another attempt goes on, and then the old rank wakes up."""
    handle = arena.start({"attempt": 1, "rank": 0, "step": 15, "at": "save", "do": "stop"}, hang_timeout_s=0.0)
    until(lambda: (handle.run.path / "struck").exists())
    old = arena.workers(handle.run)[0]
    os.kill(client.supervisor().process.pid, signal.SIGKILL)
    until(lambda: handle.status == "lost")
    again = arena.begin(handle.run)
    until(lambda: steps(again.run) >= 5 and len(again.run.attempts()) == 2 and again.status == "running")
    os.kill(old, signal.SIGCONT)
    until(lambda: not alive(old))
    arena.finish(again)
    return Outcome("the old rank saved nothing and left", check_equal(again.run, arena.unbroken()))


_some = functools.partial
CASES = (
    Case("sleeping", "a worker that sleeps", stuck, quick=True),
    Case("sleeping-0", "rank 0 sleeps", _some(stuck, rank=0)),
    Case("stopped", "a worker that is SIGSTOPped", _some(stuck, do="stop"), quick=True),
    Case("slow", "a slow rank", slow),
    Case("resized", "1 -> 2 -> 1 workers", resized),
    Case("uneven", "8 sequences over 3 workers", uneven),
    Case("exception", "an exception, each time", fails, quick=True),
    Case("exception-once", "an exception, once", _some(fails, once=True)),
    Case("memory-error", "an allocation that fails, each time", _some(fails, do="memory")),
    Case("exit-0", "an early exit 0, each time", _some(fails, do="leave")),
    Case("exit-0-once", "an early exit 0, once", _some(fails, do="leave", once=True)),
    Case("out-of-memory", "an out-of-memory kill", out_of_memory),
    Case("nan", "NaN at step 12", not_a_number, quick=True),
    Case("old-generation", "an old generation's rank wakes up", old_generation),
)
