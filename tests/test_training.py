"""The loop: what a run writes, that a resumed run equals an unbroken one, and what ends it."""

from __future__ import annotations

import functools
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import run_world

from gptlab import checkpoint, corpus, worker
from gptlab.assembly import Setting
from gptlab.checkpoint import CheckpointError
from gptlab.config import ConfigError, TrainConfig
from gptlab.evaluation import Score
from gptlab.parallel.world import World
from gptlab.recording import RunWriter, create_run
from gptlab.runs import Run
from gptlab.tokenizer import from_meta
from gptlab.training import Trainer, human_line


@pytest.fixture
def config(tinytext: Path) -> TrainConfig:
    return TrainConfig(
        n_layer=2, n_head=2, n_embd=32, block_size=32, global_batch_size=4, max_iters=12, warmup_iters=3, eval_iters=2,
        eval_interval=5, checkpoint_interval=4, log_interval=5, data=str(tinytext), tokenizer="char", dropout=0.1,
    )  # fmt: skip


def trainer(config: TrainConfig, run: Run, attempt: int, dtype: str = "float32", compile: str = "off") -> Trainer:
    text = corpus.ensure(config.data, config.tokenizer)
    threads = torch.get_num_threads()
    setting = Setting("cpu", dtype, "sdpa", micro_batch_size=2, threads=threads, compile=compile)
    (run.path / "attempts" / f"{attempt:02d}").mkdir(parents=True)
    return Trainer(
        config.replace(vocab_size=text.vocab_size), setting, text, World(0, 1, torch.device("cpu")), run.path,
        RunWriter(run.path, attempt), peak=None, pids=[0], say=lambda _: None,
    )  # fmt: skip


def start(config: TrainConfig, tmp_path: Path, name: str, dtype: str = "float32") -> tuple[Run, Trainer]:
    run = create_run(config, name, tmp_path / "runs")
    return run, trainer(config, run, 1, dtype)


def column(run: Run, key: str = "loss") -> dict[int, Any]:
    return {row["step"]: row[key] for row in run.metrics() if key in row}


def test_a_run_leaves_its_record(config: TrainConfig, tmp_path: Path) -> None:
    run, train = start(config, tmp_path, "a")
    assert train.run() == "finished"
    losses, result = column(run), run.result()
    assert list(losses) == list(range(1, 13)) and losses[12] < losses[1]
    assert set(column(run, "val_loss")) == {5, 10, 12}
    assert [path.name for path in run.checkpoints()] == ["step-00000010", "step-00000012"]  # 10 is a look, and the best
    assert result is not None and result["status"] == run.state == "finished"
    assert result["best"] == {"step": 10, "val_loss": column(run, "val_loss")[10]}
    assert set(column(run, "checkpoint_stall_s")) == {4, 5, 8, 10, 12}
    row = run.metrics()[3]
    wanted = {
        "tokens",
        "lr",
        "grad_norm",
        "step_s",
        "tokens_per_s",
        "mfu",
        "peak_bytes",
        "world_size",
        "time_s",
        "attempt",
    }
    assert wanted <= set(row) and row["tokens"] == 4 * 4 * 32 and row["mfu"] is None


