"""What the subcommands of `gptlab` do, each a function from parsed arguments to an exit code.

    >>> from gptlab.cli import main
    >>> main(["cost", "--preset", "gpt2"])

Left out on purpose: flags (`cli.py`, `flags.py`), following a run (`following.py`), words for people (`wording.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import shlex
import shutil
import sys
import time
from typing import Any

from gptlab.benching import bench as bench
from gptlab.config import ConfigError, TrainConfig, did_you_mean
from gptlab.flags import config_of, field_value, given_fields
from gptlab.following import follow, interrupts, progress_bar
from gptlab.grid import check_count
from gptlab.mirror import check_installed, mirrored
from gptlab.runs import Run, list_runs
from gptlab.studying import check_flags, export, import_logs, print_spread, sweep_rows
from gptlab.timelines import pipeline as pipeline
from gptlab.watching import watch_runs, watch_sweep
from gptlab.wording import cost_lines, doctor_lines, end_line, eval_line, print_table, show_lines, sweep_columns, write


def train(arguments: argparse.Namespace) -> int:
    """Starts a run, or goes on with one, and waits for it; or prints what an engine would be given."""
    from gptlab import engineflags, launcher
    from gptlab.engineflags import engine_given
    from gptlab.launcher.engines import Kubernetes

    if arguments.tensorboard:
        check_installed()
    if arguments.tune_budget is not None and not arguments.tune:
        raise ConfigError("--tune-budget is how long --tune may take: give both, or neither.")
    given = given_fields(arguments)
    before = 0
    if arguments.resume is not None:
        extra = [*given, *(name for name in ("preset", "name", "tune") if getattr(arguments, name))]
        if extra:
            raise ConfigError(
                f"--resume goes on with the run's own settings: leave out --{extra[0].replace('_', '-')}."
            )
        before = len(Run.open(arguments.resume, arguments.runs_dir).attempts())
        engine = engine_given(arguments)
        if engine is not None and (code := engineflags.show_resumed(engine, arguments)) is not None:
            return code
        assert not isinstance(engine, Kubernetes)  # refused
        handle = launcher.resume(arguments.resume, runs_dir=arguments.runs_dir, engine=engine)
    else:
        config = config_of({name: field_value(name, text) for name, text in given.items()}, arguments.preset)
        if arguments.tune:
            from gptlab.tuning import tune_aloud

            config = tune_aloud(config, arguments.tune_budget)
        engine = engine_given(arguments)
        if isinstance(engine, Kubernetes) or (engine is not None and arguments.dry_run):
            return engineflags.show(engine, config, arguments)
        handle = launcher.launch(config, name=arguments.name, runs_dir=arguments.runs_dir, engine=engine)
    with mirrored(handle.run) if arguments.tensorboard else contextlib.nullcontext():
        result = follow(handle, print_lines=not arguments.json, attempts_before=before)
    if arguments.json:
        write(json.dumps({"name": handle.run.name, "path": str(handle.run.path), **result}, indent=1))
    ended_well = result["status"] in ("finished", "stopped")
    if not arguments.json or not ended_well:
        print(end_line(handle.run, result), file=sys.stdout if ended_well else sys.stderr)
    return 0 if ended_well else 1


def sample(arguments: argparse.Namespace) -> int:
    """Prints the prompt and what the model makes of it, as it comes; of several, the first as it comes."""
    run = Run.open(arguments.run, arguments.runs_dir)
    from gptlab import sampling

    prompts = arguments.prompt or [""]
    pieces = sampling.sample(
        run,
        prompts,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        repetition_penalty=arguments.repetition_penalty,
        stop_ids=arguments.stop_id,
        seed=arguments.seed,
        use_cache=not arguments.no_cache,
        dtype=arguments.dtype,
        device=arguments.device,
    )
    texts = [""] * len(prompts)
    if not arguments.json:
        print(prompts[0], end="", flush=True)
    for row, piece in pieces:
        texts[row] += piece
        if row == 0 and not arguments.json:
            print(piece, end="", flush=True)
    if arguments.json:
        samples = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
        write(json.dumps({"run": run.name, "samples": samples}, indent=1))
        return 0
    print()
    for prompt, text in zip(prompts[1:], texts[1:], strict=True):
        print(f"---\n{prompt}{text}")
    return 0


def eval(arguments: argparse.Namespace) -> int:
    """Scores a run's newest checkpoint on a split of its text, or on a file."""
    from pathlib import Path

    run = Run.open(arguments.run, arguments.runs_dir)
    if arguments.split and arguments.file:
        raise ConfigError(f"--file {arguments.file} is no split of the run's text: leave out --split.")
    if arguments.split not in ("", "val", "train"):
        hint = did_you_mean(arguments.split, ("val", "train"))
        raise ConfigError(f"There is no split {arguments.split!r}{hint}: choose val or train.")
    from gptlab import evaluation

    with progress_bar() as show:
        record = evaluation.evaluate(
            run, split=arguments.split or "val", file=Path(arguments.file) if arguments.file else None, progress=show
        )
    write(json.dumps(record, indent=1) if arguments.json else eval_line(record))
    return 0


