"""What the lab's tests share: run directories made by hand, a launcher that trains nothing, and patience."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gptlab.config import TrainConfig
from gptlab.recording import Claim, RunWriter, create_run
from gptlab.runs import Run


def made_run(folder: Path, name: str = "one", rows: int = 50, *, state: str = "finished", **fields: Any) -> Run:
    """A run directory as a trainer leaves it."""
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 64, "block_size": 64, "max_iters": 50}
    config = TrainConfig(**(shape | fields))
    run = create_run(config, name, folder)
    noise = random.Random(name)
    with Claim(run.path) as claim:
        writer = RunWriter(run.path, claim.new_attempt())
        for step in range(1, rows + 1):
            loss = 5 / step + 2 + noise.random() / 10
            speed = {"time_s": step / 50, "tokens_per_s": 40_000.0, "mfu": 0.2}
            writer.log({"step": step, "tokens": step * 768, "loss": loss} | speed)
        if rows:
            writer.log({"step": rows, "val_loss": 2.25})
        writer.status(state)
        if state in ("finished", "failed"):
            writer.result(state, val_loss=2.25)
    return run


class FakeLauncher:
    """Writes a run at once, or lets it run until it is stopped."""

    def __init__(self, *, endless: bool = False) -> None:
        self.endless = endless
        self.launched: list[str] = []
        self.resumed: list[str] = []

    def warm(self) -> None:
        pass

    def launch(self, config: TrainConfig, *, name: str | None, runs_dir: Path) -> Any:
        self.launched.append(name or "")
        if not self.endless:
            values = {key: value for key, value in config.to_dict().items() if key != "vocab_size"}
            return _Handle(made_run(runs_dir, name or f"run-{len(self.launched)}", **values))
        run = create_run(config, name, runs_dir)
        claim = Claim(run.path)
        writer = RunWriter(run.path, claim.new_attempt())
        writer.log({"step": 1, "tokens": 768, "loss": 5.0, "time_s": 0.1, "tokens_per_s": 7680.0, "mfu": None})
        writer.status("running")
        return _Handle(run, claim, writer)

    def resume(self, name: str, *, runs_dir: Path) -> Any:
        self.resumed.append(name)
        return _Handle(Run(runs_dir / name))


class _Handle:
    def __init__(self, run: Run, claim: Claim | None = None, writer: RunWriter | None = None) -> None:
        self.claim, self.writer = claim, writer
        self.run, self.name = run, run.name

    @property
    def status(self) -> str:
        return "finished" if self.claim is None else "running"

    def stop(self) -> None:
        if self.claim is not None and self.writer is not None:
            self.writer.result("stopped")
            self.writer.status("stopped")
            self.claim.release()
            self.claim = None


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> FakeLauncher:
    """Sweeps and the lab start runs with this instead of processes."""
    import gptlab.launcher

    fake = FakeLauncher()
    for name in ("warm", "launch", "resume"):
        monkeypatch.setattr(gptlab.launcher, name, getattr(fake, name))
    return fake


@pytest.fixture
def make(launcher: FakeLauncher) -> Iterator[Callable[..., Any]]:
    """Makes parts of the lab, and closes them."""
    made: list[Any] = []

    def one(part: str, /, *values: Any, **named: Any) -> Any:
        import gptlab.lab

        made.append(getattr(gptlab.lab, part)(*values, **named))
        return made[-1]

    yield one
    for part in made:
        part.close()


def until(true: Callable[[], Any], patience_s: float = 30) -> None:
    """Waits for something to become true."""
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)
