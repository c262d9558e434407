"""From a config and an engine to a run directory and its handle, or to a manifest.

    run = prepare(config, "first", None, Torchrun(nodes="2", rdzv_endpoint="node1:29500"))
    print(engine.plan(run))

Left out on purpose: runs of the warm supervisor, which `gptlab.launch` starts itself.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gptlab import joining
from gptlab.config import ConfigError, TrainConfig
from gptlab.launcher.checks import check_kept
from gptlab.launcher.engines import Engine, Slurm, Torchrun, queue
from gptlab.recording import create_run
from gptlab.runs import PLANNED, Run, default_runs_dir, is_locked, write_json

if TYPE_CHECKING:
    from gptlab.launcher.handle import Handle

MADE_S = 10.0
"""How long the node that makes a run may take between its folder and its run.json."""


def prepare(config: TrainConfig, name: str | None, runs_dir: str | os.PathLike[str] | None, engine: Engine) -> Run:
    """A new run directory for an engine, with nothing started; or the one that another node has made, to join.

    Raises:
        ConfigError: what cannot work; then nothing was made.
    """
    from gptlab import initial
    from gptlab.launcher import check

    cwd = Path.cwd()
    base = (Path(runs_dir) if runs_dir is not None else default_runs_dir()).absolute()
    engine.check(config)
    if isinstance(engine, Slurm):  # its nodes are not this machine: of this one only the file system counts
        engine.check_folder(base)
        config = engine.settle(config)
        check_text(config, cwd)
    else:
        check(config, cwd)
    initial.check(config, cwd)
    if name is not None and isinstance(engine, Torchrun) and engine.joins and (base / name).is_dir():
        return _join(base / name, config)
    run = create_run(config, name, base, cwd=str(cwd))
    try:
        write_json(run.path / "status.json", {"state": PLANNED, "attempt": 0, "updated": time.time(), "pids": []})
    except OSError as error:  # the disk took run.json, and no more
        shutil.rmtree(run.path, ignore_errors=True)
        raise ConfigError(f"{run.path} cannot be written ({error.strerror}): mend that, or choose another.") from None
    return run


def launch(config: TrainConfig, name: str | None, runs_dir: str | os.PathLike[str] | None, engine: Engine) -> Handle:
    """Makes a run and has the engine start it; returns at once."""
    return _start(prepare(config, name, runs_dir, engine), engine)


def _start(run: Run, engine: Engine) -> Handle:
    """Has the engine start a run that was made."""
    try:
        return engine.start(run)
    except OSError as error:
        raise ConfigError(f"{run.path} cannot be written ({error.strerror}): mend that, and resume.") from None


def resume(name: str, runs_dir: str | os.PathLike[str] | None, engine: Engine) -> Handle:
    """Has an engine go on with a run from its newest good checkpoint.

    Raises:
        ConfigError: a run that does not exist, is finished, is queued, or is being trained and cannot be joined.
    """
    run = Run(Run.open(name, runs_dir).path.absolute())
    queue.check_not_queued(run)
    joins = isinstance(engine, Torchrun) and engine.joins
    if is_locked(run.path) and not joins:
        raise ConfigError(f"The run {run.name!r} is being trained by another process: wait for it, or stop it.")
    result = run.result() or {}
    if result.get("status") == "finished":
        raise ConfigError(
            f"The run {run.name!r} is finished, with step {result.get('step')}: start another under a new --name."
        )
    config = run.config
    engine.check(config)
    if not isinstance(engine, Slurm):
        check_kept(config, run.info.get("setting") or {})
    return _start(run, engine)


def check_text(config: TrainConfig, cwd: Path) -> None:
    """Refuses a text that cannot be trained on."""
    from gptlab import corpus

    corpus.check(corpus.seen_from(cwd, config.data), config.tokenizer, config.block_size, config.task)


def _join(path: Path, config: TrainConfig) -> Run:
    until = time.monotonic() + MADE_S
    while not (path / "run.json").is_file():
        if time.monotonic() > until:
            raise ConfigError(f"{path} is a folder without a run: choose another --name.")
        time.sleep(0.05)
    joining.check_same(path, config)
    return Run(path)
