"""SLURM: a run as a job, from a script that sbatch takes and a person can read.

    gptlab train --engine slurm --nodes 2 --nproc 4 --time 2:00:00 --name first ...    (--dry-run prints the script)

The job saves and goes back into the queue before its time is up, and goes on where it was; `batch.py` is what runs
inside. A sweep is one job array. The run directory, the Python environment and the text must lie where the nodes see
them. Submitting the script again by hand (`sbatch runs/first/job.sh`) resumes the run.

Sources: the manuals of sbatch, srun and scontrol (SchedMD, 22.05).
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gptlab.config import ConfigError, TrainConfig
from gptlab.launcher.engines import queue, settings

if TYPE_CHECKING:
    from gptlab.launcher.handle import Handle
    from gptlab.runs import Run

SCRIPT = "job.sh"
"""In the run directory: what sbatch is given."""
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """A job of a SLURM cluster."""

    nodes: str = "1"
    """Nodes of the run: a number, or for torchrun the least and the most, as 1:4."""
    time: str = "1:00:00"
    """Time limit of a job as sbatch takes it, as 30, 2:00:00 or 1-12; a longer run goes back into the queue."""
    partition: str = ""
    """Partition of the cluster; without, the cluster's own choice."""
    account: str = ""
    """Account that is charged."""
    cpus: int = 1
    """CPU cores a process."""
    gpus: int = 0
    """GPUs of each node."""
    memory: str = ""
    """Memory of each node, as 16G; without, the cluster's own choice (Kubernetes: 16Gi)."""
    margin_s: int = 120
    """Seconds before the time limit at which a job saves and goes back into the queue."""
    sbatch: str = ""
    """Further options of sbatch, as --sbatch='--constraint=a100 --qos=long'."""

    def __post_init__(self) -> None:
        settings.check_settings(self)
        settings.fixed_nodes(self.nodes, "SLURM")
        limit = seconds(self.time)
        if limit <= self.margin_s:
            raise ConfigError(
                f"time {self.time} is no more than margin_s, the {self.margin_s} seconds before its end at which a job "
                "saves: give a longer time, or a smaller margin_s."
            )
        for name in ("partition", "account", "memory"):
            value = getattr(self, name)
            if value and not re.fullmatch(r"[\w.,+-]+", value):
                raise ConfigError(f"{name} {value!r} is no word that sbatch takes: give one of letters and digits.")
        self._further()

    def check(self, config: TrainConfig) -> None:
        """Refuses a world that the batch cannot employ."""
        settings.check_world(config, int(self.nodes))

    def check_folder(self, runs_dir: Path) -> None:
        """Refuses a folder that a script cannot name."""
        _directive(f"--output={runs_dir}")

    def settle(self, config: TrainConfig) -> TrainConfig:
        """The config with the threads that a process's cores give it: SLURM binds it to them."""
        return config if config.threads else config.replace(threads=self.cpus)

    def script(self, name: str, nproc: int, paths: Sequence[Path], cwd: Path, log: Path, at_once: int = 0) -> str:
        """What sbatch is given.

        Args:
            paths: run directories: of one run, or of an array's.
            cwd: the folder that relative paths in the config start from.
            log: where SLURM's own words go; `%a` in it is the number within the array.
            at_once: how many jobs of an array run at a time; 0 sets no limit.
        """
        array = "%a" in log.name
        options = [
            f"--job-name={name}", f"--nodes={self.nodes}", f"--ntasks-per-node={nproc}",
            f"--cpus-per-task={self.cpus}", f"--time={self.time}", "--requeue", "--open-mode=append",
            f"--signal=B:USR1@{self.margin_s}", f"--output={log}",
            *([f"--array=0-{len(paths) - 1}" + (f"%{at_once}" if at_once else "")] if array else []),
            *([f"--partition={self.partition}"] if self.partition else []),
            *([f"--account={self.account}"] if self.account else []),
            *([f"--gpus-per-node={self.gpus}"] if self.gpus else []),
            *([f"--mem={self.memory}"] if self.memory else []),
            *self._further(),
        ]  # fmt: skip
        exports = [f"export {key}={shlex.quote(value)}" for key, value in settings.environment().items()]
        folder = shlex.quote(str(paths[0]))
        if array:
            exports += ["RUNS=(", *(f"  {shlex.quote(str(path))}" for path in paths), ")"]
            folder = '"${RUNS[$SLURM_ARRAY_TASK_ID]}"'
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH {_directive(option)}" for option in options),
            "# Written by `gptlab train --engine slurm`. Submitted again, it goes on from the newest checkpoint.",
            *exports,
            f"cd {shlex.quote(str(cwd))} || exit",
            "# exec: SLURM's signal before the time limit is for the batch process itself.",
            f"exec {shlex.quote(sys.executable)} -m gptlab.launcher.engines.batch {folder}",
        ]
        return "\n".join(lines) + "\n"

    def plan(self, run: Run) -> str:
        """Writes the script into the run directory; its text, and the line that submits it."""
        path = self._write(run)
        return f"{path.read_text()}# {settings.command_text(['sbatch', str(path)])}"

    def start(self, run: Run) -> Handle:
        """Submits the run's job, and returns at once."""
        from gptlab.launcher.engines.handles import JobHandle

        attempts = run.attempts()
        job = queue.submit_runs([run], self._write(run), array=False)
        return JobHandle(run, int(attempts[-1].name) + 1 if attempts else 1, job)

    def start_array(self, runs: Sequence[Run], script: Path, log: Path, at_once: int) -> str:
        """Submits runs as one job array, and returns its number.

        Args:
            script: where the script is written.
            log: where SLURM's own words go, with `%a` for the number within the array.
            at_once: how many run at a time; 0 sets no limit.

        Raises:
            ConfigError: they do not have one nproc, or sbatch refuses.
        """
        sizes = sorted({run.config.nproc for run in runs})
        if len(sizes) > 1:
            raise ConfigError(f"nproc {sizes[-1]} and {sizes[0]} are in one array, which has one: sweep over another.")
        cwd = Path(runs[0].info.get("cwd") or os.getcwd())
        name = script.name.partition(".")[0]
        script.write_text(self.script(name, sizes[0], [run.path for run in runs], cwd, log, at_once))
        return queue.submit_runs(runs, script, array=True)

    def _write(self, run: Run) -> Path:
        path = run.path / SCRIPT
        cwd = Path(run.info.get("cwd") or os.getcwd())
        log = Path(str(run.path / "engine.log").replace("%", "%%"))
        path.write_text(self.script(run.name, run.config.nproc, [run.path], cwd, log))
        return path

    def _further(self) -> list[str]:
        """The words of `sbatch`, each an option with its value."""
        try:
            words = shlex.split(self.sbatch)
        except ValueError as error:
            raise ConfigError(
                f"sbatch {self.sbatch!r} cannot be split into options ({error}): close its quotes."
            ) from None
        for word in words:
            if not re.fullmatch(r"--[a-z][a-z-]*(=[^\n]*)?", word):
                raise ConfigError(f"sbatch {word!r} is no long option of sbatch: write each as --name=value.")
        return words


def seconds(text: str) -> int:
    """A time limit in sbatch's forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    found = _TIME.fullmatch(text)
    if not found:
        raise ConfigError(f"time {text!r} is no time limit: give minutes, or H:M:S, or days-hours.")
    days, *rest = found.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is not None:
        hours, minutes, left = (*numbers, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + left
    if len(numbers) == 3:
        return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    return numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)


def _directive(option: str) -> str:
    """An option as an #SBATCH line takes it: sbatch knows double quotes there, and the backslash before a character."""
    if re.fullmatch(r"[\w@%+=:,./-]+", option):
        return option
    name, _, value = option.partition("=")
    if len(value.splitlines()) > 1:
        raise ConfigError(f"{value!r} has a line break, which ends an #SBATCH line: choose another --runs-dir.")
    return f'{name}="' + re.sub(r'(["\\])', r"\\\1", value) + '"'
