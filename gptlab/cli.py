"""The command `gptlab`: its subcommands and their flags.

    gptlab train --preset tiny --max-iters 200 --name first

Only what a subcommand needs is imported: `gptlab cost` and `gptlab runs` answer at once. The user's mistakes are one
sentence and exit code 2. Left out on purpose: what the subcommands do (`commands.py`), how flags follow from the config
(`flags.py`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from gptlab.config import ConfigError, did_you_mean
from gptlab.engineflags import add_engine
from gptlab.flags import Parser, add_fields


def _place(parser: Parser, *, name: str | None = None) -> None:
    """Where runs are written, and the form for scripts."""
    if name:
        parser.add_argument("--name", help=name)
    parser.add_argument("--runs-dir", metavar="FOLDER", help="where runs are kept [GPTLAB_RUNS, or runs]")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def _train(parser: Parser) -> None:
    _place(parser, name="the run's name; one is made up without")
    parser.add_argument(
        "--resume", metavar="NAME", help="go on with a run from its newest checkpoint, with its own settings"
    )
    parser.add_argument("--tune", action="store_true", help="measure first which setting is fastest, and train with it")
    _budget(parser)
    add_fields(parser)
    add_engine(parser)


def _budget(parser: Parser) -> None:
    parser.add_argument(
        "--tune-budget", type=float, metavar="S", help="seconds to measure for [60 up to 10m, 600 at gpt2]"
    )


def _tune(parser: Parser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a preset, or a JSON file of fields, into which it is written")
    parser.add_argument("--out", metavar="FILE", help="where to write the config [the file that was given]")
    _budget(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    add_fields(parser)


def _sample(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's name or folder")
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="what to go on from; given several times, all are continued"
    )
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="the most tokens to add [200]")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="X", help="0 takes the most likely token [0.8]"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="draw from the N most likely; 0 from all [0]")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="X",
        help="draw from the likeliest that together have this share [1]",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="above 1 avoids what the text has already [1]",
    )
    parser.add_argument(
        "--stop-id", type=int, action="append", metavar="N", help="id that ends a text; several may [the end of text]"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed draws the same text [0]")
    parser.add_argument("--no-cache", action="store_true", help="compute the whole window for each token, slowly")
    parser.add_argument("--dtype", default="float32", metavar="float32|bfloat16", help="of the weights [float32]")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda|mps", help="where to compute [auto]")
    _place(parser)


def _eval(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's name or folder")
    parser.add_argument("--split", default="", metavar="val|train", help="which part of the run's text [val]")
    parser.add_argument("--file", metavar="PATH", help="a text file instead")
    _place(parser)


def _sweep(parser: Parser) -> None:
    _place(parser, name="the sweep's name; started again under it, a sweep goes on")
    parser.add_argument("--at-once", type=int, metavar="N", help="runs that train at the same time [1, with SLURM all]")
    add_fields(parser, several=True)
    add_engine(parser)


def _runs(parser: Parser) -> None:
    parser.add_argument(
        "action", nargs="?", default="list", metavar="list|watch|show|stop|rm", help="what to do [list]"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="the runs to watch, show, stop or remove")
    _place(parser)


def _data(parser: Parser) -> None:
    parser.add_argument("action", nargs="?", default="list", metavar="list|prepare", help="what to do [list]")
    parser.add_argument("source", nargs="?", metavar="SOURCE", help="pysrc, shakespeare, a text file or a folder")
    parser.add_argument("--tokenizer", default="byte", metavar="byte|char|gpt2", help="how text becomes ids [byte]")
    parser.add_argument("--out", metavar="FOLDER", help="where to write it [the user's cache]")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def _bench(parser: Parser) -> None:
    parser.add_argument("kind", metavar="train|generate", help="what to race")
    parser.add_argument("model", metavar="MODEL", help="a preset, a shape like 4/4/128, or a run's name or folder")
    parser.add_argument(
        "--against",
        default="",
        metavar="plain|transformers|nocache",
        help="the other side [train plain, generate nocache]",
    )
    parser.add_argument("--pairs", type=int, default=10, metavar="N", help="timed turns of each side [10]")
    parser.add_argument("--block-size", metavar="N", help="context [the model's]")
    parser.add_argument("--batch-size", metavar="N", help="sequences of a step, or texts [the model's; generate 1]")
    parser.add_argument("--micro-batch-size", metavar="N", help="sequences of a forward pass, of both [what fits]")
    parser.add_argument("--dtype", metavar="TEXT", help="of gptlab's side and transformers' [the model's]")
    parser.add_argument("--compile", metavar="off|model", help="of gptlab's side [the model's]")
    parser.add_argument("--threads", metavar="N", help="CPU threads [the cores]")
    parser.add_argument("--device", metavar="auto|cpu|cuda|mps", help="where to compute [auto]")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="tokens that generate adds [128]")
    parser.add_argument("--prompt-tokens", type=int, default=16, metavar="N", help="tokens of each prompt [16]")
    parser.add_argument("--tune", action="store_true", help="tune gptlab's side first")
    _budget(parser)
    parser.add_argument("--memory", action="store_true", help="measure peak memory too, in a process for each side")
    _place(parser)


def _cost(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument(
        "--measure", action="store_true", help="measure this machine first, where its speed is not known yet"
    )
    add_fields(parser)


def _doctor(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def _pipeline(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's name or folder")
    _place(parser)


COMMANDS: dict[str, tuple[str, Callable[[Parser], None]]] = {
    "train": ("Start a run, print its lines, and wait for its end. Ctrl-C stops it with a checkpoint.", _train),
    "sample": ("Let a run's newest checkpoint continue a text.", _sample),
    "eval": ("Loss, perplexity and bits per byte of a run's newest checkpoint, over a whole split or a file.", _eval),
    "sweep": ("Train a grid: every flag takes several values, and all combinations are run.", _sweep),
    "runs": ("List runs; watch, show, stop or remove some.", _runs),
    "pipeline": ("What a run's pipeline did in one step, beside what was predicted of it.", _pipeline),
    "data": ("List prepared corpora, or prepare one.", _data),
    "cost": ("What a config asks for: parameters, FLOPs, memory, and the time it is predicted to take.", _cost),
    "tune": ("Measure which precision, kernels, compile and micro-batch train a config fastest.", _tune),
    "bench": ("Race gptlab's training step or sampling against a plain one, by turns.", _bench),
    "doctor": ("What this machine offers, and what is missing.", _doctor),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code: 0 done, 1 the run failed, 2 the user's mistake, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _main(words)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `gptlab runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141


def _main(words: list[str]) -> int:
    name = words[0] if words else "--help"
    if name in ("-h", "--help", "help"):
        print("usage: gptlab COMMAND [flags]\n")
        for command, (text, _) in COMMANDS.items():
            print(f"  {command:8} {text}")
        print("\n`gptlab COMMAND --help` lists a command's flags.")
        return 0
    if name in ("-V", "--version", "version"):
        from gptlab import __version__

        print(__version__)
        return 0
    if name not in COMMANDS:
        raise ConfigError(f"There is no command {name!r}{did_you_mean(name, COMMANDS)}: see `gptlab --help`.")
    text, build = COMMANDS[name]
    parser = Parser(f"gptlab {name}", text)
    build(parser)
    arguments = parser.parse(words[1:])
    from gptlab import commands

    run: Callable[[argparse.Namespace], int] = getattr(commands, name)
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
