"""The depth dial, iso-FLOP rows, the spread over seeds, and the rungs of successive halving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_sweeps import FakeLauncher, Pretended

from gptlab import costs, scaling
from gptlab.config import ConfigError, TrainConfig
from gptlab.dial import dial, isoflops, spread
from gptlab.halving import rungs, survivors
from gptlab.presets import preset
from gptlab.sweeps import Sweep, sweep


def test_one_number_sets_the_recipe_and_every_value_has_a_source() -> None:
    shallow, deep = dial(2), dial(12)
    config = deep.config
    assert (config.n_layer, config.n_embd, config.n_head) == (12, 768, 12)  # GPT-2 small's own shape
    assert config.learning_rate == pytest.approx(6e-4)
    tokens = config.max_iters * config.global_batch_size * config.block_size
    assert tokens == pytest.approx(20 * costs.parameters(config).total, rel=0.01)
    spent = tokens * costs.flops_per_token(config)
    assert config.global_batch_size * config.block_size == pytest.approx(0.2920 * spent**0.3271, rel=0.05)
    for field in ("n_embd", "n_head", "global_batch_size", "learning_rate", "max_iters", "warmup_iters"):
        assert deep.sources[field], field
        assert getattr(shallow.config, field) != getattr(config, field) or field == "n_head"
    assert shallow.config.learning_rate > config.learning_rate
    with pytest.raises(ConfigError, match="depth 0"):
        dial(0)


def test_the_dial_keeps_what_it_does_not_set() -> None:
    base = TrainConfig(block_size=64, data="shakespeare", seed=5)
    config = dial(1, base, aspect=16, tokens_per_parameter=5).config
    assert (config.block_size, config.data, config.seed, config.n_embd) == (64, "shakespeare", 5, 16)


@pytest.mark.parametrize("convention", scaling.CONVENTIONS)
def test_iso_flop_rows_spend_the_same_compute(convention: str) -> None:
    base = TrainConfig(block_size=32, global_batch_size=4)
    shapes = [{"n_layer": 1, "n_head": 2, "n_embd": width} for width in (16, 32, 64)]
    rows = isoflops(base, [2e10, 8e10], shapes, convention=convention)
    assert len(rows) == 6
    for place, row in enumerate(rows):
        config = base.replace(**row)
        spent = 6 * scaling.sizes(config)[convention] * config.max_iters * 4 * 32
        assert spent == pytest.approx((2e10, 8e10)[place // 3], rel=0.02)
    assert rows[0]["learning_rate"] > rows[2]["learning_rate"]
    with pytest.raises(ConfigError, match="steps of the shape"):
        isoflops(base, [1e6], shapes)
    with pytest.raises(ConfigError, match="convention"):
        isoflops(base, [2e10], shapes, convention="kaplan")


def test_a_list_of_rows_is_a_sweep_too_and_is_read_back(tinytext: Path, tmp_path: Path) -> None:
    base = preset("tiny", data=str(tinytext))
    rows = [{"n_layer": 1, "max_iters": 20}, {"n_layer": 2, "max_iters": 10, "warmup_iters": 3}]
    done = sweep(base, rows, name="s", runs_dir=tmp_path, launcher=FakeLauncher())
    assert done.wait(10)
    assert [row["max_iters"] for row in done.rows()] == [20, 10]
    again = Sweep.open("s", tmp_path)
    assert again.rows() == done.rows()
    assert [cell.config and cell.config.warmup_iters for cell in again.cells] == [base.warmup_iters, 3]


def test_rows_say_what_fits_need(tinytext: Path, tmp_path: Path) -> None:
    class Measured(FakeLauncher):
        def _start(self, how: str, run: Any) -> Pretended:
            handle = Pretended(run)
            handle.writer.log({"step": 1, "tokens": 768, "loss": 3.0, "tokens_per_s": 1.0, "time_s": 1.0})
            handle.end("finished", val_loss=3.0)
            return handle

    base = preset("tiny", data=str(tinytext), max_iters=1)
    done = sweep(base, {"n_layer": [1]}, name="s", runs_dir=tmp_path, launcher=Measured())
    assert done.wait(10)
    (row,) = done.rows()
    config = base.replace(n_layer=1)
    assert row["matmul_parameters"] == costs.matmul_parameters(config)
    assert row["tokens"] == 768 and row["flops"] == 768 * costs.flops_per_token(config)


def test_seeds_become_one_row_with_their_spread() -> None:
    rows = [
        {"n_layer": 1, "seed": seed, "name": f"s-{seed}", "state": "finished", "val_loss": loss, "loss": loss}
        for seed, loss in ((1, 2.0), (2, 2.2), (3, 2.4))
    ] + [{"n_layer": 2, "seed": 1, "name": "t", "state": "failed", "val_loss": None, "loss": None}]
    (row,) = spread(rows)
    assert row == {
        "n_layer": 1, "seeds": 3, "val_loss": pytest.approx(2.2), "sd": pytest.approx(0.2), "least": 2.0, "most": 2.4,
    }  # fmt: skip


def test_rungs_thin_the_field_until_one_is_left() -> None:
    nine = [TrainConfig(max_iters=270)] * 9
    assert rungs(nine, 3) == [30, 90]
    assert rungs(nine[:3], 3) == [90]
    assert rungs(nine[:1], 3) == []
    assert survivors([3.0, 1.0, float("inf"), 2.0, 5.0, 4.0], 3) == [1, 3]
    with pytest.raises(ConfigError, match="differ in max_iters"):
        rungs([TrainConfig(max_iters=10), TrainConfig(max_iters=20)], 2)
    with pytest.raises(ConfigError, match="halving 1"):
        rungs(nine, 1)


def test_hopeless_cells_stop_early_and_the_others_end_as_without(tinytext: Path, tmp_path: Path) -> None:
    small = preset("tiny", data=str(tinytext)).replace(
        max_iters=60, warmup_iters=5, n_layer=1, n_embd=16, block_size=16, global_batch_size=4, device="cpu",
        dtype="float32", threads=1,
    )  # fmt: skip
    done = sweep(small, {"learning_rate": [1e-6, 1e-2, 1e-5]}, name="h", runs_dir=tmp_path, halving=3)
    try:
        assert done.wait(120)
    finally:
        done.stop()
    rows = done.rows()
    assert [row["state"] for row in rows] == ["stopped", "finished", "stopped"], rows
    assert "halving: loss" in rows[0]["reason"] and "of 3" in rows[0]["reason"] and rows[1]["reason"] is None
    assert 20 <= rows[0]["step"] < 60
    again = sweep(small, {"learning_rate": [1e-6, 1e-2, 1e-5]}, name="h", runs_dir=tmp_path, halving=3)
    assert again.wait(60)
    assert [row["step"] for row in again.rows()] == [row["step"] for row in rows]

    whole = sweep(small, {"learning_rate": [1e-2]}, name="w", runs_dir=tmp_path)
    assert whole.wait(60)
    assert [row["loss"] for row in whole.runs[0].metrics() if "loss" in row] == [
        row["loss"] for row in done.runs[1].metrics() if "loss" in row
    ]
