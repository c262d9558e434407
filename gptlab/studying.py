"""What the subcommands of studies do: fits, tuning, reports, rows for sweeps, and runs that come from or go elsewhere.

    >>> from gptlab.cli import main
    >>> main(["fit", "runs/grid.sweep.csv", "--n", "matmul_parameters", "--d", "tokens", "--loss", "val_loss"])

Left out on purpose: flags (`cli.py`), the fits (`scaling/`), the page (`lab/report.py`).
"""

from __future__ import annotations

import argparse
import ast
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gptlab.config import ConfigError, TrainConfig
from gptlab.flags import config_of, field_value, given_fields
from gptlab.given import check_output, read_object
from gptlab.jsonfile import read_json, write_json
from gptlab.runs import Run, default_runs_dir
from gptlab.wording import print_table, write

DIALLED = ("n_layer", "n_head", "n_embd", "global_batch_size", "max_iters", "learning_rate", "warmup_iters")
"""Fields that `gptlab sweep --depth` sets."""


def fit(arguments: argparse.Namespace) -> int:
    """Fits the law of the columns that are named, in N and D or in one variable, and prints parameters, intervals,
    residuals and a check."""
    import numpy as np

    from gptlab import scaling

    if arguments.d and arguments.c and not arguments.n:
        raise ConfigError("A law in D and C needs N: give --n, or leave out --d or --c.")
    points = scaling.read_csv(Path(arguments.table), n=arguments.n, d=arguments.d, c=arguments.c, loss=arguments.loss)
    columns, loss = points.columns, points.loss
    variables = ["N", "D"] if {"N", "D"} <= set(columns) else list(columns)[:1]
    chosen = {name: columns[name] for name in variables}
    found = scaling.fit(chosen, loss, delta=arguments.delta, draws=arguments.draws)
    record: dict[str, Any] = {
        "law": found.law, "runs": len(loss), "left_out": points.left_out, "values": found.values,
        "intervals": {name: list(ends) for name, ends in found.intervals.items()},
        "residuals": [float(value) for value in found.residuals],
    }  # fmt: skip
    try:
        checked = scaling.check(
            chosen, loss, hold_back=arguments.hold_back, delta=arguments.delta, draws=arguments.draws
        )
        record["held_back"] = [
            {name: float(columns[name][row]) for name in variables}
            | {"measured": float(checked.measured[place]), "predicted": float(checked.predicted[place]),
               "interval": [float(end) for end in checked.intervals[place]], "error": float(checked.errors[place])}
            for place, row in enumerate(checked.rows)
        ]  # fmt: skip
    except scaling.Undetermined as error:
        record["held_back"] = str(error)
    if len(variables) == 2:
        spent = columns.get("C", 6 * columns["N"] * columns["D"])
        try:
            iso = scaling.isoflop(columns["N"], loss, spent)
            best = [{"C": one.compute, "N": one.n_opt, "D": one.d_opt} for one in iso.budgets]
            record["isoflop"] = {"exponent": iso.exponent, "interval": list(iso.interval), "best": best}
        except scaling.Undetermined:
            record["isoflop"] = None
        record["next"] = [{"C": c} | found.best_split(c) for c in float(np.max(spent)) * np.array([1.0, 10.0])]
    if asked := _points(arguments.predict, variables):
        record["predictions"] = [
            at | {"loss": float(found.predict(at)[0]), "interval": [float(end) for end in found.interval(at)[0]]}
            for at in asked
        ]
    write(json.dumps(record, indent=1) if arguments.json else "\n".join(_lines(record)))
    return 0


def _points(texts: Sequence[str] | None, variables: Sequence[str]) -> list[dict[str, float]]:
    """Points to predict, from texts like N=1e9,D=2e10."""
    found = []
    for text in texts or ():
        point = {}
        for pair in text.split(","):
            name, _, value = pair.partition("=")
            try:
                point[name.strip().upper()] = float(value)
            except ValueError:
                raise ConfigError(
                    f"--predict {text} is no point: give {','.join(f'{v}=1e9' for v in variables)}."
                ) from None
        if set(point) != set(variables) or not all(0 < value < math.inf for value in point.values()):
            raise ConfigError(f"--predict {text} is no point: give {','.join(f'{v}=1e9' for v in variables)}.")
        found.append(point)
    return found


