"""DLRover on this machine: its master and its agent, which starts, watches and replaces the run's ranks.

    gptlab train --engine dlrover --dlrover-python ~/dlrover/bin/python --nproc 2 --name first ...

DLRover wants versions of its own (protobuf, grpc), so it lives in an environment of its own, named by its interpreter:
`python -m venv ~/dlrover && ~/dlrover/bin/pip install 'gptlab[dlrover]'`. It runs in namespaces of its own too, since
its agent (0.6.1) kills every orphan on the machine that bears torchelastic's variables, and leaves 130 MB in /dev/shm;
and with a master that is started here, since `dlrover-run --standalone` fails with torch 2.13.

On a cluster DLRover's operator starts master and pods: `kubernetes.py`, kind elasticjob.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gptlab.config import ConfigError, TrainConfig
from gptlab.launcher.engines import settings
from gptlab.launcher.engines.torchrun import ENVIRONMENT

if TYPE_CHECKING:
    from gptlab.launcher.handle import Handle
    from gptlab.runs import Run

NAMESPACES = ("--pid", "--fork", "--kill-child", "--mount", "--mount-proc")
"""Of unshare: processes and mounts of its own, all of which end with it."""
MASTER_S = 120.0
"""How long the master may take to listen."""


@dataclass(frozen=True, kw_only=True)
class Dlrover:
    """DLRover's master and agent, on this machine."""

    dlrover_python: str = ""
    """Interpreter of the environment that has DLRover; without, this one."""
    restarts: int = 3
    """How often lost workers are replaced; SLURM and gptlab's own count failures without a new checkpoint instead."""

    nodes = "1"

    def __post_init__(self) -> None:
        settings.check_settings(self)

    @property
    def python(self) -> str:
        """The interpreter that has DLRover."""
        return os.path.expanduser(self.dlrover_python) or sys.executable

    def check(self, config: TrainConfig) -> None:
        """Refuses a machine that has no DLRover, or cannot keep it apart."""
        if reason := missing(self.python):
            raise ConfigError(reason)

    def command(self, run: Run) -> list[str]:
        """What starts master and agent, apart from the machine's other processes."""
        inside = [sys.executable, "-P", "-m", "gptlab.launcher.engines.dlrover", str(run.path.absolute()), self.python]
        return [*unshare(), *inside, str(self.restarts)]

    def plan(self, run: Run) -> str:
        """The command, as a shell takes it."""
        return settings.command_text(self.command(run), {**settings.environment(), **ENVIRONMENT})

    def start(self, run: Run) -> Handle:
        """Master and agent, which end with this process."""
        from gptlab.launcher.engines.handles import start_agent

        return start_agent(run, self.command(run), {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"}, alone=True)


def unshare() -> list[str]:
    """The command that gives what follows namespaces of its own; a user without rights becomes root within."""
    return ["unshare", *(() if os.geteuid() == 0 else ("--user", "--map-root-user")), *NAMESPACES]


def missing(python: str) -> str | None:
    """Why DLRover cannot run here, in a sentence; None where it can."""
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('dlrover') is None)"
    try:
        found = subprocess.run([python, "-c", look], capture_output=True, check=False).returncode == 0
    except OSError as error:
        return f"dlrover_python {python} cannot be started ({error.strerror}): name another interpreter."
    if not found:
        return (
            f"{python} has no DLRover: pip install 'gptlab[dlrover]' in an environment of its own, and name its "
            "interpreter."
        )
    if shutil.which("unshare") is None:
        return "There is no unshare on this machine, which keeps DLRover from other processes: install util-linux."
    if subprocess.run([*unshare(), "true"], capture_output=True, check=False).returncode:
        return "unshare may not make namespaces here, which keep DLRover from other processes: run it where it may."
    return None


def main(run: Path, python: str, restarts: int) -> int:
    """Inside the namespaces: a master, then the agent; returns the agent's exit code."""
    from gptlab.runs import Run

    # What DLRover leaves in shared memory goes with this mount.
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)  # noqa: S108 - no file is made in it
    opened = Run(run)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = os.environ | {"DLROVER_MASTER_ADDR": f"127.0.0.1:{port}", "ELASTIC_JOB_NAME": "gptlab"}
    master = subprocess.Popen(
        [python, "-m", "dlrover.python.master.main", "--port", str(port), "--node_num", "1", "--job_name", "gptlab",
         "--platform", "local"], env=environ,
    )  # fmt: skip
    try:
        _await(port, master)
        command = [
            python, "-m", "dlrover.trainer.torch.elastic_run", "--nnodes=1", f"--nproc-per-node={opened.config.nproc}",
            f"--max-restarts={restarts}", "--monitor-interval=0.5", *settings.worker_command(opened, python)[1:],
        ]  # fmt: skip
        return subprocess.run(command, env=environ, check=False).returncode
    finally:
        master.kill()
        master.wait()


def _await(port: int, master: subprocess.Popen[bytes]) -> None:
    """Until the master listens."""
    until = time.monotonic() + MASTER_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if master.poll() is not None or time.monotonic() > until:
                raise SystemExit("DLRover's master does not listen") from None
            time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
