"""`gptlab bench`: its flags, its live table, its files and its exit code.

    >>> from gptlab.cli import main
    >>> main(["bench", "train", "tiny", "--backend", "eager", "inductor", "--output", "bench.csv"])

Left out on purpose: what a bench is (`benchmark/`).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gptlab.config import ConfigError
from gptlab.flags import Parser, field_value, real, whole
from gptlab.given import check_output
from gptlab.jsonfile import replacing
from gptlab.wording import print_table, table, write

_FIELDS = ("block_size", "micro_batch_size", "dtype", "compile", "threads", "device", "attention", "nproc", "strategy")


def add_flags(parser: Parser) -> None:
    """The flags of `gptlab bench`, upstream's among them."""
    add = parser.add_argument
    add("kind", nargs="?", metavar="train|generate|all", help="what to bench")
    add("model", nargs="?", metavar="MODEL",
        help="a preset, torchbench, a shape like 4/4/128, a JSON file, a Hugging Face folder, or a run")  # fmt: skip
    add("--against", default="", metavar="plain|eager|transformers|nocache",
        help="the other side [eager where --backend is given, else train plain, generate nocache]")  # fmt: skip
    axes = parser.add_argument_group("axes: several values make a grid")
    axes.add_argument("--backend", nargs="+", metavar="NAME",
                      help="config, eager, inductor, inductor_step, aot_eager, cudagraphs, native")  # fmt: skip
    axes.add_argument("--dtype", nargs="+", metavar="NAME", help="of both sides, but for plain [the model's]")
    axes.add_argument("--attention", nargs="+", metavar="NAME", help="kernel of attention [the model's]")
    axes.add_argument("--nproc", nargs="+", metavar="N", help="processes that share the batch [1]")
    axes.add_argument("--strategy", nargs="+", metavar="NAME", help="how they share it [ddp]")
    axes.add_argument("--batch-size", nargs="+", metavar="N",
                      help="sequences of a step, or texts [the model's, up to 8192 tokens; generate 1]")  # fmt: skip
    axes.add_argument("--block-size", nargs="+", metavar="N", help="context [the model's]")
    add("--accuracy", action="store_true", help="only judge")
    add("--performance", action="store_true", help="only race; with --accuracy both, as without either")
    add("--force", action="store_true", help="race what is not right, too")
    add("--collect-outputs", nargs="?", const="outputs", metavar="FOLDER",
        help="keep the tensors that were compared [outputs]")  # fmt: skip
    add(
        "--pairs",
        type=whole(1, 10**6),
        default=30,
        metavar="N",
        help="most timed turns of each side [30, fewer once tight]",
    )
    add(
        "--budget",
        type=real(0, 1e6),
        default=30.0,
        metavar="S",
        help="seconds of timed turns after which a race ends [30]",
    )
    add(
        "--limit",
        type=real(1, 1e6),
        default=600.0,
        metavar="S",
        help="seconds that each process of a cell may take [600]",
    )
    add("--micro-batch-size", metavar="N", help="sequences of a forward pass, of both [what fits]")
    add("--compile", metavar="off|model|step", help="of gptlab's side, where no backend is named [the model's]")
    add("--threads", metavar="N", help="CPU threads a process [the cores over the processes]")
    add("--device", metavar="auto|cpu|cuda|mps", help="where to compute [auto]")
    add(
        "--new-tokens",
        type=whole(1, 10**6),
        metavar="N",
        help="tokens that generate adds [128, or what the context leaves]",
    )
    add("--prompt-tokens", type=whole(1, 10**6), metavar="N", help="tokens of each prompt [16]")
    add("--tune", action="store_true", help="tune gptlab's side first")
    add("--tune-budget", type=real(1, 1e6), metavar="S", help="seconds to measure for [60 up to 10m, 600 at gpt2]")
    add("--memory", action=argparse.BooleanOptionalAction, default=True,
        help="measure peak memory, in a process for each side [yes]")  # fmt: skip
    add("--output", action="append", metavar="FILE", help="write rows to FILE.csv, or FILE.jsonl; may be repeated")
    add("--baseline", metavar="OLD.csv", help="say what is faster, same or slower than there; slower is exit code 4")
    add("--plot", metavar="FILE", help="draw the speed-ups into a png, svg or pdf")
    theirs = parser.add_argument_group("the flags of torch's dynamo benchmarks")
    for flag in ("training", "inference", "float32", "float16", "bfloat16", "amp", "ddp", "multiprocess", "inductor"):
        theirs.add_argument(f"--{flag}", action="store_true", help="as there")
    theirs.add_argument("-d", metavar="cpu|cuda", help="as there; without a GPU it says what it did instead")
    theirs.add_argument("--only", metavar="nanogpt", help="as there; nanogpt is the preset torchbench")


