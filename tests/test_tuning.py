"""Tuning takes the fastest that was measured, says what failed, stays within its budget, and writes the choice down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gptlab import hardware, tuning
from gptlab.cli import main
from gptlab.config import ConfigError, TrainConfig
from gptlab.presets import preset
from gptlab.tuning import Row, default_budget, measure, tune

CONFIG = preset("tiny", global_batch_size=16, device="cpu", kernels="torch")


def pretend(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """Measures nothing: compile=model and micro-batches of 4 are the fastest; compile=step fails."""
    asked: list[TrainConfig] = []

    def measured(config: TrainConfig, limit_s: float) -> Row:
        asked.append(config)
        values = {name: getattr(config, name) for name in tuning.TUNED}
        values |= {"attention": "sdpa" if config.attention == "auto" else config.attention}
        values["micro_batch_size"] = config.micro_batch_size or 8
        if config.compile == "step":
            return Row(values, None, note="no compiler")
        speed = 100.0 * (config.compile == "model") + 10.0 * (values["micro_batch_size"] == 4)
        return Row(values, 1000.0 + speed + (config.dtype == "float32"))

    monkeypatch.setattr(tuning, "measure", measured)
    return asked


def test_each_choice_is_made_with_the_best_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend(monkeypatch)
    told: list[str] = []
    found, rows = tune(CONFIG, budget_s=60, say=told.append)
    assert (found.dtype, found.kernels, found.compile, found.micro_batch_size) == ("float32", "torch", "model", 4)
    assert found.replace(**{name: getattr(CONFIG, name) for name in tuning.TUNED}) == CONFIG
    assert len(told) == len(rows) and any("no compiler" in text for text in told)
    assert all(config.compile == "model" for config in asked[-3:])


def test_what_the_config_fixes_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend(monkeypatch)
    tune(CONFIG.replace(dtype="float32", compile="model"), budget_s=60)
    assert {(config.dtype, config.compile) for config in asked} == {("float32", "model")}


@pytest.mark.parametrize(("capability", "tried"), [(7.5, ["float16", "float32"]), (9.0, ["bfloat16", "tfloat32"])])
def test_a_gpu_is_tried_in_precisions_that_it_has(
    capability: float, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = hardware.Device("cuda", "NVIDIA GPU", 10**10, capability)
    monkeypatch.setattr(hardware, "devices", lambda: (gpu,))
    assert [config.dtype for config in tuning._precisions(CONFIG.replace(device="cuda"), "cuda")] == tried


def test_a_spent_budget_ends_it_with_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend(monkeypatch)
    found, _ = tune(CONFIG, budget_s=0)
    assert len(asked) == 1 and found.dtype == asked[0].dtype


def test_a_candidate_is_measured_in_a_process_and_ended_when_it_takes_too_long() -> None:
    config = preset("tiny", block_size=16, global_batch_size=2, device="cpu", dtype="float32", threads=1)
    row = measure(config, 60)
    assert row.tokens_per_s is not None and row.tokens_per_s > 100 and row.values["micro_batch_size"] == 2
    assert row.peak_bytes is not None and row.peak_bytes > 1e7
    late = measure(config, 0.2)
    assert late.tokens_per_s is None and "more than 0 s" in late.note


def test_the_choice_is_written_into_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG.to_dict()))
    assert main(["tune", str(path)]) == 0
    assert TrainConfig.from_dict(json.loads(path.read_text())).compile == "model"
    path.write_text("{")
    assert main(["tune", str(path)]) == 2


def test_nothing_that_works_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "measure", lambda config, limit_s: Row({"dtype": config.dtype}, None, note="no luck"))
    with pytest.raises(ConfigError, match="no luck"):
        tune(CONFIG, budget_s=60)


def test_the_budget_grows_with_the_model() -> None:
    assert default_budget(preset("10m")) == 60 and default_budget(preset("gpt2")) == pytest.approx(600, abs=5)
    assert default_budget(preset("gpt2-xl")) == 600