def _lines(record: Mapping[str, Any]) -> list[str]:
    """A fit for people."""
    out = f", {record['left_out']} rows left out" if record["left_out"] else ""
    lines = [f"{record['law']}, from {record['runs']} runs{out}; 95 % intervals"]
    for name, value in record["values"].items():
        low, high = record["intervals"][name]
        lines.append(f"  {name:9} {value:<12.5g} {low:.4g} to {high:.4g}")
    sizes = sorted(abs(value) for value in record["residuals"])
    lines.append(
        f"residuals    median {100 * sizes[len(sizes) // 2]:.2g} %, largest {100 * sizes[-1]:.2g} % of the loss"
    )
    if isinstance(record["held_back"], str):
        lines.append(f"held back    no check: {record['held_back']}")
    else:
        for one in record["held_back"]:
            low, high = one["interval"]
            lines.append(
                f"held back    measured {one['measured']:.4f}, predicted without it {one['predicted']:.4f} "
                f"({low:.4f} to {high:.4f}), {100 * one['error']:+.2f} %"
            )
    if iso := record.get("isoflop"):
        low, high = iso["interval"]
        lines.append(f"iso-FLOP     best N grows as C^{iso['exponent']:.3f} ({low:.3f} to {high:.3f})")
    for one in record.get("next", ()):
        lines.append(f"best split   C {one['C']:.3g}: N {one['N']:.3g}, D {one['D']:.3g}, loss {one['loss']:.4f}")
    for one in record.get("predictions", ()):
        low, high = one["interval"]
        where = ", ".join(f"{name} {value:.3g}" for name, value in one.items() if name not in ("loss", "interval"))
        lines.append(f"predicted    {where}: loss {one['loss']:.4f} ({low:.4f} to {high:.4f})")
    return lines


def tune(arguments: argparse.Namespace) -> int:
    """Measures what trains a config fastest, and writes the choice into it."""
    from gptlab import tuning

    if arguments.preset:
        raise ConfigError(f"tune takes its preset as a word: `gptlab tune {arguments.preset}`, without --preset.")
    given = {name: field_value(name, text) for name, text in given_fields(arguments).items()}
    path = Path(arguments.config) if arguments.config.endswith(".json") else None
    config = (
        config_of(given, arguments.config) if path is None else config_of(read_object(path, "a config") | given, None)
    )
    out = Path(arguments.out) if arguments.out else path
    if out is not None:
        check_output(out, "--out")
    config = tuning.tune_aloud(config, arguments.tune_budget)
    if out is not None:
        write_json(out, config.to_dict())
    chosen = {name: getattr(config, name) for name in tuning.TUNED}
    if arguments.json:
        write(json.dumps({"chosen": chosen, "config": config.to_dict()}, indent=1))
    else:
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in chosen.items())
        write(f"fastest: {flags}" + (f"  (written to {out})" if out else ""))
    return 0


def report(arguments: argparse.Namespace) -> int:
    """Writes runs, or all runs of a sweep, as one HTML file."""
    from gptlab.lab import report as pages
    from gptlab.sweeps import Sweep

    folder = Path(arguments.runs_dir) if arguments.runs_dir else default_runs_dir()
    check_output(Path(arguments.out), "--out")
    runs: dict[Path, Run] = {}
    for name in arguments.runs:
        sweep = read_json(folder / f"{name}.sweep.json") is not None
        for run in Sweep.open(name, folder).runs if sweep else [Run.open(name, arguments.runs_dir)]:
            runs.setdefault(run.path, run)
    path = pages.write(list(runs.values()), Path(arguments.out), title=arguments.title or "")
    size = path.stat().st_size
    if arguments.json:
        write(json.dumps({"path": str(path), "runs": [run.name for run in runs.values()], "bytes": size}, indent=1))
    else:
        write(f"{len(runs)} run{'s' * (len(runs) > 1)} in {path} ({size / 1e6:.1f} MB)")
    return 0


