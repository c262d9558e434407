"""The grid of a sweep: every combination of some fields' values over a base config.

A combination that cannot be (7 heads over 96 features, a model that this machine cannot hold) is a cell as well, with
the reason in place of a config, so that a table of the grid has no holes.

    >>> from gptlab import preset
    >>> from gptlab.grid import cells
    >>> [cell.name for cell in cells(preset("tiny"), {"n_layer": [2, 4], "n_embd": [64, 96]})]
    ['2x2x64', '2x2x96', '4x2x64', '4x2x96']

Left out on purpose: running them (`sweeps.py`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gptlab.config import ConfigError, TrainConfig, did_you_mean

SHAPE = ("n_layer", "n_head", "n_embd")
"""The fields that every row and every run's name begins with."""


@dataclass(frozen=True)
class Cell:
    """One point of the grid: a config, or the reason why there is none."""

    name: str
    """Its run's name, behind the sweep's."""
    values: dict[str, Any]
    """The fields that the grid sets."""
    shape: dict[str, int]
    """Layers, heads and width, also where they cannot be."""
    config: TrainConfig | None
    reason: str | None = None


def cells(base: TrainConfig, grid: Mapping[str, Sequence[Any]]) -> list[Cell]:
    """Every combination of the grid's values over a base, in the grid's order, the last field fastest.

    Raises:
        ConfigError: a field that does not exist, or one without values. A combination that cannot be is no error.
    """
    known = [field.name for field in dataclasses.fields(TrainConfig)]
    axes: dict[str, list[Any]] = {}
    for field, wanted in grid.items():
        if field not in known:
            raise ConfigError(f"There is no setting {field!r}{did_you_mean(field, known)} to sweep over.")
        axes[field] = list(dict.fromkeys([wanted] if isinstance(wanted, str) else wanted))
        if not axes[field]:
            raise ConfigError(f"The sweep's {field} has no values: give at least one.")
    found = []
    for combination in itertools.product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        shape = {field: values.get(field, getattr(base, field)) for field in SHAPE}
        name = _cell_name(shape, values)
        try:
            found.append(Cell(name, values, shape, base.replace(**values)))
        except ConfigError as error:
            found.append(Cell(name, values, shape, None, str(error)))
    return found


def _cell_name(shape: dict[str, int], values: dict[str, Any]) -> str:
    """The shape, then what else the grid sets: 4x4x128, or 4x4x128-seed=2."""
    parts = ["x".join(map(str, shape.values()))]
    parts += [f"{field}={value}" for field, value in values.items() if field not in SHAPE]
    name = "-".join(parts)
    plain = re.sub(r"[^\w .+=,-]", "_", name)
    if plain != name or len(plain) > 60:  # shortened or rewritten, two could become one
        plain = f"{plain[:50].strip()}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return plain


def checked(found: list[Cell]) -> list[Cell]:
    """The cells, those marked that this text or this machine cannot run."""
    from gptlab import corpus, costs, initial

    # Asked once for each kind: a text is looked at once, not once a cell.
    check = cache(lambda *asked: _refusal(corpus.check, *asked))
    checked = []
    for cell in found:
        if config := cell.config:
            reason = (
                check(config.data, config.tokenizer, config.block_size, config.task) or costs.cost(config)["refusal"]
            )
            reason = reason or _refusal(initial.check, config, Path.cwd())
            cell = dataclasses.replace(cell, reason=reason, config=None if reason else config)
        checked.append(cell)
    return checked


def _refusal(check: Callable[..., None], *values: Any) -> str | None:
    """What a check says against some values, or None."""
    try:
        check(*values)
    except ConfigError as error:
        return str(error)
    return None