def sweep(arguments: argparse.Namespace) -> int:
    """Runs a grid and shows its table while it grows."""
    from gptlab import engineflags, sweeps

    check_flags(arguments)
    values = {
        name: list(dict.fromkeys(field_value(name, text) for text in texts))
        for name, texts in given_fields(arguments).items()
    }
    grid = {name: several for name, several in values.items() if len(several) > 1}
    base = _base(values, arguments.preset)
    what = sweep_rows(arguments, base, grid) or {"n_layer": [base.n_layer]}
    name = arguments.name if arguments.name is not None else f"sweep-{time.strftime('%m%d-%H%M%S')}"
    engine = engineflags.sweep_engine(arguments)
    if engine is not None and arguments.dry_run:
        write(sweeps.array_script(base, what, name, arguments.runs_dir, engine, arguments.at_once or 0))
        return 0
    begun = sweeps.sweep(
        base, what, name=name, runs_dir=arguments.runs_dir, at_once=arguments.at_once, halving=arguments.halving,
        engine=engine,
    )  # fmt: skip
    live = sys.stdout.isatty() and not arguments.json
    with interrupts(begun.stop, _leave):
        watch_sweep(begun, live=live, silent=arguments.json)
    begun.record()  # once more: the queue goes on where a disk is full, and here that is said
    rows = begun.rows()
    if arguments.json:
        write(json.dumps({"name": name, "csv": str(begun.csv_path), "rows": rows}, indent=1))
    else:
        if live:
            refused = dict.fromkeys(row["reason"] for row in rows if row["reason"])
            print("\n".join(refused), end="\n" if refused else "")
        else:
            print_table(sweep_columns(rows), rows)
        print_spread(rows)
        print(f"table in {begun.csv_path}, runs beside it")
    unstarted = any(
        row["state"] == "invalid" and cell.config is not None for cell, row in zip(begun.cells, rows, strict=True)
    )
    return 1 if unstarted or any(row["state"] in ("failed", "diverged", "lost") for row in rows) else 0


def _base(values: dict[str, list[Any]], preset: str | None) -> TrainConfig:
    """The first combination that is a config: the grid changes the rest of it. Without one, the first one's mistake."""
    mistake = None
    check_count(math.prod(map(len, values.values())))
    for combination in itertools.product(*values.values()):
        try:
            return config_of(dict(zip(values, combination, strict=True)), preset)
        except ConfigError as error:
            mistake = mistake or error
    assert mistake is not None  # without values there is one combination
    raise mistake


def _leave() -> None:
    """Ends this process, and with it the runs."""
    raise KeyboardInterrupt


