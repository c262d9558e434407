"""Benches: is a way to compute a GPT right, and how much faster is it? Training steps and sampling, on grids of cells.

    >>> from gptlab.benchmark import bench
    >>> bench("train", "tiny", backend=["eager", "inductor"], against="plain")[["backend", "accuracy", "speedup"]]

A cell (`cells.py`) runs in processes of its own (`isolation.py`, `cell.py`). There (`inside/`) it is judged, by the
rule in `accuracy.py`, then raced against its opponent: both sides are set up once and warmed up untimed, then take
turns, A B A B, with the same threads, windows and global batch, so that whatever else the machine does falls on both.
The ratio is that of medians; its interval comes from resampling the pairs. Peak memory is taken in a process for each
side. What comes of it is a row (`table.py`), with where it comes from (`provenance.py`).

Left out on purpose: choosing a setting by measuring (`gptlab/tuning.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gptlab import tuning
from gptlab.benchmark import isolation, table
from gptlab.benchmark.cells import AXES, Cell, Plan, grid
from gptlab.config import ConfigError

if TYPE_CHECKING:
    import pandas

Row = dict[str, Any]


def bench(
    kind: str, model: str, *, against: str = "", backend: str | Sequence[str] = (), dtype: str | Sequence[str] = (),
    attention: str | Sequence[str] = (), nproc: int | Sequence[int] = (), strategy: str | Sequence[str] = (),
    batch_size: int | Sequence[int] = (), block_size: int | Sequence[int] = (), tuned: bool = False,
    tune_budget_s: float | None = None, options: Mapping[str, Any] | None = None, runs_dir: str | None = None,
    say: Callable[[str], None] = lambda line: None, **changes: Any,
) -> pandas.DataFrame:  # fmt: skip
    """Benches a grid and returns its rows, one a cell.

    Args:
        kind: `train`, `generate` or `all`.
        model: a preset, `torchbench`, a shape such as 4/4/128, a JSON file of fields, a folder as transformers saves
            it, or a run.
        against: `plain` (on a CPU float32, eager, full logits, torch's default AdamW; on a GPU bfloat16, compiled,
            fused), `eager` (gptlab's own without compilers and kernels of its own), `nocache` (generate), or
            `transformers`. Without one, `eager` where a backend is named, else plain or nocache.
        backend, dtype, attention, nproc, strategy, batch_size, block_size: each one value, or several for a grid.
        tuned: gptlab's side trains with the fastest setting that `tuning.tune` finds, before the race.
        options: fields of `cells.Cell` that every cell gets, such as pairs, accuracy, limit_s.
        say: is told what there is to say beside the rows.
        changes: fields of the config.

    Raises:
        ConfigError: what is not there to bench, or cannot be.
    """
    import pandas

    values = (backend, dtype, attention, nproc, strategy, batch_size, block_size)
    axes = {
        name: [value] if isinstance(value, str | int) else list(value) for name, value in zip(AXES, values, strict=True)
    }
    plan = Plan(kind, model, against, changes, options or {}, runs_dir)
    cells = cells_of(plan, axes, tuned=tuned, tune_budget_s=tune_budget_s, say=say)
    return pandas.DataFrame(list(rows_of(cells)))


def cells_of(
    plan: Plan, axes: Mapping[str, Sequence[Any]], *, tuned: bool = False, tune_budget_s: float | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Cell]:  # fmt: skip
    """The grid's cells, tuned if asked to."""
    cells, notes = grid(plan, axes)
    for note in notes:
        say(note)
    if not tuned:
        return cells
    if any(cell.kind == "generate" for cell in cells):
        raise ConfigError("bench generate has nothing to tune: leave --tune out.")
    found = []
    for cell in cells:
        config = tuning.tune(cell.config, budget_s=tune_budget_s, say=say)[0]
        found.append(dataclasses.replace(cell, config=config))
    return found


def rows_of(cells: Sequence[Cell]) -> Iterator[Row]:
    """Runs cells one after another, and gives each one's row as it is known."""
    for cell in cells:
        yield table.finish(cell, isolation.run(cell))
