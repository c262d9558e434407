"""Configs: what is refused and in which words, presets, and docs that stand under the fields."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from gptlab import costs
from gptlab.config import LIMITS, ConfigError, GPTConfig, TrainConfig, field_docs, field_types
from gptlab.presets import PRESETS, preset


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"n_embd": 96, "n_head": 7}, "n_embd 96 cannot be split over n_head 7.*6, 8"),
        ({"max_iters": -4}, "max_iters -4 is out of range.*1"),
        ({"max_iters": 0}, "max_iters 0"),
        ({"n_layer": 2.5}, "n_layer 2.5 is not a whole number"),
        ({"n_layer": True}, "n_layer True"),
        ({"n_layer": "6"}, "n_layer '6'"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": math.nan}, "finite"),
        ({"learning_rate": math.inf}, "finite"),
        ({"dtype": "bf16"}, "did you mean 'bfloat16'"),
        ({"nproc": 5, "global_batch_size": 4}, "nproc 5 is more than.*4"),
        ({"micro_batch_size": 13}, "micro_batch_size 13 is larger"),
        ({"min_lr": 0.1}, "min_lr 0.1 is above"),
        ({"n_layers": 3}, "did you mean 'n_layer'"),
    ],
)
def test_bad_values_are_refused_in_one_sentence(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        TrainConfig.from_dict(values)
    assert str(caught.value).count("\n") == 0 and str(caught.value).endswith(".")


def test_every_field_has_its_docstring_and_every_number_its_limits() -> None:
    for cls in (GPTConfig, TrainConfig):
        names = [field.name for field in dataclasses.fields(cls)]
        assert set(field_docs(cls)) == set(names)
    numbers = [
        name for name, kind in field_types(TrainConfig).items() if kind in (int, float, int | None, float | None)
    ]
    assert set(numbers) == set(LIMITS)


def test_presets_are_named_by_their_size_and_grow() -> None:
    sizes = [costs.parameters(preset(name)).non_embedding for name in PRESETS]
    assert sizes == sorted(sizes)
    for name in ("1m", "3m", "6m", "10m", "25m", "50m"):
        assert costs.parameters(preset(name)).non_embedding / 1e6 == pytest.approx(int(name[:-1]), rel=0.07)
    assert (preset("10m").n_layer, preset("10m").n_head, preset("10m").n_embd) == (6, 6, 384)
    with pytest.raises(ConfigError, match="did you mean '10m'"):
        preset("10M")


def test_numpys_numbers_are_numbers() -> None:
    config = TrainConfig(n_layer=np.int64(2), learning_rate=np.float32(0.5), dropout=np.int8(0), seed=np.uint32(7))  # type: ignore[arg-type]
    assert config == TrainConfig(n_layer=2, learning_rate=0.5, dropout=0.0, seed=7)
    assert {type(config.n_layer), type(config.learning_rate)} == {int, float} and json.dumps(config.to_dict())
    for wrong in (np.float64(2), np.bool_(True)):
        with pytest.raises(ConfigError, match="whole number"):
            TrainConfig(n_layer=wrong)  # type: ignore[arg-type]


def test_a_config_survives_json() -> None:
    config = preset("3m", min_lr=0, tokenizer="gpt2")
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert type(config.min_lr) is float


def test_the_vocabulary_follows_the_tokenizer() -> None:
    assert preset("3m").vocab_size == 257
    assert preset("3m").replace(tokenizer="gpt2").vocab_size == 50257
    assert preset("3m", tokenizer="char").vocab_size == 0
    assert preset("3m", vocab_size=99).replace(n_layer=2).vocab_size == 99
    assert GPTConfig(vocab_size=50257).padded_vocab_size == 50304


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().n_layer = 3  # type: ignore[misc]
