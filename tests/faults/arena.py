"""Where the campaign's runs are made, watched and compared.

A run is of a tiny GPT over a few dozen steps, started as `gptlab.launch` starts one, but for a worker that has the
plan's faults built in (`injection.py`). It is compared with one of the same seed to which nothing happened.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from gptlab import hardware, peaks
from gptlab.config import TrainConfig
from gptlab.launcher import client, detached
from gptlab.launcher.handle import Handle
from gptlab.recording import Claim, create_run
from gptlab.runs import Run, is_locked, read_json, write_json

STEPS = 40
PATIENCE_S = 400.0
"""How long a run may take until what a case waits for: it is no measure, and a busy machine is slow."""


class Skipped(Exception):
    """A case that this machine cannot run, with the reason."""


class Arena:
    """A folder with a text, the runs of the campaign, and the unbroken ones to compare with."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, folder / "runs"
        self.text = folder / "text.txt"
        stdlib = Path(sysconfig.get_paths()["stdlib"])
        if not self.text.exists():
            self.text.write_text((stdlib / "argparse.py").read_text())
        rates = asdict(
            peaks.Rates(1e11, 1e11, 1e11, 1e10, 1e10)
        )  # what a CPU does is measured once, which takes seconds
        peaks.cache_file().parent.mkdir(parents=True, exist_ok=True)
        write_json(peaks.cache_file(), {peaks.cache_key(hardware.cpu_name(), "float32", hardware.cores()): rates})
        self._unbroken: dict[str, Run] = {}
        (folder / "history").mkdir(exist_ok=True)
        os.environ["FAULTS_HISTORY"] = str(folder / "history")
        self._count = 0
        self.watched: set[int] = set()  # pids of workers and supervisors that a case has seen

    def config(self, **changes: Any) -> TrainConfig:
        """A run whose step takes some milliseconds."""
        values: dict[str, Any] = {
            "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "dropout": 0.1, "global_batch_size": 8,
            "micro_batch_size": 2, "max_iters": STEPS, "warmup_iters": 5, "checkpoint_interval": 5, "eval_interval": 20,
            "eval_iters": 1, "log_interval": 10, "keep_checkpoints": 3, "device": "cpu", "dtype": "float32",
            "threads": 1, "nproc": 2, "seed": 7, "data": str(self.text),
        }  # fmt: skip
        return TrainConfig(**(values | changes))

    def start(self, *plan: dict[str, Any], runs: Path | None = None, **changes: Any) -> Handle:
        """A run with its faults."""
        self._count += 1
        run = create_run(self.config(**changes), f"run-{self._count:03d}", runs or self.runs)
        write_json(run.path / "plan.json", list(plan))
        return self.begin(run)

    def begin(self, run: Run, *, detach: bool = False) -> Handle:
        """Has a run begin, or go on."""
        claim, prepared = Claim(run.path, wait_s=5.0), self.is_prepared(run)
        start = detached.start if detach else client.start
        handle = start(run, claim, cwd=self.folder, prepared=prepared, worker="injection:run_rank")
        if not detach:
            self.watched.add(client.supervisor().process.pid)
        return handle

    def is_prepared(self, run: Run) -> bool:
        """Whether the run's text is prepared."""
        from gptlab import corpus

        return corpus.find(run.config.data, run.config.tokenizer) is not None

    def unbroken(self, **changes: Any) -> Run:
        """The run of that config to which nothing happened."""
        key = json.dumps(changes, sort_keys=True)
        if key not in self._unbroken:
            handle = self.start(**changes)
            assert handle.wait(PATIENCE_S)["status"] == "finished", told(handle.run)
            self._unbroken[key] = handle.run
        return self._unbroken[key]

    def finish(self, handle: Handle, status: str = "finished") -> dict[str, Any]:
        """Waits for the end, which has to be that."""
        try:
            result = handle.wait(PATIENCE_S)
        except TimeoutError as error:
            raise AssertionError(f"{error}; {told(handle.run)}") from None
        assert result["status"] == status, f"{result['status']}, not {status}; {told(handle.run)}"
        return result

    def workers(self, run: Run) -> list[int]:
        """Process ids by rank, remembered for `left_over`."""
        pids = (read_json(run.path / "status.json") or {}).get("pids", [])
        self.watched.update(pids)
        return list(pids)

    def clear(self) -> None:
        """Ends what a failed case left."""
        client.supervisor().close()
        self.watched.clear()

    def left_over(self) -> list[str]:
        """What a case should have removed, and did not within a moment."""
        deadline = time.monotonic() + 5
        while (found := self._left_now()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.watched.clear()
        return found

    def _left_now(self) -> list[str]:
        """Processes, locks, sockets that listen, rendezvous folders, shared memory."""
        found = [f"process {pid}" for pid in self.watched if pid != _supervisor() and alive(pid)]
        found += [f"lock of {path.parent.name}" for path in self.runs.glob("*/lock") if is_locked(path.parent)]
        own = client.supervisor()
        found += [f"folder {path.name}" for path in own.folder.glob("meet-*")]
        for process in [own.process.pid, *(child.pid for child in psutil.Process(own.process.pid).children(True))]:
            found += [f"listening socket of {process}" for c in _connections(process) if c.status == "LISTEN"]
        for one in psutil.process_iter(["cmdline"]):
            words = " ".join(one.info["cmdline"] or [])
            if "launcher.detached" in words and str(self.runs) in words:
                found.append(f"process {one.pid}, which waits for a detached run")
        found += [f"shared memory {path.name}" for path in Path("/dev/shm").glob("*") if _is_own(path)]
        return found


def _supervisor() -> int:
    return client.supervisor().process.pid


def _is_own(path: Path) -> bool:
    """Whether a file of shared memory names a process of this campaign."""
    own = {str(child.pid) for child in psutil.Process().children(True)}
    return any(pid in path.name for pid in own)


def _connections(pid: int) -> list[Any]:
    try:
        return list(psutil.Process(pid).net_connections("inet"))
    except psutil.Error:
        return []


def alive(pid: int) -> bool:
    """Whether a process runs, or could."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], Any], seconds: float = PATIENCE_S, what: str = "it") -> float:
    """Waits until something is so; the seconds that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"{what} did not happen in {seconds:g} s"
        time.sleep(0.005)
    return time.monotonic() - began


def steps(run: Run) -> int:
    """Steps that are done."""
    rows = run.metrics()
    return int(rows[-1]["step"]) if rows else 0


def losses(run: Run) -> list[float]:
    """By step."""
    return [row["loss"] for row in run.metrics() if "loss" in row]


def told(run: Run) -> str:
    """All that the run has to say for itself, for a message."""
    return f"{run.name}: " + " | ".join(run.why()) + " | " + run.log()[-1500:]


def check_equal(run: Run, reference: Run) -> str:
    """Losses, looks at the validation loss, final weights and optimizer bit for bit; each sequence once."""
    ours, theirs = run.metrics(), reference.metrics()
    assert losses(run) == losses(reference), _first_difference(losses(run), losses(reference))
    looks = [[(row["step"], row["val_loss"]) for row in rows if "val_loss" in row] for rows in (ours, theirs)]
    assert looks[0] == looks[1], f"validation losses {looks}"
    for name in ("model.safetensors", "optimizer.safetensors"):
        mine, other = ((r.checkpoints()[-1] / name).read_bytes() for r in (run, reference))
        assert mine == other, f"{name} differs from the unbroken run's"
    check_history(run, reference)
    return "bit for bit"


def check_close(run: Run, reference: Run) -> str:
    """The same ids at every step, each sequence once, and losses within 1e-4."""
    check_history(run, reference)
    mine, other = losses(run), losses(reference)
    assert len(mine) == len(other), (len(mine), len(other))
    largest = max(abs(a - b) for a, b in zip(mine, other, strict=True))
    assert largest < 1e-4, f"losses differ by {largest:.1e}"
    return f"ids, losses to {largest:.0e}"


def check_history(run: Run, reference: Run) -> None:
    """Every (step, index of the batch) enters the final history once, with the ids of the unbroken run's."""
    assert history(run) == history(reference), "the ids of some step are not the unbroken run's"


def history(run: Run) -> dict[tuple[int, int], str]:
    """Hash of each sequence by step and place in the global batch, of the attempt that the step counts of."""
    attempts = {row["step"] - 1: row["attempt"] for row in run.metrics() if "loss" in row}
    found: dict[tuple[int, int], str] = {}
    for line in (Path(os.environ["FAULTS_HISTORY"]) / f"{run.name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        if attempts.get(row["step"]) == row["attempt"]:
            for index, ids in enumerate(row["ids"], start=row["first"]):
                key = row["step"], index
                again = run.config.strategy.startswith("pp") and found.get(key) == ids  # by each of its stages
                assert key not in found or again, f"{key} was taken twice"
                found[key] = ids
    indices = range(run.config.global_batch_size)
    assert set(found) == {(step, index) for step in range(STEPS) for index in indices}, "sequences are missing"
    return found


def _first_difference(mine: list[float], other: list[float]) -> str:
    at = next((n for n, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other)))
    return f"losses differ from step {at + 1} on, of {len(mine)} and {len(other)}"


def script(code: str, *arguments: object, **more: Any) -> subprocess.Popen[str]:
    """A process of its own that may launch runs."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, **more,
    )  # fmt: skip


def command(*words: object, **more: Any) -> subprocess.Popen[str]:
    """The command `gptlab`, as a process."""
    return script("import sys; from gptlab.cli import main; sys.exit(main(sys.argv[1:]))", *words, **more)


def free_port() -> socket.socket:
    """A socket that occupies a port of the loopback."""
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    return taken


def temporary() -> tempfile.TemporaryDirectory[str]:
    """A folder for the campaign."""
    return tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True)