def test_val_loss_is_that_of_the_whole_split(config: TrainConfig, tmp_path: Path) -> None:
    run, train = start(config, tmp_path, "a")
    train.run()
    tokens = torch.from_numpy(train.corpus.split("val").astype("int64"))
    nats = 0.0
    for at in range(0, len(tokens) - 1, 32):
        piece = tokens[at : at + 33]
        with torch.no_grad():
            nats += train.strategy.part.eval()(piece[None, :-1], piece[None, 1:], reduction="sum").item()
    result = run.result()
    assert result is not None and result["val_loss"] == pytest.approx(nats / (len(tokens) - 1), abs=1e-5)
    size = len(train.corpus.tokenizer.decode_bytes(train.corpus.split("val")[1:]))
    assert result["val_bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)


def test_looks_are_at_a_set_whose_hash_is_kept(config: TrainConfig, tmp_path: Path) -> None:
    found = []
    for name, changes in (("a", {}), ("seed", {"seed": 5}), ("longer", {"eval_iters": 3})):
        run, train = start(config.replace(max_iters=6, **changes), tmp_path, name)
        train.run()
        found.append(run.info["evaluation"])
    assert found[0]["windows"] == 8 and found[0] == found[1]  # whatever the seed
    assert found[2]["windows"] == 12 and found[2]["sha256"] != found[0]["sha256"]


@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [("float32", "adamw"), ("bfloat16", "adamw"), ("float16", "adamw"), ("float32", "muon"), ("bfloat16", "muon")],
)
def test_a_killed_and_resumed_run_equals_an_unbroken_one(
    config: TrainConfig, tmp_path: Path, dtype: str, optimizer: str
) -> None:
    config = config.replace(optimizer=optimizer)
    whole, train = start(config, tmp_path, "whole", dtype)
    broken, first = start(config, tmp_path, "broken", dtype)
    for one in (train, first):
        if scaler := one.train_step.scaler:
            scaler.scale, scaler.growth_interval = 2.0**22, 3  # overflows before the kill and after it
    train.run()
    steps = 0

    def die() -> None:
        nonlocal steps
        steps += 1
        if steps == 7:
            raise KeyboardInterrupt

    first._heartbeat = die  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        first.run()
    torch.rand(99)
    second = trainer(config, broken, 2, dtype)
    if second.train_step.scaler:
        second.train_step.scaler.growth_interval = 3
    second.resume()
    assert second.done == 4
    second.run()
    for key in ("loss", "lr", "loss_scale", "skipped"):
        assert column(broken, key) == column(whole, key)
    if dtype == "float16":
        skipped = column(whole, "skipped")
        assert min(skipped) <= 4 < max(skipped) < 12
    for a, b in zip(train.strategy.part.parameters(), second.strategy.part.parameters(), strict=True):
        assert torch.equal(a, b)
    assert {row["attempt"] for row in broken.metrics()} == {1, 2}


def apart(world: World, config: TrainConfig, text: Path, folders: list[Path]) -> tuple[str, Setting]:
    """What a rank goes on from that sees a run directory of its own, and the setting that it takes."""
    own = Setting("cpu", "float32", "sdpa", micro_batch_size=2 - world.rank, threads=1 + world.rank)
    setting = worker._agreed(config, own, world)
    one = Trainer(
        config, setting, corpus.open_corpus(text), world, folders[world.rank], None, peak=None, pids=[],
        say=lambda _: None,
    )  # fmt: skip
    try:
        one.resume()
    except CheckpointError as error:
        return str(error), setting
    return f"step {one.done}", setting


def test_all_ranks_go_on_from_the_first_one_s_choices(config: TrainConfig, tmp_path: Path) -> None:
    run, train = start(config.replace(max_iters=8, keep_checkpoints=9, eval_interval=99), tmp_path, "a")
    train.run()
    assert [path.name for path in run.checkpoints()] == ["step-00000004", "step-00000008"]
    late = Path(shutil.copytree(run.path, tmp_path / "late"))
    shutil.rmtree(late / "checkpoints" / "step-00000008")
    arguments = train.config, train.corpus.path
    (first, setting), (second, its) = run_world(2, apart, *arguments, [late, run.path])
    assert (first, second) == ("step 4", "step 4")  # though the other sees one more
    assert (setting.micro_batch_size, setting.threads, its.micro_batch_size, its.threads) == (2, 1, 2, 2)
    (first, _), (second, _) = run_world(2, apart, *arguments, [run.path, late])
    assert first == "step 8" and second.startswith("rank 0 goes on from step-00000008, and rank 1 cannot (manifest")
    assert second.endswith("it has step-00000004")


