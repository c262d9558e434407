"""Hugging Face's own modules train here: as ours does from the same weights, and back into ours afterwards."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from labels import write_jsonl

from gptlab import checkpoint, corpus, tasks
from gptlab.assembly import Setting
from gptlab.config import ConfigError, TrainConfig
from gptlab.heads import Labels, SequenceClassifier
from gptlab.huggingface import Published, make, ours
from gptlab.parallel.world import World
from gptlab.recording import RunWriter, create_run
from gptlab.runs import Run
from gptlab.training import Trainer

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is an optional dependency, and not installed", allow_module_level=True)

WORLD = World(0, 1, torch.device("cpu"))


def config(tmp_path: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "task": "classify", "model": "huggingface", "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 24,
        "global_batch_size": 8, "micro_batch_size": 3, "max_iters": 6, "warmup_iters": 2, "learning_rate": 3e-3,
        "eval_iters": 1, "eval_interval": 3, "checkpoint_interval": 3, "data": str(write_jsonl(tmp_path / "a.jsonl")),
        "device": "cpu", "dtype": "float32", "threads": 1,
    }  # fmt: skip
    return TrainConfig(**(values | changes))


def train(config: TrainConfig, run: Run, attempt: int = 1) -> Trainer:
    text = corpus.ensure(config.data, config.tokenizer, task=config.task)
    attention: Any = "sdpa" if config.attention == "auto" else config.attention
    setting = Setting("cpu", "float32", attention, micro_batch_size=config.micro_batch_size, threads=1)
    (run.path / "attempts" / f"{attempt:02d}").mkdir(parents=True)
    made = Trainer(
        config.replace(vocab_size=text.vocab_size), setting, text, WORLD, run.path, RunWriter(run.path, attempt),
        peak=None, pids=[0], say=lambda _: None,
    )  # fmt: skip
    made.resume()
    made.run()
    return made


def column(run: Run, key: str) -> dict[int, Any]:
    return {row["step"]: row[key] for row in run.metrics() if key in row}


@pytest.mark.parametrize("task", ["classify", "lm"])
@pytest.mark.parametrize("attention", ["sdpa", "math"])
def test_it_trains_as_ours_does_from_the_same_weights(task: str, attention: str, tmp_path: Path) -> None:
    runs = []
    for model in ("huggingface", "gptlab"):
        asked = config(tmp_path, task=task, model=model, attention=attention)
        runs.append(create_run(asked, model, tmp_path / "runs"))
        part = train(asked, runs[-1]).strategy.part
        theirs = "transformers" in type(part.get_submodule("transformer")).__module__ if model != "gptlab" else True
        assert theirs and isinstance(part, Published) == (model == "huggingface")
    for key in ("loss", "val_loss", "grad_norm"):
        first, second = (column(run, key) for run in runs)
        assert first and all(abs(first[step] - second[step]) < 2e-5 for step in second), key
    # A checkpoint of theirs is one of ours to whoever reads it.
    models = [checkpoint.load_any(run.checkpoints()[-1])[0] for run in runs]
    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))
    assert (models[0](ids) - models[1](ids)).abs().max() < 1e-4


def test_a_resumed_run_equals_an_unbroken_one(tmp_path: Path) -> None:
    asked = config(tmp_path, task="lm", dropout=0.1)
    whole, broken = (create_run(asked, name, tmp_path / "runs") for name in "ab")
    train(asked, whole)
    first = train(asked.replace(max_iters=3, lr_decay_iters=6), broken)
    assert first.done == 3
    second = train(asked, broken, 2)
    assert second.done == 6 and column(whole, "loss") == column(broken, "loss")


def test_it_begins_with_weights_of_ours(tmp_path: Path) -> None:
    asked = config(tmp_path, task="lm", model="gptlab", max_iters=2)
    language = create_run(asked, "lm", tmp_path / "runs")
    train(asked, language)
    norms = []
    for model in ("huggingface", "gptlab"):
        one = config(tmp_path, model=model, max_iters=1, init_from=str(language.path))
        run = create_run(one, one.model, tmp_path / "runs")
        train(one, run)
        norms.append(column(run, "grad_norm")[1])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_weights_come_back_as_they_were(tmp_path: Path) -> None:
    asked = config(tmp_path)
    model = make(asked, Labels(3, 256), seed=4)
    wanted = SequenceClassifier(asked, 3, pad_id=256, seed=4).state_dict()
    found = ours(model.state_dict(), asked)
    assert set(found) == set(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)
    tied = make(asked, None, seed=4)
    assert "lm_head.weight" not in tied.state_dict()
    assert tied.get_parameter("lm_head.weight") is tied.get_parameter("transformer.wte.weight")


def test_without_transformers_one_sentence_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs transformers: install it \(pip install 'gptlab\[huggingface\]'\)\.$"):
        tasks.check_installed(config(tmp_path))
    tasks.check_installed(config(tmp_path, model="gptlab"))


@pytest.mark.parametrize(
    ("name", "value"), [("rope", True), ("n_kv_head", 1), ("attention", "flex"), ("compile", "model")]
)
def test_what_it_has_not_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name} {value} is not what model huggingface has: use"):
        config(tmp_path, **{name: value})
