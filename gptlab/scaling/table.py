"""What fits read: columns of any CSV file or of a sweep's rows, and three ways to count N.

    >>> points = read_csv(Path("runs/grid.sweep.csv"), n="parameters", d="tokens", loss="val_loss")
    >>> scaling.fit(points.columns, points.loss)

Left out on purpose: the fits (`fits.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gptlab.config import ConfigError, GPTConfig, did_you_mean
from gptlab.csvfile import read_rows

CONVENTIONS = {
    "all": "all parameters (Hoffmann et al. 2022)",
    "non_embedding": "without embeddings and head (Kaplan et al. 2020)",
    "matmul": "weights that tokens are multiplied with, the head included: what 6 N FLOPs a token is true for",
}
"""Three counts of a model's size; fits differ by which is taken (Pearce and Song 2024)."""


def sizes(config: GPTConfig) -> dict[str, int]:
    """N of a config in each convention."""
    from gptlab import costs

    count = costs.parameters(config)
    return {"all": count.total, "non_embedding": count.non_embedding, "matmul": costs.matmul_parameters(config)}


@dataclass(frozen=True)
class Points:
    """Runs as a fit takes them."""

    columns: dict[str, np.ndarray]
    """By variable (N, D, C) its value for each run."""
    loss: np.ndarray
    rows: list[Mapping[str, Any]]
    """The rows that the values stand in."""
    left_out: int
    """Rows without a number in one of the columns."""


def from_rows(
    rows: Sequence[Mapping[str, Any]], *, n: str | None = None, d: str | None = None, c: str | None = None, loss: str
) -> Points:
    """Takes columns out of rows; with N and C, D is C / 6 N.

    Args:
        n, d, c: columns of parameters, tokens and FLOPs; any that a fit shall have.

    Raises:
        ConfigError: a column that is not there, or no row has a number in each.
    """
    wanted = {name: column for name, column in (("N", n), ("D", d), ("C", c)) if column}
    if not wanted:
        raise ConfigError("A fit needs a variable: name the column of parameters, tokens or FLOPs (--n, --d, --c).")
    known = list(rows[0]) if rows else []
    for column in (*wanted.values(), loss):
        if column not in known:
            raise ConfigError(
                f"There is no column {column!r}{did_you_mean(column, known)}: the table has {', '.join(known)}."
            )
    kept, values = [], []
    for row in rows:
        numbers = [_number(row[column]) for column in (*wanted.values(), loss)]
        if all(math.isfinite(number) for number in numbers):
            kept.append(row)
            values.append(numbers)
    if not kept:
        raise ConfigError(f"No row has a number in each of {', '.join((*wanted.values(), loss))}: name other columns.")
    table = np.array(values)
    columns = {name: table[:, index] for index, name in enumerate(wanted)}
    if "N" in columns and "C" in columns and "D" not in columns:
        columns = {"N": columns["N"], "D": columns["C"] / (6 * columns["N"]), "C": columns["C"]}
    return Points(columns, table[:, -1], kept, len(rows) - len(kept))


def read_csv(path: Path, *, n: str | None = None, d: str | None = None, c: str | None = None, loss: str) -> Points:
    """`from_rows` of a CSV file with a line of names."""
    rows = read_rows(path)
    if not rows:
        raise ConfigError(f"{path} has no rows: give a CSV file with a line of names and a row a run.")
    return from_rows(rows, n=n, d=d, c=c, loss=loss)


def _number(value: Any) -> float:
    """A cell as a number; NaN where it is none."""
    try:
        return float(str(value).replace("_", "").replace(",", ""))
    except ValueError:
        return math.nan