def test_a_falling_loss_scale_is_no_divergence(config: TrainConfig, tmp_path: Path) -> None:
    run, train = start(config.replace(max_bad_steps=2), tmp_path, "a", "float16")
    assert train.train_step.scaler is not None
    train.train_step.scaler.scale = 2.0**26
    said: list[str] = []
    train.say = said.append
    assert train.run() == "finished"
    result, scales = run.result(), column(run, "loss_scale")
    count = len(column(run, "skipped"))
    assert result is not None and result["skipped_steps"] == count > 2
    assert list(scales.values()) == [2.0 ** max(26 - step, 26 - count) for step in range(12)]
    assert sum("float16 overflowed" in line for line in said) == count


def test_gradients_that_no_scale_mends_are_divergence(config: TrainConfig, tmp_path: Path) -> None:
    run, train = start(config.replace(max_bad_steps=2), tmp_path, "a", "float16")
    assert train.train_step.scaler is not None
    train.train_step.scaler.scale = 2.0
    train.strategy.part.get_parameter("ln_f.weight").register_hook(lambda g: g * math.inf)
    assert train.run() == "diverged"
    assert run.state == "diverged" and list(column(run, "loss_scale").values()) == [2.0, 1.0, 1.0]


def test_evaluation_does_not_move_training(config: TrainConfig, tmp_path: Path) -> None:
    one, train = start(config, tmp_path, "one")
    train.run()
    other, often = start(config.replace(eval_interval=1), tmp_path, "other")
    often.run()
    assert column(one) == column(other)


def test_the_best_by_validation_loss_is_kept_and_survives_a_resume(config: TrainConfig, tmp_path: Path) -> None:
    config = config.replace(eval_interval=2, checkpoint_interval=3, keep_checkpoints=1)
    run, first = start(config, tmp_path, "a")
    looks = {2: 4.0, 4: 3.0, 6: 3.5, 8: 3.25, 10: 2.5, 12: math.nan}

    def fake(self: Trainer) -> Any:
        return lambda *_: Score(nats=looks[self.done], tokens=1)

    first.evaluate = fake(first)  # type: ignore[method-assign]
    first.config = config.replace(max_iters=9)
    first._finish = lambda status: status  # type: ignore[method-assign]  # as if it had been killed there
    first.run()
    assert first.saver is not None
    first.saver.wait()
    assert [path.name for path in run.checkpoints()] == ["step-00000004", "step-00000009"]
    second = trainer(config, run, 2)
    second.evaluate = fake(second)  # type: ignore[method-assign]
    second.resume()
    assert second.best == {"step": 4, "val_loss": 3.0}
    second.run()
    assert [path.name for path in run.checkpoints()] == ["step-00000010", "step-00000012"]
    state = json.loads((run.checkpoints()[0] / "state.json").read_text())
    assert state["val_loss"] == 2.5 and state["best"] == second.best


