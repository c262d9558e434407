"""The command `gptlab`: its subcommands and their flags.

    gptlab train --preset tiny --max-iters 200 --name first

Only what a subcommand needs is imported: `gptlab cost` and `gptlab runs` answer at once. The user's mistakes are one
sentence and exit code 2. Left out on purpose: what the subcommands do (`commands.py`), how flags follow from the config
(`flags.py`).
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence

from gptlab.config import ConfigError, did_you_mean
from gptlab.engineflags import add_engine
from gptlab.flags import Parser, add_fields, real, whole


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
    parser.add_argument("--tensorboard", action="store_true", help="write the metrics as TensorBoard's events as well")
    _budget(parser)
    add_fields(parser)
    add_engine(parser)


def _budget(parser: Parser) -> None:
    parser.add_argument(
        "--tune-budget", type=real(1, 1e6), metavar="S", help="seconds to measure for [60 up to 10m, 600 at gpt2]"
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
    parser.add_argument(
        "--max-new-tokens", type=whole(1, 10**9), default=200, metavar="N", help="the most tokens to add [200]"
    )
    parser.add_argument(
        "--temperature", type=real(0, 1e6), default=0.8, metavar="X", help="0 takes the most likely token [0.8]"
    )
    parser.add_argument(
        "--top-k", type=whole(0, 10**7), default=0, metavar="N", help="draw from the N most likely; 0 from all [0]"
    )
    parser.add_argument(
        "--top-p",
        type=real(0, 1),
        default=1.0,
        metavar="X",
        help="draw from the likeliest that together have this share [1]",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=real(0.01, 100),
        default=1.0,
        metavar="X",
        help="above 1 avoids what the text has already [1]",
    )
    parser.add_argument(
        "--stop-id",
        type=whole(0, 10**7),
        action="append",
        metavar="N",
        help="id that ends a text; several may [the end of text]",
    )
    parser.add_argument(
        "--seed", type=whole(0, 2**63 - 1), default=0, metavar="N", help="the same seed draws the same text [0]"
    )
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
    parser.add_argument(
        "--at-once", type=whole(1, 4096), metavar="N", help="runs that train at the same time [1, with SLURM all]"
    )
    parser.add_argument(
        "--depth",
        type=whole(1, 1000),
        nargs="+",
        metavar="N",
        help="one dial: sets shape, batch, learning rate and steps",
    )
    parser.add_argument(
        "--isoflops",
        type=real(1, 1e27),
        nargs="+",
        metavar="C",
        help="compute budgets: each shape trains on D = C / 6 N tokens",
    )
    parser.add_argument(
        "--seeds", type=whole(1, 10_000), default=1, metavar="N", help="seeds of each cell, from --seed on [1]"
    )
    parser.add_argument(
        "--halving",
        type=whole(0, 1000),
        default=0,
        metavar="N",
        help="stop early all but the best of N cells, rung by rung [off]",
    )
    add_fields(parser, several=True)
    add_engine(parser)


def _fit(parser: Parser) -> None:
    parser.add_argument("table", metavar="TABLE.csv", help="a row a run; a sweep leaves one beside its runs")
    parser.add_argument("--n", metavar="COLUMN", help="parameters")
    parser.add_argument("--d", metavar="COLUMN", help="training tokens")
    parser.add_argument("--c", metavar="COLUMN", help="training FLOPs; with --n, D is C / 6 N")
    parser.add_argument("--loss", required=True, metavar="COLUMN", help="final loss, in nats a token")
    parser.add_argument(
        "--predict", action="append", metavar="N=X,D=Y", help="predict the loss there; several may be given"
    )
    parser.add_argument(
        "--hold-back",
        type=whole(1, 10_000),
        default=1,
        metavar="N",
        help="largest runs that a second fit has to predict [1]",
    )
    parser.add_argument(
        "--delta", type=real(1e-9, 1e3), default=1e-3, metavar="X", help="Huber's delta in log loss [0.001]"
    )
    parser.add_argument(
        "--draws", type=whole(20, 100_000), default=400, metavar="N", help="refits behind the intervals [400]"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def _report(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="names or folders of runs, or names of sweeps")
    parser.add_argument("--out", default="report.html", metavar="FILE", help="where to write it [report.html]")
    parser.add_argument("--title", metavar="TEXT", help="what stands above it")
    _place(parser)


def _runs(parser: Parser) -> None:
    parser.add_argument(
        "action", nargs="?", default="list", metavar="list|watch|show|stop|rm|import|export", help="what to do [list]"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs; for import, logs of nanoGPT's train.py")
    parser.add_argument("--set", action="append", metavar="FIELD=VALUE", help="import: what a log does not say")
    parser.add_argument("--tensorboard", action="store_true", help="export TensorBoard's events in place of a CSV file")
    _place(parser, name="import: the run's name [the log's]")


def _data(parser: Parser) -> None:
    parser.add_argument("action", nargs="?", default="list", metavar="list|prepare", help="what to do [list]")
    parser.add_argument("source", nargs="?", metavar="SOURCE", help="pysrc, shakespeare, a text file or a folder")
    parser.add_argument("--tokenizer", default="byte", metavar="byte|char|gpt2", help="how text becomes ids [byte]")
    parser.add_argument("--out", metavar="FOLDER", help="where to write it [the user's cache]")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def _bench(parser: Parser) -> None:
    from gptlab.benching import add_flags

    add_flags(parser)
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
    "fit": ("Fit scaling laws to a table of runs, with intervals, and predict other runs.", _fit),
    "report": ("Write runs as one HTML file: figures, tables, configs, versions.", _report),
    "runs": ("List runs; watch, show, stop or remove some; import and export.", _runs),
    "pipeline": ("What a run's pipeline did in one step, beside what was predicted of it.", _pipeline),
    "data": ("List prepared corpora, or prepare one.", _data),
    "cost": ("What a config asks for: parameters, FLOPs, memory, and the time it is predicted to take.", _cost),
    "tune": ("Measure which precision, kernels, compile and micro-batch train a config fastest.", _tune),
    "bench": (
        "Is a way to compute right, and how much faster? Training and sampling, judged and raced by turns.",
        _bench,
    ),
    "doctor": ("What this machine offers, and what is missing.", _doctor),
}


_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.EIO)
"""What the system says of its own accord: no fault of the program, and a traceback would say less."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code: 0 done, 1 the run failed, 2 the user's mistake, 130 interrupted,
    143 ended."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # as Ctrl-C does: what was started is ended, and half-made files are removed on the way out
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if sys.stdout is None or sys.stderr is None:  # started with them closed, as some services are
        nowhere = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    if isinstance(sys.stdout, io.TextIOWrapper):  # names and texts need not be what a terminal can show
        sys.stdout.reconfigure(errors="backslashreplace")
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
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        where = f" {error.filename}" if error.filename else ""
        print(f"The system refuses{where} ({error.strerror}): mend that, and try again.", file=sys.stderr)
        return 1


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
    from gptlab import commands, studying

    home = studying if name in ("fit", "report", "tune") else commands
    run: Callable[[argparse.Namespace], int] = getattr(home, name)
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
