"""A checkpoint is complete or absent, and one that was damaged is never believed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gptlab import checkpoint
from gptlab.config import ConfigError, GPTConfig, TrainConfig
from gptlab.manifest import sha256
from gptlab.model import GPT
from gptlab.optimizer import make_optimizer
from gptlab.recording import StaleWriterError
from gptlab.runs import read_json, write_json

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


def save(folder: Path, step: int, keep: int = 3, **state: Any) -> Path:
    state = {"model": SHAPE.to_dict(), "time_s": 1.5, **state}
    return checkpoint.write(folder, step, checkpoint.tensors(*trained(step)), state, keep=keep)


def restore(path: Path, model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    files, state = checkpoint.read(path, shapes)
    checkpoint.load_tensors(files, model, optimizer)
    return state


def names(folder: Path) -> list[str]:
    return [path.name for path in sorted(folder.iterdir())]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path, kind: str) -> None:
    model, optimizer = trained(7, optimizer=kind)
    about = {"model": SHAPE.to_dict(), "time_s": 1.5}
    path = checkpoint.write(tmp_path / "checkpoints", 7, checkpoint.tensors(model, optimizer), about, keep=3)
    other = GPT(SHAPE, seed=99)
    other_optimizer = make_optimizer(other, TrainConfig(learning_rate=3e-4, weight_decay=0.5, optimizer=kind))  # type: ignore[arg-type]
    state = restore(path, other, other_optimizer)
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


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    for step, loss in ((10, 3.0), (20, 1.5), (30, None), (40, 1.5), (50, 2.0), (60, float("nan"))):
        save(folder, step, keep=2, val_loss=loss)
    assert names(folder) == ["step-00000020", "step-00000050", "step-00000060"]
    save(folder, 70, keep=1, val_loss=1.0)
    assert names(folder) == ["step-00000070"]


def test_bad_ones_ahead_do_not_push_out_what_was_just_written(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    good, bad = save(folder, 10, keep=1), save(folder, 30)
    flip(bad / "model.safetensors")
    assert checkpoint.newest_good(folder, lambda _: None) == good
    save(folder, 20, keep=1)
    assert names(folder) == ["step-00000020"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def swap(folder: Path) -> None:
    """Another checkpoint in this one's place: all is whole, and of another step."""
    other = save(folder.parent.parent / "other", 7)
    shutil.rmtree(folder)
    other.rename(folder)