def runs(arguments: argparse.Namespace) -> int:
    """Lists, watches, shows, stops or removes runs."""
    actions = ("list", "watch", "show", "stop", "rm", "import", "export")
    action = arguments.action
    if action not in actions:
        raise ConfigError(f"runs cannot {action!r}{did_you_mean(action, actions)}: choose one of {', '.join(actions)}.")
    if action == "list":
        rows = [run.row() for run in list_runs(arguments.runs_dir)]
        if arguments.json:
            write(json.dumps(rows, indent=1))
        elif rows:
            print_table(list(dict.fromkeys(name for row in rows for name in row)), rows)
        else:
            print("no runs yet: `gptlab train --preset tiny` starts one")
        return 0
    if action == "watch":
        if arguments.json:
            raise ConfigError(
                "runs watch draws for people: `gptlab runs --json` gives scripts the rows of this moment."
            )
        watch_runs(arguments.runs_dir, arguments.names)
        return 0
    if not arguments.names:
        raise ConfigError(f"`gptlab runs {action}` needs a run's name: `gptlab runs` lists them.")
    if action in ("import", "export"):
        return import_logs(arguments) if action == "import" else export(arguments)
    found = [Run.open(name, arguments.runs_dir) for name in dict.fromkeys(arguments.names)]
    for run in found if action in ("stop", "rm") else ():  # all or none
        if action == "stop" and not run.is_active:
            raise ConfigError(f"The run {run.name!r} is {run.state}: there is nothing to stop.")
        if action == "rm" and run.is_active:
            raise ConfigError(
                f"The run {run.name!r} is {run.state}: stop it first with `gptlab runs stop {shlex.quote(run.name)}`."
            )
    told: list[dict[str, str]] = []
    for run in found:
        if action == "show":
            record = {
                "summary": run.row(), "run": run.info, "status": run.status(), "result": run.result(),
                "attempts": run.attempts_table(), "why": run.why(),
            }  # fmt: skip
            write(json.dumps(record, indent=1) if arguments.json else "\n".join(show_lines(run)))
        elif action == "stop":
            from gptlab import launcher

            launcher.stop(run)
            told.append({"name": run.name, "state": "stopping" if run.is_active else run.state})
        else:
            _remove(run)
            told.append({"name": run.name, "state": "removed"})
    if arguments.json and told:
        write(json.dumps(told, indent=1))
    for one in told if not arguments.json else ():
        stops = one["state"] == "stopping"
        print(f"{one['name']} stops after the step it is taking" if stops else f"{one['name']} is {one['state']}")
    return 0


def _remove(run: Run) -> None:
    """Takes a run's folder off the disk; of a link to one, the link alone."""
    try:
        if run.path.is_symlink():
            run.path.unlink()
        else:
            shutil.rmtree(run.path.absolute())
    except OSError as error:
        raise ConfigError(f"{run.path} cannot be removed as a whole ({error.strerror}): mend that.") from None


def data(arguments: argparse.Namespace) -> int:
    """Lists prepared corpora, or prepares one."""
    from gptlab import corpus

    actions = ("list", "prepare")
    if arguments.action not in actions:
        hint = did_you_mean(arguments.action, actions)
        raise ConfigError(f"data cannot {arguments.action!r}{hint}: choose list or prepare.")
    if arguments.action == "list":
        rows = [_corpus_row(found) for found in corpus.list_corpora()]
        if arguments.json:
            write(json.dumps(rows, indent=1))
        elif rows:
            print_table(list(rows[0]), rows)
        else:
            print("no corpora yet: `gptlab data prepare pysrc` makes one")
        return 0
    if arguments.source is None:
        raise ConfigError("`gptlab data prepare` needs a source: pysrc, shakespeare, a text file or a folder.")
    from pathlib import Path

    with progress_bar() as show:
        out = Path(arguments.out) if arguments.out else None
        made = corpus.prepare(arguments.source, arguments.tokenizer, out=out, progress=show)
    row = _corpus_row(made)
    if arguments.json:
        write(json.dumps(row, indent=1))
    else:
        parts = f"{row['train_tokens']:,} tokens to train on and {row['val_tokens']:,} to validate"
        print(f"{made.name}: {parts}, vocabulary {row['vocab_size']:,}, in {made.path}")
    return 0


def _corpus_row(found: Any) -> dict[str, Any]:
    return {
        "name": found.name,
        "tokenizer": found.meta["tokenizer"]["name"],
        "vocab_size": found.vocab_size,
        "train_tokens": len(found.split("train")),
        "val_tokens": len(found.split("val")),
        "path": str(found.path),
    }


def cost(arguments: argparse.Namespace) -> int:
    """Prints what a config asks for."""
    from gptlab import costs, hardware, kernels

    given = {name: field_value(name, text) for name, text in given_fields(arguments).items()}
    config = config_of(given, arguments.preset)
    if not config.vocab_size:
        from gptlab import corpus

        if found := corpus.find(config.data, config.tokenizer):
            config = config.replace(vocab_size=found.vocab_size)
    if arguments.measure:
        from gptlab.native.rates import measured

        kind, _ = hardware.resolve_device(config.device)
        dtype, _ = hardware.resolve_dtype(config.dtype, kind, config)
        hardware.rates(kind, dtype, measure=True)
        if kernels.serves(config, kind, dtype):
            measured(dtype, hardware.cores())
    record = costs.cost(config)
    write(json.dumps(record, indent=1) if arguments.json else "\n".join(cost_lines(config, record)))
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    """Prints what the machine offers and what is missing."""
    from gptlab import hardware

    record = hardware.report()
    write(json.dumps(record, indent=1) if arguments.json else "\n".join(doctor_lines(record)))
    return 0
