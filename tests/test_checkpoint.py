"""A checkpoint is complete or absent, and one that was damaged is never believed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gptlab import checkpoint
from gptlab.config import ConfigError, GPTConfig, TrainConfig
from gptlab.model import GPT
from gptlab.optimizer import make_optimizer
from gptlab.recording import StaleWriterError

SHAPE = GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=8, vocab_size=65)
IDS = torch.arange(16).view(2, 8)
ADAMW = {"step", "exp_avg", "exp_avg_sq"}


def trained(seed: int = 0, **changes: Any) -> tuple[GPT, torch.optim.Optimizer]:
    model = GPT(SHAPE, seed=seed)
    optimizer = make_optimizer(model, TrainConfig(learning_rate=1e-2, **changes))
    model(IDS, IDS + 1).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save(folder: Path, step: int, keep: int = 3) -> Path:
    return checkpoint.save(folder, step, *trained(step), {"model": SHAPE.to_dict(), "time_s": 1.5}, keep=keep)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path, kind: str) -> None:
    model, optimizer = trained(7, optimizer=kind)
    about = {"model": SHAPE.to_dict(), "time_s": 1.5}
    path = checkpoint.save(tmp_path / "checkpoints", 7, model, optimizer, about, keep=3)
    other = GPT(SHAPE, seed=99)
    other_optimizer = make_optimizer(other, TrainConfig(learning_rate=3e-4, weight_decay=0.5, optimizer=kind))  # type: ignore[arg-type]
    state = checkpoint.restore(path, other, other_optimizer, torch.device("cpu"))
    assert state["step"] == 7 and state["time_s"] == 1.5
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        has = {"momentum_buffer"} if kind == "muon" and name.startswith("h.") and a.dim() == 2 else ADAMW
        assert set(optimizer.state[a]) == set(other_optimizer.state[b]) == has
        assert all(torch.equal(optimizer.state[a][key], other_optimizer.state[b][key]) for key in has)
    assert other_optimizer.param_groups[0]["weight_decay"] == 0.5  # asked for now, not what was saved
    for one, its in ((model, optimizer), (other, other_optimizer)):  # and it goes on from there
        for group in its.param_groups:
            group.update(lr=1e-2, weight_decay=0.1)
        one(IDS, IDS + 1).backward()
        its.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path / "c", step, keep=2)
    assert [p.name for p in sorted((tmp_path / "c").iterdir())] == ["step-00000030", "step-00000040"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a flipped byte": lambda c: flip(c / "model.safetensors"),
    "a truncation": lambda c: os.truncate(c / "optimizer.safetensors", 100),
    "no manifest": lambda c: (c / "manifest.json").unlink(),
    "a lost file": lambda c: (c / "state.json").unlink(),
    "another format": lambda c: (c / "manifest.json").write_text('{"format": 99, "files": {}}'),
    "an empty manifest": lambda c: (c / "manifest.json").write_text('{"format": 1, "files": {}}'),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_one_is_passed_over_with_the_reason(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "c"
    older, newest = save(folder, 10), save(folder, 20)
    said: list[str] = []
    assert checkpoint.newest_good(folder, said.append) == newest and not said
    DAMAGE[kind](newest)
    assert checkpoint.newest_good(folder, said.append) == older
    assert len(said) == 1 and newest.name in said[0]
    with pytest.raises(ConfigError, match="cannot be read"):
        checkpoint.load_model(newest)
    DAMAGE[kind](older)
    with pytest.raises(checkpoint.CheckpointError, match="can be trusted"):
        checkpoint.newest_good(folder, said.append)


def test_a_writer_that_was_replaced_leaves_nothing(tmp_path: Path) -> None:
    def refuse() -> None:
        raise StaleWriterError("attempt 2 has taken over")

    with pytest.raises(StaleWriterError):
        checkpoint.save(tmp_path / "c", 5, *trained(), {}, keep=2, may_write=refuse)
    assert list((tmp_path / "c").iterdir()) == []


def test_half_a_checkpoint_of_a_killed_writer_is_swept_away(tmp_path: Path) -> None:
    half = tmp_path / "c" / ".step-00000010.123"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_text("half")
    assert checkpoint.newest_good(tmp_path / "c", print) is None
    save(tmp_path / "c", 20)
    assert not half.exists()


def test_a_model_comes_out_as_it_went_in(tmp_path: Path) -> None:
    model, state = checkpoint.load_model(save(tmp_path / "c", 3))
    assert state["step"] == 3 and not model.training
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trained(3)[0].parameters(), strict=True))
