"""Engines: what starts a run's processes where the warm supervisor does not, on one machine or on many.

    >>> import gptlab
    >>> from gptlab.launcher.engines import Slurm
    >>> gptlab.launch(config, name="first", engine=Slurm(nodes="2", time="2:00:00"))  # doctest: +SKIP

An engine is a frozen dataclass whose fields are its settings, and the command's flags. It writes a command, a script or
a manifest that a person can read; every rank it starts is `python -m gptlab.worker DIR`, and what it holds of
the run afterwards is the run directory.

    torchrun.py    torch's own agent on each node, elastic between a least and a greatest number of them
    slurm.py       an sbatch script, requeued before its time is up; batch.py is what runs inside the job
    kubernetes.py  manifests for Kubeflow's TrainJob and PyTorchJob and for DLRover's ElasticJob
    dlrover.py     a master and an agent of DLRover on this machine
    settings.py    what their settings share
    agent.py       the process around torchrun and DLRover that ends them and writes the last word
    handles.py     what the caller holds

Left out on purpose: what a rank does (`worker.py`), how ranks find each other (`joining.py`).
"""

from __future__ import annotations

from gptlab.config import ConfigError, did_you_mean
from gptlab.launcher.engines.dlrover import Dlrover
from gptlab.launcher.engines.kubernetes import Kubernetes, Manifest
from gptlab.launcher.engines.settings import Engine
from gptlab.launcher.engines.slurm import Slurm
from gptlab.launcher.engines.torchrun import Torchrun

__all__ = ["ENGINES", "Dlrover", "Engine", "Kubernetes", "Manifest", "Slurm", "Torchrun", "engine_of"]

ENGINES: dict[str, type[Torchrun] | type[Slurm] | type[Kubernetes] | type[Dlrover]] = {
    "torchrun": Torchrun, "slurm": Slurm, "kubernetes": Kubernetes, "dlrover": Dlrover,
}  # fmt: skip
"""By the name that --engine knows; `local` is the warm supervisor."""


def engine_of(name: str) -> type[Torchrun] | type[Slurm] | type[Kubernetes] | type[Dlrover]:
    """The engine of that name."""
    if name not in ENGINES:
        known = ["local", *ENGINES]
        raise ConfigError(f"There is no engine {name!r}{did_you_mean(name, known)}: choose one of {', '.join(known)}.")
    return ENGINES[name]
