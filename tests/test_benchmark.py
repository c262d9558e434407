"""A race takes turns, and says what it found; what cannot be raced is one sentence."""

from __future__ import annotations

import json
import math
import random

import pytest

from gptlab.benchmark import bench, peak_alone, sides
from gptlab.benchmark.pairing import interval, take_turns
from gptlab.cli import main
from gptlab.config import ConfigError
from gptlab.presets import preset

SMALL = ["--block-size", "16", "--batch-size", "2", "--pairs", "2", "--threads", "1", "--device", "cpu"]


def test_sides_take_turns_and_the_first_are_not_timed() -> None:
    told: list[str] = []
    a, b = take_turns(lambda: told.append("a"), lambda: told.append("b"), 3, warm_up=1)
    assert told == ["a", "b"] * 4
    assert len(a) == len(b) == 3 and min(*a, *b) > 0


def test_the_interval_holds_the_ratio() -> None:
    draw = random.Random(1)
    alike = [[draw.gauss(1.0, 0.05) for _ in range(40)] for _ in range(2)]
    low, high = interval(alike[0], alike[1])
    assert low < 1 < high and high - low < 0.1
    low, high = interval([2 * t for t in alike[0]], alike[1])
    assert 1.8 < low < 2 < high < 2.2


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["train", "tiny"], ("gptlab", "plain")),
        (["train", "tiny", "--against", "transformers"], ("gptlab", "transformers")),
        (["generate", "tiny", "--new-tokens", "4", "--prompt-tokens", "4"], ("gptlab", "nocache")),
        (
            ["generate", "tiny", "--new-tokens", "4", "--prompt-tokens", "4", "--against", "transformers"],
            ("gptlab", "transformers"),
        ),
    ],
)
def test_a_race_is_recorded(words: list[str], names: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    if "transformers" in words:
        pytest.importorskip("transformers")
    assert main(["bench", *words, *SMALL, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    low, high = record["interval"]
    assert math.isfinite(record["speedup"]) and 0 < low <= high
    assert record["pairs"] == 2 and record["threads"] == 1
    for key in ("tokens_per_s", "median_s", "settings", "mfu" if words[0] == "train" else "prefill_ms"):
        assert tuple(record[key]) == names
    assert all(len(times) == 2 for times in record["seconds"].values())
    tokens = 2 * (16 if words[0] == "train" else 4)
    assert record["tokens_per_s"]["gptlab"] == pytest.approx(tokens / record["median_s"]["gptlab"])
    assert record["load_before"] >= 0 and record["load_after"] >= 0


def test_both_sides_of_training_take_the_same_steps() -> None:
    import torch

    config = preset("tiny", block_size=16, global_batch_size=5, micro_batch_size=2, dtype="float32", device="cpu")
    config = config.replace(warmup_iters=0, min_lr=config.learning_rate, threads=1)
    job = sides.Job("train", config)
    weights = []
    for name in ("gptlab", "plain"):
        turn = sides.make(name, job).turn
        for _ in range(3):
            turn()
        owner = dict(zip(turn.__code__.co_freevars, turn.__closure__ or (), strict=True)) if name == "gptlab" else {}
        model = owner["step"].cell_contents.model if owner else turn.__self__.called  # type: ignore[attr-defined]
        weights.append([p.detach() for p in model.parameters()])
    for mine, other in zip(*weights, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-4, rtol=1e-3)


def test_memory_is_a_sides_own() -> None:
    job = sides.Job("train", preset("tiny", block_size=64, global_batch_size=8, device="cpu", threads=1)).to_dict()
    assert 1_000_000 < peak_alone("plain", job) < 300_000_000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("train", "tinny"), "There is no run"),
        (("race", "tiny"), "train or generate"),
        (("train", "tiny", "nocache"), "choose plain or transformers"),
        (("generate", "tiny", "plain"), "choose nocache or transformers"),
    ],
)
def test_what_cannot_be_raced_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        bench(*arguments[:2], against=arguments[2] if len(arguments) > 2 else "")


def test_transformers_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"gptlab\[test\]"):
        bench("train", "tiny", against="transformers", block_size=16, global_batch_size=2, device="cpu")