def bench(arguments: argparse.Namespace) -> int:
    """Benches a grid. Exit code 0 where all rows are right, 1 where one is not, 3 where one did not run, 4 where one is
    slower than its baseline."""
    from gptlab.benchmark import baseline, cells_of, rows_of
    from gptlab.benchmark.cells import Plan
    from gptlab.benchmark.table import SHOWN, json_line, read_csv, shown, summary, summary_line, write_csv
    from gptlab.benchmark.upstream import translate

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    outputs = [Path(name) for name in arguments.output or ()]
    for path in outputs:
        check_output(path, "--output", endings=(".csv", ".jsonl"), makes_folder=True)
    if arguments.plot:
        check_output(Path(arguments.plot), "--plot", endings=(".png", ".svg", ".pdf"), makes_folder=True)
    if arguments.collect_outputs:
        check_output(Path(arguments.collect_outputs, "tensors"), "--collect-outputs", makes_folder=True)
    old = read_csv(Path(arguments.baseline)) if arguments.baseline else None
    asked = translate(vars(arguments), arguments.kind, arguments.model)
    if arguments.inductor and not arguments.backend:
        arguments.backend = ["inductor"]
    changes, axes = _fields(arguments)
    plan = Plan(
        asked.kind, asked.model, arguments.against, asked.changes | changes, _options(arguments), arguments.runs_dir
    )
    for note in asked.notes:
        say(note)
    cells = cells_of(
        plan, asked.axes | axes, tuned=arguments.tune, tune_budget_s=arguments.tune_budget, say=say
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    with _live(arguments.json, SHOWN) as show:
        for row in rows_of(cells):
            if old is not None:
                (row,) = baseline.compare([row], old)
            rows.append(row)
            if arguments.json:
                write(json_line(row))
            show([_with_baseline(shown(one), one) for one in rows])
            for path in outputs:  # anew with each row: an interrupted bench keeps what it has
                if path.suffix == ".csv":
                    write_csv(path, rows)
                else:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with replacing(path) as beside:
                        beside.write_text("".join(json_line(one) + "\n" for one in rows))
    if arguments.plot:
        from gptlab.benchmark.picture import draw

        draw(rows, arguments.plot)
    code = baseline.exit_code(rows)
    (say if arguments.json else write)(summary_line(summary(rows)) + _why(code))
    return code


def _why(code: int) -> str:
    """What the exit code says."""
    reason = {1: "a row is not right", 3: "not all rows ran", 4: "a row is slower than its baseline"}.get(code)
    return f" (exit code {code}: {reason})" if reason else ""


def _with_baseline(cells: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    if "against_baseline" not in row:
        return cells
    change = f" {row['change']:.2f}x" if row.get("change") else ""
    return cells | {"note": f"{row['against_baseline']}{change} {cells['note']}".strip()}


def _fields(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Fields of the config that all cells have, and the axes."""
    changes: dict[str, Any] = {}
    axes: dict[str, list[Any]] = {}
    if arguments.backend:
        axes["backend"] = arguments.backend
    if arguments.backend and arguments.compile:
        raise ConfigError(f"--compile {arguments.compile} is what a backend says: leave it out beside --backend.")
    for name, given in ((name, getattr(arguments, name)) for name in _FIELDS):
        if isinstance(given, list):
            axes[name] = given if name == "strategy" else [field_value(name, text) for text in given]
        elif given is not None:
            changes[name] = field_value(name, given)
    if arguments.batch_size:
        axes["global_batch_size"] = [field_value("global_batch_size", text) for text in arguments.batch_size]
    return changes, axes


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What every cell gets."""
    both = arguments.accuracy == arguments.performance
    options: dict[str, Any] = {
        "accuracy": both or arguments.accuracy, "performance": both or arguments.performance,
        "force": arguments.force, "memory": arguments.memory, "pairs": arguments.pairs, "budget_s": arguments.budget,
        "limit_s": arguments.limit, "new_tokens": arguments.new_tokens, "prompt": arguments.prompt_tokens,
        "outputs": arguments.collect_outputs and str(Path(arguments.collect_outputs).resolve()),
    }  # fmt: skip
    return {name: value for name, value in options.items() if value is not None}


@contextlib.contextmanager
def _live(quiet: bool, columns: tuple[str, ...]) -> Iterator[Callable[[list[dict[str, Any]]], None]]:
    """A function that shows the rows so far: in place on a terminal, else the whole table once, at the end."""
    kept: list[dict[str, Any]] = []
    if quiet:
        yield kept.extend
        return
    if not sys.stdout.isatty():

        def say(rows: list[dict[str, Any]]) -> None:
            kept[:] = rows
            row = rows[-1]
            line = " ".join(str(row[name]) for name in columns if row[name] not in (None, ""))
            print(line, file=sys.stderr, flush=True)

        yield say
        if kept:
            print_table(_used(columns, kept), kept)
        return
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        yield lambda rows: live.update(table(_used(columns, rows), rows), refresh=True)


def _used(columns: tuple[str, ...], rows: list[dict[str, Any]]) -> list[str]:
    """Columns in which something stands."""
    return [name for name in columns if any(row.get(name) not in (None, "") for row in rows)]
