"""The grid: all combinations in order, with reasons where one cannot be, and names that tell them apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptlab.config import ConfigError, TrainConfig
from gptlab.grid import cells, checked
from gptlab.presets import preset


@pytest.fixture
def base(tinytext: Path) -> TrainConfig:
    return preset("tiny", data=str(tinytext), max_iters=10)


def test_cells_are_all_combinations_in_order_and_invalid_ones_keep_their_reason(base: TrainConfig) -> None:
    found = cells(base, {"n_layer": [1, 2], "n_head": [2, 7], "n_embd": [96]})
    assert [cell.values for cell in found] == [
        {"n_layer": layer, "n_head": head, "n_embd": 96} for layer in (1, 2) for head in (2, 7)
    ]
    assert [cell.config is None for cell in found] == [False, True, False, True]
    assert found[1].reason is not None and "n_head 7" in found[1].reason
    assert found[0].config is not None and found[0].config.max_iters == 10


def test_any_field_can_be_an_axis_and_names_tell_cells_apart(base: TrainConfig) -> None:
    found = cells(base, {"n_embd": [64, 128], "learning_rate": [1e-3, 1e-4], "tokenizer": ["byte", "char"]})
    assert found[0].name == "2x2x64-learning_rate=0.001-tokenizer=byte"
    assert len({cell.name for cell in found}) == 8
    long = cells(base, {"data": ["/some/where/" + "deep/" * 30 + f"{i}.txt" for i in range(2)]})
    assert len({cell.name for cell in long}) == 2 and all(len(cell.name) <= 60 for cell in long)


@pytest.mark.parametrize("grid", [{"n_layers": [1]}, {"n_layer": []}])
def test_a_grid_that_cannot_be_is_refused(base: TrainConfig, grid: dict[str, list[int]]) -> None:
    with pytest.raises(ConfigError, match="n_layer"):
        cells(base, grid)


def test_a_package_that_is_not_installed_is_a_reason(base: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: TrainConfig) -> None:
        if config.model == "huggingface":
            raise ConfigError("model huggingface needs transformers: install it.")

    monkeypatch.setattr("gptlab.tasks.check_installed", refuse)
    ours, theirs = checked(cells(base, {"model": ["gptlab", "huggingface"]}))
    assert ours.reason is None and theirs.config is None
    assert theirs.reason is not None and "needs transformers" in theirs.reason
