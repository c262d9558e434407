"""torchrun on one machine or several: torch's own agent a node, which meet at a host and port (the c10d rendezvous).

    gptlab train --engine torchrun --nodes 1:4 --rdzv-endpoint node1:29500 --nproc 2 --name first ...

The same command on another node that sees the same run directory joins the run; nodes may come and go between the least
and the greatest number. `--dry-run` prints the command that a node would run, for who starts it by other means.

torch 2.11 and later let agents and workers share one store, which breaks restarts (pytorch#135712):
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each generation a store of its own. The worker does not depend on it
(`joining.py`), but gloo's meeting is quicker so.

Left out on purpose: starting agents on other nodes, which is a cluster's part (`slurm.py`, `kubernetes.py`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptlab.config import ConfigError, TrainConfig
from gptlab.launcher.engines import settings

if TYPE_CHECKING:
    from gptlab.launcher.handle import Handle
    from gptlab.runs import Run

ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""What every agent of a run must have, or none."""
MEETING = "last_call_timeout=1"
"""How long further nodes are waited for once the least number is there (torch's own: 30 s). That a node went is noticed
after torch's own 15 s: sooner, and one that was only held up makes a world of its own."""


@dataclass(frozen=True, kw_only=True)
class Torchrun:
    """torch's agent on this node, and on others that join it."""

    nodes: str = "1"
    """Nodes of the run: a number, or for torchrun the least and the most, as 1:4."""
    rdzv_endpoint: str = ""
    """HOST:PORT where the nodes meet, on one of them; one node alone needs none."""
    local_addr: str = ""
    """This node's address, where its host name does not resolve."""
    restarts: int = 3
    """How often lost workers are replaced; SLURM and gptlab's own count failures without a new checkpoint instead."""

    def __post_init__(self) -> None:
        settings.check_settings(self)
        _, most = settings.node_range(self.nodes)
        host, colon, port = self.rdzv_endpoint.rpartition(":")
        if self.rdzv_endpoint and not (host and colon and port.isdigit() and int(port) < 65_536):
            raise ConfigError(f"rdzv_endpoint {self.rdzv_endpoint!r} is no HOST:PORT: give one, as node1:29500.")
        if most > 1 and not self.rdzv_endpoint:
            raise ConfigError(f"nodes {self.nodes} need a place to meet: give rdzv_endpoint, as node1:29500.")

    @property
    def joins(self) -> bool:
        """Whether a run that is there already is joined, since other nodes have the same command."""
        return settings.node_range(self.nodes)[1] > 1

    def check(self, config: TrainConfig) -> None:
        """Refuses a world that the batch cannot employ."""
        settings.check_world(config, settings.node_range(self.nodes)[1])

    def command(self, run: Run, python: str = sys.executable) -> list[str]:
        """What a node runs, with ENVIRONMENT."""
        alone = not self.rdzv_endpoint
        endpoint = self.rdzv_endpoint or "127.0.0.1:0"
        local = self.local_addr or ("127.0.0.1" if alone else "")
        return [
            python, "-m", "torch.distributed.run", f"--nnodes={self.nodes}", f"--nproc-per-node={run.config.nproc}",
            "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={run.name}", f"--rdzv-conf={MEETING}",
            *([f"--local-addr={local}"] if local else []), f"--max-restarts={self.restarts}", "--monitor-interval=0.1",
            "--shutdown-timeout=1", *settings.worker_command(run)[1:],
        ]  # fmt: skip

    def plan(self, run: Run) -> str:
        """The command of every node, as a shell takes it."""
        return settings.command_text(self.command(run), {**settings.environment(), **ENVIRONMENT})

    def start(self, run: Run) -> Handle:
        """This node's agent, which ends with this process."""
        from gptlab.launcher.engines.handles import start_agent

        more = dict(ENVIRONMENT)
        if not self.rdzv_endpoint and sys.platform == "linux":
            more["GLOO_SOCKET_IFNAME"] = "lo"  # one machine: its name need not resolve
        return start_agent(run, self.command(run), more, alone=not self.joins)
