"""Flags of the engines, and what `--dry-run` shows of what they would be given.

    >>> from gptlab.cli import main
    >>> main(["train", "--nodes", "1:4", "--rdzv-endpoint", "node1:29500", "--dry-run"])  # doctest: +SKIP

Flags follow from the fields of the engines' dataclasses, as the config's do. Left out on purpose: the engines
(`launcher/engines/`).
"""

from __future__ import annotations

import argparse
import json
import typing
from typing import TYPE_CHECKING

from gptlab.config import ConfigError, TrainConfig
from gptlab.fields import field_docs, field_types
from gptlab.flags import Parser, field_value
from gptlab.recording import check_name
from gptlab.runs import Run
from gptlab.wording import write

if TYPE_CHECKING:
    from gptlab.launcher.engines import Dlrover, Kubernetes, Slurm, Torchrun


def add_engine(parser: Parser) -> None:
    """--engine, and a flag for each setting that an engine has; only those that are given appear in the result."""
    from gptlab.launcher.engines import ENGINES

    group = parser.add_argument_group("engines: what starts the processes")
    names = "|".join(["local", *ENGINES])
    text = "this machine's own supervisor, or another [local, or torchrun where --nodes or --rdzv-endpoint is given]"
    group.add_argument("--engine", metavar=names, help=text)
    group.add_argument(
        "--dry-run", "--print", action="store_true", help="print the command, script or manifest; start nothing"
    )
    users: dict[str, list[str]] = {}
    for engine in ENGINES:
        for name in field_types(_class(engine)):
            users.setdefault(name, []).append(engine)
    for name, engines in users.items():
        cls = _class(engines[0])
        kind, default = field_types(cls)[name], getattr(cls, name)
        choices = typing.get_args(kind)
        shown = f" [{default}]" if default not in ("", None) else ""
        text = f"{field_docs(cls)[name]}{shown} ({', '.join(engines)})".replace("%", "%%")
        metavar = "|".join(choices) or {int: "N"}.get(kind, "TEXT")
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, dest=f"engine_{name}", metavar=metavar, default=argparse.SUPPRESS, help=text)


def _class(engine: str) -> type:
    """The dataclass that holds an engine's settings."""
    from gptlab.launcher.engines import engine_of

    return engine_of(engine)


def engine_given(arguments: argparse.Namespace) -> Torchrun | Slurm | Kubernetes | Dlrover | None:
    """The engine that the flags describe; None is this machine's own supervisor.

    Raises:
        ConfigError: a flag of another engine.
    """
    from gptlab.launcher.engines import engine_of

    prefix = "engine_"
    given = {name.removeprefix(prefix): text for name, text in vars(arguments).items() if name.startswith(prefix)}
    chosen = arguments.engine or ("torchrun" if {"nodes", "rdzv_endpoint"} & given.keys() else "local")
    cls = None if chosen == "local" else engine_of(chosen)
    kinds = {} if cls is None else field_types(_class(chosen))
    for name in given:
        if name not in kinds:
            raise ConfigError(f"--{name.replace('_', '-')} says nothing to the engine {chosen}: leave it out.")
    if cls is None:
        if arguments.dry_run:
            raise ConfigError("--dry-run shows what another engine would be given: name one with --engine.")
        return None
    return cls(**{name: field_value(name, text, cls) for name, text in given.items()})


def sweep_engine(arguments: argparse.Namespace) -> Slurm | None:
    """What starts a sweep's runs: this machine's own supervisor, or SLURM."""
    from gptlab.launcher.engines import Slurm

    engine = engine_given(arguments)
    if engine is not None and not isinstance(engine, Slurm):
        raise ConfigError(
            f"A sweep cannot run under {arguments.engine or 'torchrun'}: leave it local, or choose slurm."
        )
    return engine


def show(engine: Torchrun | Slurm | Kubernetes | Dlrover, config: TrainConfig, arguments: argparse.Namespace) -> int:
    """Prints what the engine would be given, or writes the manifests and says what hands them to the cluster."""
    from gptlab.launcher.engines import Kubernetes, starting

    if not isinstance(engine, Kubernetes):
        write(engine.plan(starting.prepare(config, arguments.name, arguments.runs_dir, engine)))
    elif arguments.dry_run:
        engine.check(config)
        write(engine.text(config, check_name(arguments.name or "run")))
    else:
        made = engine.write(config, arguments.name, arguments.runs_dir)
        record = json.dumps({"path": str(made.path), "command": made.command}, indent=1)
        write(record if arguments.json else f"written to {made.path}; start it with\n{made.command}")
    return 0


def show_resumed(engine: Torchrun | Slurm | Kubernetes | Dlrover, arguments: argparse.Namespace) -> int | None:
    """With --dry-run prints what would go on with a run; None without."""
    from gptlab.launcher.engines import Kubernetes

    if isinstance(engine, Kubernetes):
        raise ConfigError("--resume is not for kubernetes: the job of the same --name goes on with its run.")
    if not arguments.dry_run:
        return None
    write(engine.plan(Run(Run.open(arguments.resume, arguments.runs_dir).path.absolute())))
    return 0
