"""A run that begins with weights: from transformers' layout, from nanoGPT's, from another run; and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptlab import corpus, grid, initial
from gptlab.assembly import Setting
from gptlab.config import ConfigError, TrainConfig
from gptlab.flags import config_of
from gptlab.model import GPT
from gptlab.parallel.world import World
from gptlab.presets import preset
from gptlab.recording import RunWriter, create_run
from gptlab.runs import Run
from gptlab.training import Trainer

SHAPE: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32}


def config(**changes: Any) -> TrainConfig:
    return TrainConfig.from_dict(SHAPE | {"tokenizer": "byte"} | changes)


def weights(folder: Path, **changes: Any) -> GPT:
    model = GPT(config(**changes), seed=7)
    model.save_pretrained(folder)
    return model


def load(model: GPT, ours: TrainConfig, say: Callable[[str], None] = lambda _: None) -> None:
    found = initial.read(ours, say)
    assert found is not None
    model.load_state_dict(found)


def test_a_model_takes_the_weights_and_a_shorter_context(tmp_path: Path) -> None:
    source = weights(tmp_path)
    said: list[str] = []
    model = GPT(config(block_size=8, dropout=0.1, init_from=str(tmp_path)))
    load(model, config(block_size=8, dropout=0.1, init_from=str(tmp_path)), said.append)
    for name, p in model.named_parameters():
        wanted = source.get_parameter(name)
        assert torch.equal(p, wanted[:8] if name == "wpe.weight" else wanted), name
    assert said == [f"begins with the weights of {tmp_path}"]
    model(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long)).backward()


def test_nanogpts_padded_vocabulary_becomes_the_tokenizers(tmp_path: Path) -> None:
    other = GPT(config(vocab_size=320), seed=7)  # as nanoGPT pads 50257 to 50304
    arguments = {name: getattr(other.config, name) for name in (*SHAPE, "bias", "vocab_size", "dropout")}
    tensors = {f"_orig_mod.transformer.{name}": tensor for name, tensor in other.state_dict().items()}
    torch.save({"model": tensors, "model_args": arguments}, tmp_path / "ckpt.pt")
    ours = config(init_from=str(tmp_path / "ckpt.pt"))
    model = GPT(ours)
    load(model, ours)
    assert torch.equal(model.wte.weight[:257], other.wte.weight[:257]) and not model.wte.weight[257:].any()
    assert initial.shape_of(tmp_path / "ckpt.pt")["n_embd"] == 32


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_layer": 3}, "n_layer 3 is not that of the weights in .*, 2: use 2"),
        ({"n_head": 4}, "n_head 4 is not"),
        ({"bias": False}, "bias False"),
        ({"n_kv_head": 1}, "n_kv_head 1 is not that of the weights in .*, 2"),
        ({"block_size": 64}, "block_size 64 is more than the 32 positions"),
        ({"tokenizer": "gpt2"}, "vocabulary of 50257 is not that of the weights in .*, 257"),
    ],
)
def test_another_architecture_is_refused_before_anything_starts(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    weights(tmp_path / "weights")
    wrong = config(init_from="weights", **changes)
    with pytest.raises(ConfigError, match=said):
        initial.check(wrong, tmp_path)
    with pytest.raises(ConfigError, match="There are no weights at"):
        initial.check(config(init_from="nowhere"), tmp_path)
    initial.check(config(init_from="weights", sliding_window=4, logit_softcap=30.0, n_kv_head=2), tmp_path)
    initial.check(config(), tmp_path)


def test_a_sweep_marks_what_the_weights_do_not_fit(
    tmp_path: Path, tinytext: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    weights(tmp_path / "weights")
    base = config(init_from="weights", data=str(tinytext))
    found = grid.checked(grid.cells(base, {"n_layer": [2, 3], "dropout": [0.0, 0.1]}))
    assert [cell.reason is None for cell in found] == [True, True, False, False]


def test_the_command_takes_the_shape_from_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weights(tmp_path / "weights", mlp="swiglu", sliding_window=8)
    made = config_of({"init_from": "weights", "block_size": 16}, None)
    assert (made.n_layer, made.n_embd, made.mlp, made.block_size, made.sliding_window) == (2, 32, "swiglu", 16, 8)
    assert made.init_from == str(tmp_path / "weights")
    asked = config_of({"init_from": "weights"}, "tiny")  # a preset is the user's word, and is refused later
    assert asked.n_embd == preset("tiny").n_embd


def trainer(config: TrainConfig, run: Run, attempt: int) -> Trainer:
    text = corpus.ensure(config.data, config.tokenizer)
    setting = Setting(device="cpu", dtype="float32", attention="sdpa", micro_batch_size=2, threads=1)
    (run.path / "attempts" / f"{attempt:02d}").mkdir(parents=True)
    return Trainer(
        config, setting, text, World(0, 1, torch.device("cpu")), run.path, RunWriter(run.path, attempt), peak=None,
        pids=[0], say=lambda _: None,
    )  # fmt: skip


def test_a_run_begins_where_another_ended_and_resumes_without_it(tmp_path: Path, tinytext: Path) -> None:
    base = config(data=str(tinytext), global_batch_size=2, max_iters=3, eval_iters=1, rope=True, n_kv_head=1)
    first = create_run(base, "first", tmp_path / "runs")
    before = trainer(base, first, 1)
    before.run()
    ours = base.replace(init_from=str(first.path), vocab_size=257, learning_rate=1e-4)
    second = create_run(ours, "second", tmp_path / "runs")
    train = trainer(ours, second, 1)
    train.resume()
    assert train.done == 0
    assert all(
        torch.equal(a, b)
        for a, b in zip(train.strategy.part.parameters(), before.strategy.part.parameters(), strict=True)
    )
    train.run()
    first.path.rename(tmp_path / "gone")
    again = trainer(ours, second, 2)
    again.resume()
    assert again.done == 3
    assert all(
        torch.equal(a, b)
        for a, b in zip(train.strategy.part.parameters(), again.strategy.part.parameters(), strict=True)
    )


def test_a_run_without_a_checkpoint_gives_none(tmp_path: Path) -> None:
    run = create_run(config(), "empty", tmp_path / "runs")
    ours = config(init_from=str(run.path))
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        load(GPT(ours), ours)
