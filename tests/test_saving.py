"""Saving while training goes on: what is written is the state at that step, the stall is bounded, errors are heard."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from gptlab import checkpoint, saving
from gptlab.checkpoint import CheckpointError
from gptlab.config import GPTConfig, TrainConfig
from gptlab.model import GPT
from gptlab.optimizer import make_optimizer
from gptlab.parallel.strategy import Files
from gptlab.saving import Saver, Snapshot

SHAPE = GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=8, vocab_size=65)


class Training:
    """A model that takes a step when it is told to."""

    def __init__(self) -> None:
        self.model = GPT(SHAPE, seed=1)
        self.optimizer = make_optimizer(self.model, TrainConfig(learning_rate=1e-2))
        self.step()

    def step(self) -> None:
        ids = torch.arange(16).view(2, 8)
        self.model(ids, ids + 1).backward()
        self.optimizer.step()

    def files(self) -> Files:
        return checkpoint.tensors(self.model, self.optimizer)


class Gate:
    """Holds the writing thread where a checkpoint is about to take its place."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.open.wait(20)


def test_the_state_of_that_step_is_written_while_training_goes_on(tmp_path: Path) -> None:
    one, gate = Training(), Gate()
    saver = Saver(tmp_path / "c", keep=2, may_write=gate)
    plain = checkpoint.write(tmp_path / "plain", 1, one.files(), {}, keep=1)
    saver.save(1, one.files(), {})
    for _ in range(3):
        one.step()
    assert gate.reached.wait(20) and not list((tmp_path / "c").glob("step-*"))
    gate.open.set()
    saver.wait()
    for name in ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"):
        assert (tmp_path / "c" / "step-00000001" / name).read_bytes() == (plain / name).read_bytes()


def test_one_at_a_time_and_the_wait_is_said(tmp_path: Path) -> None:
    one, gate = Training(), Gate()
    said: list[str] = []
    saver = Saver(tmp_path / "c", keep=5, may_write=gate, say=said.append)
    saver.save(1, one.files(), {})
    assert gate.reached.wait(20) and not said
    threading.Timer(0.2, gate.open.set).start()
    stall = saver.save(2, one.files(), {})
    assert stall > 0.15 and len(said) == 1
    assert said[0].startswith("step 2: waited 0.") and said[0].endswith("until the checkpoint of step 1 was written")
    saver.wait()
    assert [path.name for path in sorted((tmp_path / "c").iterdir())] == ["step-00000001", "step-00000002"]


def test_an_error_is_raised_by_the_next_save_and_by_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Training()
    saver = Saver(tmp_path / "c", keep=5)
    saver.save(1, one.files(), {})
    saver.wait()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for ask in (lambda: saver.save(3, one.files(), {}), saver.wait):
            saver.save(2, one.files(), {})  # tells nothing yet
            with pytest.raises(CheckpointError, match=r"step 2 could not be written.*No space left"):
                ask()
    saver.wait()  # said once
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["step-00000001"]
    assert checkpoint.fault(tmp_path / "c" / "step-00000001") is None
    saver.save(4, one.files(), {})
    saver.wait()
    assert (tmp_path / "c" / "step-00000004").exists()


def test_without_memory_for_a_copy_training_waits_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Training()
    said: list[str] = []
    saver = Saver(tmp_path / "c", keep=1, say=said.append)
    monkeypatch.setattr(saving, "free_bytes", lambda: 1000)
    monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("no thread is wanted"))
    saver.save(1, one.files(), {})
    assert checkpoint.fault(tmp_path / "c" / "step-00000001") is None
    assert len(said) == 1 and "training waits while its checkpoint is written" in said[0]


def test_buffers_are_used_again_and_hold_every_kind_of_tensor() -> None:
    values = {
        "half": torch.randn(4, 3).to(torch.bfloat16), "transposed": torch.randn(5, 2).t(), "count": torch.tensor(7.0),
        "none": torch.empty(0, 3), "parameter": torch.nn.Parameter(torch.randn(3)),
    }  # fmt: skip
    snapshot = Snapshot()
    assert snapshot.missing_bytes({"f": values}) == sum(value.nbytes for value in values.values())
    first = snapshot.take({"f": values})["f"]
    for name, value in values.items():
        assert torch.equal(first[name], value) and first[name].dtype == value.dtype and not first[name].requires_grad
    assert snapshot.missing_bytes({"f": values}) == 0
    later: dict[str, Any] = values | {"count": torch.tensor(8.0), "parameter": torch.randn(4)}
    second = snapshot.take({"f": later})["f"]
    assert first["half"] is second["half"] and second["count"] == 8 and second["parameter"].shape == (4,)
