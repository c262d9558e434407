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
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gptlab.config import ConfigError, TrainConfig, did_you_mean

SHAPE = ("n_layer", "n_head", "n_embd")
"""The fields that every row and every run's name begins with."""


MOST_CELLS = 2000
"""Cells that a grid can have."""


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
    axes: dict[str, list[Any]] = {}
    for field, wanted in grid.items():
        _check_field(field)
        axes[field] = list(dict.fromkeys([wanted] if isinstance(wanted, str) else wanted))
        if not axes[field]:
            raise ConfigError(f"The sweep's {field} has no values: give at least one.")
    check_count(math.prod(map(len, axes.values())))
    rows = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    shapes = [{field: row.get(field, getattr(base, field)) for field in SHAPE} for row in rows]
    return listed(base, rows, [_cell_name(shape, row) for shape, row in zip(shapes, rows, strict=True)])


def check_count(count: int) -> None:
    """Refuses a grid that no table could show and no queue would end, before its cells are made."""
    if count > MOST_CELLS:
        raise ConfigError(
            f"The grid has {count:,} cells: choose fewer values, so that they are at most {MOST_CELLS:,}."
        )


def listed(base: TrainConfig, rows: Sequence[Mapping[str, Any]], names: Sequence[str] | None = None) -> list[Cell]:
    """A cell for each row of values over a base: what no grid can say, such as fields that follow from one another.

    Args:
        names: of the cells' runs; made up from the values without.

    Raises:
        ConfigError: a field that does not exist. A row that cannot be is no error.
    """
    check_count(len(rows))
    if names is None:
        names = _row_names(base, rows)
    found = []
    for name, row in zip(names, rows, strict=True):
        values = dict(row)
        for field in values:
            _check_field(field)
        shape = {field: values.get(field, getattr(base, field)) for field in SHAPE}
        try:
            found.append(Cell(name, values, shape, base.replace(**values)))
        except ConfigError as error:
            found.append(Cell(name, values, shape, None, str(error)))
    return found


def _row_names(base: TrainConfig, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Short names where shape, steps and seed tell rows apart; else names that say every value."""
    names: list[str] = []
    for short in (True, False):
        names = []
        for row in rows:
            shape = {field: row.get(field, getattr(base, field)) for field in SHAPE}
            names.append(
                _cell_name(shape, {name: row[name] for name in ("max_iters", "seed") if name in row} if short else row)
            )
        if len(set(names)) == len(names):
            break
    return names


def _check_field(field: str) -> None:
    known = [one.name for one in dataclasses.fields(TrainConfig)]
    if field not in known:
        raise ConfigError(f"There is no setting {field!r}{did_you_mean(field, known)} to sweep over.")


def _cell_name(shape: Mapping[str, int], values: Mapping[str, Any]) -> str:
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
    from gptlab import corpus, costs, initial, tasks

    # Asked once for each kind: a text is looked at once, not once a cell.
    check = cache(lambda *asked: _refusal(corpus.check, *asked))
    checked = []
    for cell in found:
        if config := cell.config:
            reason = (
                check(config.data, config.tokenizer, config.block_size, config.task) or costs.cost(config)["refusal"]
            )
            reason = reason or _refusal(tasks.check_installed, config) or _refusal(initial.check, config, Path.cwd())
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
