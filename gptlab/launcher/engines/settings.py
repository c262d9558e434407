"""What the engines' settings share: checks, the environment that a rank needs, and commands as text.

>>> from gptlab.launcher.engines.settings import node_range
>>> node_range("1:4")
(1, 4)
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from gptlab.config import ConfigError, TrainConfig
from gptlab.fields import check_fields

if TYPE_CHECKING:
    from gptlab.launcher.handle import Handle
    from gptlab.runs import Run

LIMITS: dict[str, tuple[float, float]] = {
    "restarts": (0, 1000),
    "cpus": (1, 4096),
    "gpus": (0, 64),
    "margin_s": (30, 86_400),
}
"""Least and greatest value of an engine's numbers."""
PASSED_ON = ("PYTHONPATH", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "XDG_CACHE_HOME", "OMP_NUM_THREADS")
"""Variables of the caller that ranks on other machines need as well: where gptlab, the network and the text are."""


class Engine(Protocol):
    """Starts a run that was made, in processes of its own kind."""

    @property
    def nodes(self) -> str:
        """How many take part, as `node_range` reads it."""

    def check(self, config: TrainConfig) -> None:
        """Refuses what cannot work, before anything is made."""

    def plan(self, run: Run) -> str:
        """What would be started, as a text to read and to paste."""

    def start(self, run: Run) -> Handle:
        """Starts it, and returns at once."""


def check_settings(engine: object) -> None:
    """Types and limits of an engine's fields."""
    check_fields(engine, LIMITS)


def node_range(nodes: str) -> tuple[int, int]:
    """Least and greatest number of nodes: "2" is both."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", nodes)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise ConfigError(f"nodes {nodes!r} is no number of nodes: give one, as 2, or the least and the most, as 1:4.")
    return least, most


def fixed_nodes(nodes: str, engine: str) -> int:
    """The number of nodes of an engine that cannot change it while it runs."""
    least, most = node_range(nodes)
    if least != most:
        raise ConfigError(f"nodes {nodes} is a range, and {engine} gives a job a fixed number: give one, as {most}.")
    return least


def check_world(config: TrainConfig, nodes: int) -> None:
    """Every process of the largest world must have a share of the batch."""
    if nodes * config.nproc > config.global_batch_size:
        raise ConfigError(
            f"nodes {nodes} with nproc {config.nproc} each are {nodes * config.nproc} processes, more than the "
            f"global_batch_size {config.global_batch_size} gives work to: use fewer, or a larger batch."
        )


def worker_command(run: Run, python: str = sys.executable) -> list[str]:
    """What every rank executes, but for the interpreter's own place."""
    return [python, "-m", "gptlab.worker", str(run.path.absolute())]


def environment() -> dict[str, str]:
    """What a rank needs of this process's environment, gptlab's own place on the import path included."""
    from gptlab.launcher import client

    ours = client.environment()
    return {name: ours[name] for name in PASSED_ON if ours.get(name)}


def command_text(command: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
    """A command as a shell takes it, each word quoted."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in (environ or {}).items()]
    return " ".join([*settings, shlex.join(command)])


def full_environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with what a rank needs."""
    return {**os.environ, **environment(), **more}