def test_a_full_disk_fails_the_run_with_the_older_checkpoint_whole(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, train = start(config, tmp_path, "a")
    write = checkpoint.write

    def full(folder: Path, step: int, *arguments: Any, **keywords: Any) -> Path:
        if step < 12:
            return write(folder, step, *arguments, **keywords)
        raise CheckpointError("the checkpoint of step 12 could not be written")

    monkeypatch.setattr(checkpoint, "write", full)
    with pytest.raises(CheckpointError, match="step 12"):  # the last one: nothing would come after it to tell
        train.run()
    assert run.result() is None and checkpoint.fault(run.checkpoints()[-1]) is None
    second = trainer(config, run, 2)
    second.resume()
    assert second.done == 10


def test_what_is_being_saved_as_a_run_breaks_off_is_still_saved(config: TrainConfig, tmp_path: Path) -> None:
    run, train = start(config, tmp_path, "a")
    said: list[str] = []
    train.say = said.append

    def slow() -> None:
        time.sleep(0.3)
        if train.done >= 5:
            raise CheckpointError("a second error")

    def dies_at(step: int) -> None:
        if train.done == step:
            raise ZeroDivisionError

    assert train.saver is not None
    train.saver.may_write = slow
    train._heartbeat = lambda: dies_at(4)  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        train.run()
    assert [path.name for path in run.checkpoints()] == ["step-00000004"]
    train._heartbeat = lambda: dies_at(6)  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        train.run()
    assert said[-1] == "a second error"


def test_the_tokenizer_travels_with_the_checkpoint(config: TrainConfig, tmp_path: Path) -> None:
    run, train = start(config, tmp_path, "a")
    train.run()
    elsewhere = shutil.copytree(run.checkpoints()[-1], tmp_path / "elsewhere")
    shutil.rmtree(run.path)
    shutil.rmtree(train.corpus.path)
    model, state = checkpoint.load_model(elsewhere)
    tokenizer = from_meta(state["tokenizer"])
    assert tokenizer.vocab_size == model.config.vocab_size and tokenizer.decode(tokenizer.encode("def x:")) == "def x:"


def test_a_checkpoint_of_another_tokenizer_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    """Of as many characters, so that every shape fits; only the text that ids mean is another."""
    other = tmp_path / "other.txt"
    other.write_text("".join(chr(0x4E00 + ord(char)) for char in Path(config.data).read_text()))
    run, train = start(config, tmp_path, "a")
    train.run()
    theirs, swapped = start(config.replace(data=str(other)), tmp_path, "b")
    shutil.copytree(run.path / "checkpoints", theirs.path / "checkpoints")
    with pytest.raises(ConfigError, match="another tokenizer"):
        swapped.resume()


def test_a_stop_leaves_a_checkpoint(config: TrainConfig, tmp_path: Path) -> None:
    run, train = start(config, tmp_path, "a")
    run.request_stop()
    assert train.run() == "stopped"
    assert run.state == "stopped" and len(column(run)) == 1
    assert [path.name for path in run.checkpoints()] == ["step-00000001"]


def test_steps_that_are_not_finite_end_the_run_with_its_last_good_checkpoint(
    config: TrainConfig, tmp_path: Path
) -> None:
    run, train = start(config, tmp_path, "a")
    heartbeat = train._heartbeat

    def poison() -> None:
        if train.done == 6:
            with torch.no_grad():
                train.strategy.part.get_parameter("wte.weight")[0, 0] = math.inf
        heartbeat()

    train._heartbeat = poison  # type: ignore[method-assign]
    assert train.run() == "diverged"
    assert run.state == "diverged" and run.checkpoints()[-1].name == "step-00000005"
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row.get("skipped")] == [7, 8, 9, 10, 11]
    assert rows[-1]["loss"] is None


def test_the_line_says_what_nanogpt_says() -> None:
    row = {"step": 10, "loss": 3.13214, "step_s": 0.29027, "mfu": 0.031, "lr": 6e-5, "time_s": 33.12}
    assert human_line(row) == "iter 10: loss 3.1321, time 290.27ms, mfu 3.10%, lr 6.00e-05, total time 33.12s"
    assert "mfu n/a" in human_line(row | {"mfu": None})


@pytest.mark.slow
def test_compiling_is_recorded_apart_from_training(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # no C++: seconds
    config = config.replace(max_iters=4, n_layer=1, dropout=0.0)
    run = create_run(config, "compiled", tmp_path / "runs")
    compiled = trainer(config, run, 1, compile="model")
    assert compiled.run() == "finished"
    rows = [row for row in (json.loads(line) for line in (run.path / "metrics.jsonl").open()) if "step_s" in row]
    assert rows[0]["compile_s"] > 0 and rows[0]["step_s"] > 0 and "compile_s" not in rows[-1]
    result = run.result()
    assert result is not None and result["setting"]["compile"] == "model"
    assert result["compile_s"] >= rows[0]["compile_s"] and result["recompiles"] == 0
