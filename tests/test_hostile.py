"""Checkpoints that someone forged: the manifest holds, and what it vouches for is no model, another's, or code."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from gptlab import checkpoint
from gptlab.config import ConfigError, GPTConfig, TrainConfig
from gptlab.evaluation import evaluate
from gptlab.launcher import resume
from gptlab.manifest import sha256
from gptlab.model import GPT
from gptlab.recording import RunWriter, create_run
from gptlab.runs import Run
from gptlab.sampling import sample
from gptlab.tokenizer import CharTokenizer

CHARS = CharTokenizer("\nabcdefg")
SHAPE = GPTConfig(n_layer=1, n_head=1, n_embd=32, block_size=16, vocab_size=CHARS.vocab_size)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with one good checkpoint."""
    made = create_run(TrainConfig(**SHAPE.to_dict(), tokenizer="char"), "a", tmp_path / "runs")
    model = GPT(SHAPE)
    state = {"model": SHAPE.to_dict(), "tokenizer": CHARS.to_meta(), "time_s": 1.0, "skipped_steps": 0}
    files = checkpoint.tensors(model, torch.optim.AdamW(model.parameters()))
    checkpoint.write(made.path / "checkpoints", 4, files, state, keep=1)
    return made


def forge(run: Run, name: str, content: bytes) -> None:
    """Puts other bytes into a file, and has the manifest vouch for them."""
    (folder,) = run.checkpoints()
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": sha256(folder / name)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def forge_state(run: Run, **entries: Any) -> None:
    (folder,) = run.checkpoints()
    old = json.loads((folder / "state.json").read_text())
    forge(run, "state.json", json.dumps({k: v for k, v in (old | entries).items() if v != "gone"}).encode())


class Code:
    """What a pickle can do to who reads it."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (open, ("/nonexistent/was-run",))


def test_the_good_one_samples(run: Run) -> None:
    assert len("".join(sample(run, "ab", max_new_tokens=5, device="cpu"))) == 5


@pytest.mark.parametrize(
    "entries",
    [
        {"tokenizer": "gone"}, {"tokenizer": None}, {"tokenizer": [1]}, {"tokenizer": {"name": "byte"}},
        {"tokenizer": {"name": "char", "chars": "ab"}}, {"tokenizer": {"name": "char", "chars": 5}},
        {"model": "gone"}, {"model": [1]}, {"model": {"n_lyer": 1}}, {"model": {"n_layer": 10**400}}, {"model": "x"},
        {"model": SHAPE.to_dict() | {"n_embd": 64}}, {"model": SHAPE.to_dict() | {"vocab_size": 9999}},
        {"classes": 5}, {"origin": "huggingface"}, {"step": 5}, {"step": "gone"}, {"step": -1}, {"step": "4"},
    ],
    ids=lambda entries: str(entries)[:40],
)  # fmt: skip
def test_a_state_that_is_forged_is_a_sentence(run: Run, entries: dict[str, Any]) -> None:
    forge_state(run, **entries)
    with pytest.raises(ConfigError) as caught:
        "".join(sample(run, "ab", max_new_tokens=5, device="cpu"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [pickle.dumps(Code()), b"", b"\0" * 100, b"\xff" * 8 + b"{}"], ids=len)
def test_no_pickle_is_opened_and_no_rubbish_believed(run: Run, content: bytes) -> None:
    forge(run, "model.safetensors", content)
    with pytest.raises(ConfigError):
        sample(run, "ab", device="cpu")


def test_where_all_are_damaged_the_reason_is_said(run: Run) -> None:
    (folder,) = run.checkpoints()
    (folder / "model.safetensors").write_bytes(b"x")
    for use in (lambda: sample(run, "ab"), lambda: evaluate(run)):
        with pytest.raises(ConfigError, match="can be trusted"):
            use()


def test_a_prompt_that_is_no_text_is_a_sentence(run: Run) -> None:
    with pytest.raises(ConfigError, match="not among"):
        sample(run, "a\ud83d", device="cpu")


def test_a_stop_id_that_no_text_has_is_refused(run: Run) -> None:
    with pytest.raises(ConfigError, match="stop id 99"):
        sample(run, "ab", stop_ids=[99], device="cpu")


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl"])
def test_no_link_in_a_run_is_written_through(run: Run, tmp_path: Path, name: str) -> None:
    treasure = tmp_path / "treasure"
    treasure.write_text("mine")
    (run.path / name).symlink_to(treasure)
    if name == "lock":
        with pytest.raises(ConfigError, match="cannot be written"):
            resume(str(run.path))
    else:
        with pytest.raises(OSError):
            RunWriter(run.path, 1).log({"step": 1})
    assert treasure.read_text() == "mine"