def import_logs(arguments: argparse.Namespace) -> int:
    """`gptlab runs import LOG...`: nanoGPT's logs become runs."""
    from gptlab.foreign import import_log

    given = dict(_setting(text) for text in arguments.set or ())
    folder = Path(arguments.runs_dir) if arguments.runs_dir else default_runs_dir()
    if arguments.name and len(arguments.names) > 1:
        raise ConfigError(
            f"--name {arguments.name} is one run's, and these are {len(arguments.names)} logs: leave it out."
        )
    made = []
    for text in arguments.names:
        path = Path(text)
        made.append(
            import_log(path, name=path.stem if arguments.name is None else arguments.name, runs_dir=folder, given=given)
        )
    rows = [run.summary() for run in made]
    if arguments.json:
        write(json.dumps(rows, indent=1))
    else:
        print_table(list(rows[0]), rows)
    return 0


def _setting(text: str) -> tuple[str, Any]:
    from gptlab.foreign import NO_LITERAL

    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text} sets nothing: give FIELD=VALUE, as in n_layer=6.")
    try:
        return name, ast.literal_eval(value)
    except NO_LITERAL:
        return name, value


def export(arguments: argparse.Namespace) -> int:
    """`gptlab runs export NAME...`: metrics as CSV, or as TensorBoard's events."""
    from gptlab import mirror

    written = []
    for name in arguments.names:
        run = Run.open(name, arguments.runs_dir)
        if arguments.tensorboard:
            events = mirror.Mirror(run)
            events.close()
            written.append(str(events.folder))
        else:
            written.append(str(mirror.to_csv(run)))
    write(json.dumps(written, indent=1) if arguments.json else "\n".join(written))
    return 0


def print_spread(rows: Sequence[Mapping[str, Any]]) -> None:
    """Where cells had several seeds, a line a cell: the mean of the validation loss and its spread."""
    from gptlab.dial import spread

    found = [row for row in spread(rows) if row["seeds"] > 1]
    if not found:
        return
    always = ("n_layer", "n_head", "n_embd", "seeds", "val_loss", "sd", "least", "most")
    hidden = ("non_embedding", "matmul_parameters", "flops")
    differ = [name for name in found[0] if len({str(row.get(name)) for row in found}) > 1]
    print_table([name for name in found[0] if name in always or (name in differ and name not in hidden)], found)


def check_flags(arguments: argparse.Namespace) -> None:
    """Refuses a field's flag that --depth, --isoflops or --seeds would override."""
    given = given_fields(arguments)
    for flag, asked, names in (("depth", arguments.depth, DIALLED), ("isoflops", arguments.isoflops, ("max_iters",))):
        for name in names if asked else ():
            if name in given:
                raise ConfigError(f"--{flag} sets {name}: leave out --{name.replace('_', '-')}.")
    if arguments.seeds > 1 and len(given.get("seed", ())) > 1:
        raise ConfigError("--seeds counts on from one --seed: give one, or leave out --seeds.")


def sweep_rows(
    arguments: argparse.Namespace, base: TrainConfig, grid: Mapping[str, Sequence[Any]]
) -> Mapping[str, Sequence[Any]] | list[dict[str, Any]]:
    """What a sweep runs: the grid, or the rows that --depth, --isoflops and --seeds make of it."""
    from gptlab import dial
    from gptlab import grid as grids

    rows: list[dict[str, Any]] = [cell.values for cell in grids.cells(base, grid)] if grid else [{}]
    if not (arguments.depth or arguments.isoflops or arguments.seeds > 1):
        return grid
    if arguments.depth:
        grids.check_count(len(rows) * len(arguments.depth))
        turned = [dial.dial(depth, base.replace(**row)).config for depth in arguments.depth for row in rows]
        # Of equal compute the steps are others than the dial's, and with them the warm-up.
        dialled = [name for name in DIALLED if not (arguments.isoflops and name == "warmup_iters")]
        rows = [
            row | {name: getattr(config, name) for name in dialled}
            for config, row in zip(turned, [row for _ in arguments.depth for row in rows], strict=True)
        ]
    if arguments.isoflops:
        given = given_fields(arguments)
        kept = {name: getattr(base, name) for name in ("learning_rate", "warmup_iters") if name in given}
        rows = dial.isoflops(base, arguments.isoflops, [kept | row for row in rows])
    if arguments.seeds > 1:
        grids.check_count(len(rows) * arguments.seeds)
        rows = [row | {"seed": base.seed + count} for row in rows for count in range(arguments.seeds)]
    return rows