def rename(folder: Path, name: str, *, copy: bool = True) -> None:
    """The manifest names another place, where the very same bytes lie."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = manifest["files"].pop("state.json")
    if copy and not name.startswith("/"):
        (folder / name).write_bytes((folder / "state.json").read_bytes())
    (folder / "manifest.json").write_text(json.dumps(manifest))


def link(path: Path) -> None:
    """The same bytes, through a link."""
    path.symlink_to(path.rename(path.parent.parent / f"of-{path.parent.name}-{path.name}"))


DAMAGE = {
    "a flipped byte": lambda c: flip(c / "model.safetensors"),
    "a truncation": lambda c: os.truncate(c / "optimizer.safetensors", 100),
    "no manifest": lambda c: (c / "manifest.json").unlink(),
    "a lost file": lambda c: (c / "state.json").unlink(),
    "another format": lambda c: (c / "manifest.json").write_text('{"format": 99, "files": {}}'),
    "a manifest that is no text": lambda c: (c / "manifest.json").write_bytes(b"\xff\xfe{}"),
    "a manifest of another kind": lambda c: (c / "manifest.json").write_text('{"format": 1, "files": [1]}'),
    "a name that leads out": lambda c: rename(c, "../state.json"),
    "a name that leads anywhere": lambda c: rename(c, "/etc/hostname"),
    "a linked file": lambda c: link(c / "model.safetensors"),
    "a linked manifest": lambda c: link(c / "manifest.json"),
    "a folder that is a link": lambda c: c.symlink_to(c.rename(c.parent.parent / f"elsewhere-{c.name}")),
    "the state of another step": lambda c: swap(c),
    "a file that may not be named": lambda c: rename(c, "x" * 300, copy=False),
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
        checkpoint.write(tmp_path / "c", 5, checkpoint.tensors(*trained()), {}, keep=2, may_write=refuse)
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


def test_no_flipped_byte_of_the_manifest_is_believed_or_crashes(tmp_path: Path) -> None:
    path = save(tmp_path / "c", 3)
    good, manifest = (path / "manifest.json").read_bytes(), read_json(path / "manifest.json")
    for place in range(len(good)):
        data = bytearray(good)
        data[place] ^= 1 << place % 8
        (path / "manifest.json").write_bytes(data)
        assert checkpoint.fault(path) or read_json(path / "manifest.json") == manifest, data


def test_another_shape_is_refused_and_named(tmp_path: Path) -> None:
    path = save(tmp_path / "c", 3)
    wider = GPT(GPTConfig(n_layer=2, n_head=1, n_embd=32, block_size=8, vocab_size=65), seed=1)
    before = [p.clone() for p in wider.parameters()]
    with pytest.raises(ConfigError, match=r"wte.weight is 128 x 16 there and 128 x 32 here.*more\)") as refusal:
        restore(path, wider, make_optimizer(wider, TrainConfig()))
    assert str(path) in str(refusal.value)
    assert all(torch.equal(a, b) for a, b in zip(before, wider.parameters(), strict=True))
    deeper = GPT(GPTConfig(n_layer=2, n_head=1, n_embd=16, block_size=8, vocab_size=65))
    with pytest.raises(ConfigError, match="is absent there and 16 here"):
        restore(path, deeper, make_optimizer(deeper, TrainConfig()))


def test_moments_of_another_shape_are_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    model, optimizer = trained()
    optimizer.state[model.get_parameter("wpe.weight")]["exp_avg"] = torch.zeros(3, 4)
    path = checkpoint.write(tmp_path / "c", 3, checkpoint.tensors(model, optimizer), {}, keep=1)
    other = GPT(SHAPE, seed=7)
    with pytest.raises(ConfigError, match=r"wpe.weight.exp_avg is 3 x 4 there and 8 x 16 here"):
        restore(path, other, make_optimizer(other, TrainConfig()))
    assert not torch.equal(other.wte.weight, model.wte.weight)


def test_a_description_that_is_not_the_weights_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "c", 3)
    state, manifest = read_json(path / "state.json"), read_json(path / "manifest.json")
    assert state is not None and manifest is not None
    write_json(path / "state.json", state | {"model": SHAPE.to_dict() | {"n_embd": 8}})
    manifest["files"]["state.json"] = {
        "bytes": (path / "state.json").stat().st_size, "sha256": sha256(path / "state.json")
    }  # fmt: skip
    write_json(path / "manifest.json", manifest)
    with pytest.raises(ConfigError, match=r"wte.weight is 128 x 16 there and 128 x 8 here"):
        checkpoint.load_model(path)


CALLS = ["mkdir", "open", "fsync", "rename", "replace"]


@pytest.mark.parametrize("call", CALLS)
def test_a_full_disk_at_any_call_leaves_the_older_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The n-th call of a kind fails, for every n until the save goes through."""
    folder = tmp_path / "c"
    older = save(folder, 10)
    real, fails, left = getattr(os, call), 0, 0

    def full(*arguments: Any, **keywords: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments, **keywords)

    for nth in range(1, 50):
        left = nth
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            try:
                save(folder, 20)
            except checkpoint.CheckpointError as error:
                assert "step 20" in str(error) and "No space left on device" in str(error)
                fails += 1
        if left > 0:  # there is no n-th call
            break
        done = folder / "step-00000020"  # only the very last flush, of the folder itself, comes after the rename
        assert checkpoint.fault(older) is None and (not done.exists() or checkpoint.fault(done) is None)
        assert not list(folder.glob(".step-*"))
    assert fails and checkpoint.newest_good(folder, lambda _: None) == folder / "step-00000020"


def test_a_disk_that_gives_back_something_else_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "c"
    older = save(folder, 10)
    real = checkpoint._fsync

    def lossy(path: Path) -> None:
        real(path)
        if path.name == "model.safetensors":
            flip(path)

    monkeypatch.setattr(checkpoint, "_fsync", lossy)
    with pytest.raises(checkpoint.CheckpointError, match=r"model.safetensors does not have its checksum"):
        save(folder, 20)
    assert names(folder) == [older.name]


def test_what_cannot_be_written_into_is_named(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file where the folder should be")
    with pytest.raises(checkpoint.CheckpointError, match=r"could not be written.*File exists"):
        save(tmp_path / "c", 10)
