"""A run that classifies: learns, resumes, spreads over processes, begins with a language model, and is examined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from labels import write_jsonl

from gptlab import checkpoint, corpus, tuning
from gptlab.assembly import Setting
from gptlab.cli import main
from gptlab.config import ConfigError, TrainConfig
from gptlab.counts import flops_per_token
from gptlab.heads import SequenceClassifier
from gptlab.parallel.world import World
from gptlab.recording import RunWriter, create_run
from gptlab.runs import Run
from gptlab.training import Trainer


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return TrainConfig(
        task="classify", n_layer=2, n_head=2, n_embd=32, block_size=24, global_batch_size=8, micro_batch_size=3,
        max_iters=30, warmup_iters=2, learning_rate=3e-3, eval_iters=1, eval_interval=10, checkpoint_interval=10,
        keep_checkpoints=9, log_interval=10, data=str(write_jsonl(tmp_path / "a.jsonl")), dropout=0.1, device="cpu",
        dtype="float32", threads=1,
    )  # fmt: skip


def trainer(config: TrainConfig, run: Run, attempt: int = 1) -> Trainer:
    text = corpus.ensure(config.data, config.tokenizer, task=config.task)
    setting = Setting("cpu", "float32", "sdpa", micro_batch_size=config.micro_batch_size, threads=1)
    (run.path / "attempts" / f"{attempt:02d}").mkdir(parents=True)
    return Trainer(
        config.replace(vocab_size=text.vocab_size), setting, text, World(0, 1, torch.device("cpu")), run.path,
        RunWriter(run.path, attempt), peak=None, pids=[0], say=lambda _: None,
    )  # fmt: skip


def column(run: Run, key: str) -> dict[int, Any]:
    return {row["step"]: row[key] for row in run.metrics() if key in row}


def test_it_learns_to_tell_them_apart_and_says_how_well(config: TrainConfig, tmp_path: Path) -> None:
    run = create_run(config, "a", tmp_path / "runs")
    assert trainer(config, run).run() == "finished"
    losses, result = column(run, "loss"), run.result()
    assert losses[1] == pytest.approx(0.693, abs=0.02) and losses[30] < 0.3
    assert set(column(run, "val_accuracy")) == set(column(run, "val_loss")) == {10, 20, 30}
    assert result is not None and result["val_accuracy"] >= 7 / 8 and result["val_bits_per_byte"] is None
    assert result["val_loss"] == column(run, "val_loss")[30] < 0.5
    model, state = checkpoint.load_any(run.checkpoints()[-1])
    assert isinstance(model, SequenceClassifier) and state["classes"] == ["bad", "good"] and model.pad_id == 256
    with pytest.raises(ConfigError, match="is a classifier's, which writes no text"):
        checkpoint.load_model(run.checkpoints()[-1])


def test_a_resumed_run_equals_an_unbroken_one(config: TrainConfig, tmp_path: Path) -> None:
    config = config.replace(max_iters=12)
    whole, broken = (create_run(config, name, tmp_path / "runs") for name in "ab")
    trainer(config, whole).run()
    first = trainer(config, broken)
    first.config = config.replace(max_iters=10)
    first.run()
    second = trainer(config, broken, 2)
    second.resume()
    assert second.done == 10 and second.run() == "finished"
    assert column(whole, "loss") == column(broken, "loss")
    assert column(whole, "val_accuracy")[12] == column(broken, "val_accuracy")[12]


def test_it_begins_with_the_weights_of_a_language_model(config: TrainConfig, tmp_path: Path) -> None:
    language = config.replace(task="lm", max_iters=2)
    first = create_run(language, "lm", tmp_path / "runs")
    trainer(language, first).run()
    tuned = config.replace(init_from=str(first.path), max_iters=1)
    second = trainer(tuned, create_run(tuned, "tuned", tmp_path / "runs"))
    fresh = {name: value.clone() for name, value in second.strategy.part.state_dict().items()}
    second.resume()
    there, _ = checkpoint.load_model(first.checkpoints()[-1])
    found = second.strategy.part.state_dict()
    assert torch.equal(found["score.weight"], fresh["score.weight"])
    for name, value in there.state_dict().items():
        assert torch.equal(found[f"transformer.{name}"], value) and (
            "ln_" in name or "bias" in name or not torch.equal(value, fresh[f"transformer.{name}"])
        )


def test_two_processes_train_as_one_and_the_command_tells_of_it(
    config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = config.replace(max_iters=10, checkpoint_interval=5).to_dict()
    given = {n: v for n, v in values.items() if v != getattr(TrainConfig(), n) and n not in ("vocab_size", "nproc")}
    flags = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    runs = []
    for nproc in ("1", "2"):
        assert main(["train", "--name", nproc, "--nproc", nproc, *flags]) == 0
        assert "accuracy" in capsys.readouterr().out
        runs.append(Run.open(nproc))
    one, two = (column(run, "loss") for run in runs)
    assert len(one) == 10 and all(abs(one[step] - two[step]) < 1e-5 for step in one)
    assert column(runs[0], "val_accuracy") == column(runs[1], "val_accuracy")
    assert main(["eval", "2", "--json"]) == 0
    record, result = json.loads(capsys.readouterr().out), runs[1].result()
    assert result is not None and record["accuracy"] == result["val_accuracy"] and record["documents"] == 8
    assert record["loss"] == pytest.approx(result["val_loss"], rel=1e-5)
    assert main(["sample", "2"]) == 2 and "writes no text" in capsys.readouterr().err
    assert main(["eval", "2", "--file", config.data]) == 2 and "leave out --file" in capsys.readouterr().err


def test_what_it_lacks_is_not_paid_for(config: TrainConfig) -> None:
    language = config.replace(task="lm")
    head = 6 * language.padded_vocab_size * language.n_embd
    assert flops_per_token(language) - flops_per_token(config) == head
    with pytest.raises(ConfigError, match="which task classify has not"):
        config.replace(tie_head=False)


def test_tuning_refuses_what_it_does_not_measure(config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match="task classify is not tuned, task lm is"):
        tuning.tune(config)
    with pytest.raises(ConfigError, match="model huggingface is not tuned"):
        tuning.tune(config.replace(task="lm", model="huggingface", dropout=0.0))
