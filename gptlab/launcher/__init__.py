"""Starting runs on this machine: a config becomes processes, and this process stays free.

    >>> import gptlab
    >>> handle = gptlab.launch(gptlab.preset("tiny", max_iters=200))  # returns at once
    >>> handle.wait()["status"]
    'finished'

Three kinds of process take part. The one that calls `launch` (a notebook's kernel, a script, the command) is never
forked and imports no torch: it makes the run directory, takes its lock, and hands both to a *supervisor* that it starts
once. The supervisor keeps a fork server that has torch imported and has never run it, so that a *worker* is there in
some hundredths of a second; it watches the workers, replaces an attempt that lost one, and writes the final record when
they could not. Each watches the one above: when the caller ends, however it ends, the supervisor ends its workers, and
when the supervisor ends, the workers end themselves. A script that wants its runs finished calls `wait()`, or has them
detached.

    client.py      the caller's end: starts the supervisor, hands runs over
    handle.py      what the caller holds of a run
    detached.py    a caller of its own, for runs that outlive who started them
    supervisor.py  the process between: commands in, one Job a run
    job.py         one run: prepare its text, attempt after attempt
    crew.py        the workers of one attempt: fork, watch, end
    watch.py       which worker hangs or was stopped, and its stack
    lookout.py     the same by a rank itself, where an engine has started it
    checks.py      what this machine's devices can hold
    verdict.py     whether a run that failed is worth another attempt
    ending.py      what an attempt left, and the final record where no worker wrote it
    entry.py       what a new process does first
    preload.py     what the fork server imports
    engines/       several machines: torchrun, SLURM, Kubernetes, DLRover

Left out on purpose: what a worker does (`worker.py`).
"""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, overload

from gptlab.config import ConfigError, TrainConfig
from gptlab.launcher import client
from gptlab.launcher.checks import check_devices, check_kept
from gptlab.launcher.handle import Handle
from gptlab.recording import Claim, create_run
from gptlab.runs import QUEUED, Run, default_runs_dir

if TYPE_CHECKING:
    from gptlab.launcher.engines import Engine, Kubernetes, Manifest

__all__ = ["Handle", "launch", "resume", "stop", "warm"]


def warm() -> None:
    """Starts the supervisor and its fork server in the background, so that a first run starts as fast as others."""
    client.supervisor()
    threading.Thread(target=_look_around, daemon=True).start()


@overload
def launch(
    config: TrainConfig, *, name: str | None = None, runs_dir: str | os.PathLike[str] | None = None, engine: Kubernetes
) -> Manifest: ...
@overload
def launch(
    config: TrainConfig, *, name: str | None = None, runs_dir: str | os.PathLike[str] | None = None,
    detach: bool = False, engine: Engine | None = None,
) -> Handle: ...  # fmt: skip
def launch(
    config: TrainConfig, *, name: str | None = None, runs_dir: str | os.PathLike[str] | None = None,
    detach: bool = False, engine: Engine | Kubernetes | None = None,
) -> Handle | Manifest:  # fmt: skip
    """Starts a run in processes of its own (`config.nproc` of them) and returns at once.

    The run lasts no longer than this process, so call `wait()` before leaving, unless it is detached or SLURM's.

    Args:
        name: the run's folder; None makes one up.
        runs_dir: where that folder is made; None takes GPTLAB_RUNS, or `runs`.
        detach: whether the run goes on when this process ends; `gptlab runs stop` ends it then.
        engine: what starts the processes, as `Slurm(nodes="2")`; None is the warm supervisor of this machine.
            `Kubernetes` writes manifests, and kubectl starts them.

    Raises:
        ConfigError: what cannot work; then nothing was made.
    """
    from gptlab import initial

    if engine is not None:
        from gptlab.launcher.engines import Kubernetes, starting

        if isinstance(engine, Kubernetes):
            return engine.write(config, name, runs_dir)
        return starting.launch(config, name, runs_dir, engine)
    prepared = check(config, Path.cwd())
    initial.check(config, Path.cwd())
    base = Path(runs_dir) if runs_dir is not None else default_runs_dir()
    run = create_run(config, name, base.absolute(), cwd=str(Path.cwd()))
    try:
        if not detach:
            client.supervisor()
        return _start(run, Claim(run.path), Path.cwd(), prepared, detach)
    except (OSError, ConfigError) as error:  # the disk took run.json, and no more, or knows no locks
        shutil.rmtree(run.path, ignore_errors=True)
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{run.path} cannot be written ({error.strerror}): mend that, or choose another.") from None


def resume(
    name: str, *, runs_dir: str | os.PathLike[str] | None = None, detach: bool = False, engine: Engine | None = None
) -> Handle:
    """Goes on with a stopped, failed or lost run from its newest good checkpoint, as run.json says; returns at once.

    Args:
        detach: whether the run goes on when this process ends.
        engine: what starts the processes this time; None is the warm supervisor of this machine.

    Raises:
        ConfigError: a run that does not exist, is being trained, waits in SLURM's queue, or is finished.
    """
    if engine is not None:
        from gptlab.launcher.engines import starting

        return starting.resume(name, runs_dir, engine)
    from gptlab.launcher.engines import queue

    run = Run(Run.open(name, runs_dir).path.absolute())
    queue.check_not_queued(run)
    try:
        claim = Claim(run.path, wait_s=0.2)
    except OSError as error:
        raise ConfigError(f"{run.path} cannot be written ({error.strerror}): a run is resumed where it lies.") from None
    try:
        config = run.config  # one that cannot be read is refused here, not by the supervisor
        result = run.result() or {}
        if result.get("status") == "finished":
            raise ConfigError(
                f"The run {run.name!r} is finished, with step {result.get('step')}: start another under a new --name."
            )
        check_kept(config, run.info.get("setting") or {})
        # Relative paths in the config mean what they meant at first, where that folder still exists.
        before = Path(run.info.get("cwd") or ".")
        cwd = before if before.is_dir() else Path.cwd()
        text = run.info.get("data", {}).get("path")
        prepared = (text is not None and Path(text).is_dir()) or check(config, cwd)
        return _start(run, claim, cwd, prepared, detach)
    except BaseException as error:
        claim.release()
        if isinstance(error, OSError):
            raise ConfigError(f"{run.path} cannot be written ({error.strerror}): mend that, and resume.") from None
        raise


def stop(run: Run) -> None:
    """Asks a run to stop, whoever started it: after the step that it is taking, with a checkpoint. One that waits in
    SLURM's queue is taken out of it."""
    from gptlab.launcher.engines import queue

    if run.state == QUEUED:
        queue.withdraw(run)
    else:
        run.request_stop()


def _start(run: Run, claim: Claim, cwd: Path, prepared: bool, detach: bool) -> Handle:
    """Under this process's supervisor, or under a process of its own."""
    if detach:
        from gptlab.launcher import detached

        return detached.start(run, claim, cwd=cwd, prepared=prepared)
    return client.start(run, claim, cwd=cwd, prepared=prepared)


def _look_around() -> None:
    """Imports what the checks before a run import, asks the driver for GPUs, which can take half a second, and has the
    kernels of our own compiled, which takes ten where it was never done."""
    from gptlab import corpus, costs, hardware  # noqa: F401
    from gptlab.native.build import compile_ahead

    hardware.devices()
    compile_ahead()


def check(config: TrainConfig, cwd: Path) -> bool:
    """Refuses what cannot work, before anything is made. Returns whether the text is prepared already."""
    from gptlab import corpus, tasks

    tasks.check_installed(config)
    check_devices(config)
    data = corpus.seen_from(cwd, config.data)
    corpus.check(data, config.tokenizer, config.block_size, config.task)
    return corpus.find(data, config.tokenizer, config.task) is not None
