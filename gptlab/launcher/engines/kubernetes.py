"""Kubernetes: a run as manifests that kubectl takes, for three operators.

    gptlab train --engine kubernetes --kind trainjob --image me/gptlab:1 --nodes 2 --nproc 4 --name first ...

    trainjob     Kubeflow Trainer v2, trainer.kubeflow.org/v1alpha1 (pkg/apis/trainer/v1alpha1/trainjob_types.go)
    pytorchjob   Kubeflow's training operator v1, kubeflow.org/v1 (pkg/apis/kubeflow.org/v1/pytorch_types.go, 1.9)
    elasticjob   DLRover, elastic.iml.github.io/v1alpha1 (go/elasticjob/api/v1alpha1/elasticjob_types.go)

Three documents: the config as a ConfigMap, the volume of the run directory (unless a claim is named), and the job. Each
pod runs torchrun (or dlrover-run) over `python -m gptlab.worker /runs/NAME`, whose rank 0 makes the run directory from
the config; a pod that comes again goes on from the newest checkpoint. Ranks meet by c10d, at the address that the
operator gives the first pod, and by DLRover's master: the static meeting that Kubeflow would choose does not survive a
restart. What the user wrote is data throughout: no shell sees it, YAML quotes it, and `$(...)` in it stays as it is.

Left out on purpose: talking to a cluster, which is kubectl's part, and building the image.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from gptlab.config import ConfigError, TrainConfig
from gptlab.launcher.engines import settings
from gptlab.launcher.engines.torchrun import ENVIRONMENT, MEETING
from gptlab.recording import check_name
from gptlab.runs import default_runs_dir

CONFIG = "/etc/gptlab"
"""Where a pod finds the config."""
_QUANTITY = re.compile(r"\d+(\.\d+)?([kMGTPE]i?|m)?")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Manifest:
    """Manifests that were written."""

    path: Path
    text: str
    documents: list[dict[str, Any]]
    command: str
    """What hands them to the cluster."""


@dataclass(frozen=True, kw_only=True)
class Kubernetes:
    """A job of a Kubernetes cluster."""

    kind: Literal["trainjob", "pytorchjob", "elasticjob"] = "trainjob"
    """Operator's kind: Kubeflow's trainjob (v2) or pytorchjob (v1), or DLRover's elasticjob."""
    image: str = ""
    """Image that has gptlab (and DLRover, for elasticjob)."""
    nodes: str = "1"
    """Nodes of the run: a number, or for torchrun the least and the most, as 1:4."""
    cpus: int = 1
    """CPU cores a process."""
    gpus: int = 0
    """GPUs of each node."""
    memory: str = ""
    """Memory of each node, as 16G; without, the cluster's own choice (Kubernetes: 16Gi)."""
    claim: str = ""
    """Volume claim for runs, which every node can write; without, one of the run's own is asked for."""
    storage: str = "10Gi"
    """Size of the claim that is asked for."""
    mount: str = "/runs"
    """Where a pod finds that volume."""
    namespace: str = ""
    """Namespace of the job; without, kubectl's own."""
    restarts: int = 3
    """How often lost workers are replaced; SLURM and gptlab's own count failures without a new checkpoint instead."""

    def __post_init__(self) -> None:
        settings.check_settings(self)
        least, most = settings.node_range(self.nodes)
        if self.kind == "trainjob" and least != most:
            raise ConfigError(f"nodes {self.nodes} is a range, and a trainjob has a fixed number: give one, as {most}.")
        if not self.image or self.image != self.image.strip():
            raise ConfigError(f"image {self.image!r} is no image: name one that has gptlab, as --image me/gptlab:1.")
        for name in ("memory", "storage"):
            value = getattr(self, name)
            if value and not _QUANTITY.fullmatch(value):
                raise ConfigError(f"{name} {value!r} is no amount that Kubernetes takes: give one, as 16Gi.")
        for name in ("claim", "namespace"):
            value = getattr(self, name)
            if value and not _LABEL.fullmatch(value):
                raise ConfigError(f"{name} {value!r} is no name in Kubernetes: use small letters, digits and '-'.")
        if not PurePosixPath(self.mount).is_absolute():
            raise ConfigError(f"mount {self.mount!r} is no place in a pod: give a whole path, as /runs.")

    def check(self, config: TrainConfig) -> None:
        """Refuses a world that the batch cannot employ, and a text that pods cannot see."""
        from gptlab.sources import NAMES

        settings.check_world(config, settings.node_range(self.nodes)[1])
        for field, value in (("data", config.data), ("init_from", config.init_from)):
            if value is None or value in NAMES or value.startswith(self.mount.rstrip("/") + "/"):
                continue
            if not PurePosixPath(value).is_absolute() or Path(value).exists():
                raise ConfigError(
                    f"{field} {value} is on this machine, where pods cannot see it: put it on the volume and name its "
                    f"place there, under {self.mount}."
                )

    def write(self, config: TrainConfig, name: str | None, runs_dir: str | os.PathLike[str] | None) -> Manifest:
        """Writes the manifests beside the runs, as NAME.KIND.yaml; starts nothing.

        Raises:
            ConfigError: what cannot work; then nothing was written.
        """
        self.check(config)
        name = check_name(name or f"{config.n_layer}x{config.n_head}x{config.n_embd}-{time.strftime('%m%d-%H%M%S')}")
        base = Path(runs_dir) if runs_dir is not None else default_runs_dir()
        documents = self.documents(config, name)
        text, path = self.text(config, name), base / f"{name}.{self.kind}.yaml"
        try:
            base.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}): choose another --runs-dir.") from None
        return Manifest(path, text, documents, settings.command_text(["kubectl", "apply", "-f", str(path)]))

    def text(self, config: TrainConfig, name: str) -> str:
        """The manifests as YAML."""
        import yaml

        return str(yaml.safe_dump_all(self.documents(config, name), sort_keys=False, allow_unicode=True))

    def documents(self, config: TrainConfig, name: str) -> list[dict[str, Any]]:
        """The manifests: config, volume (unless a claim is named), job."""
        called = label(name)
        spec = {"trainjob": self._trainjob, "pytorchjob": self._pytorchjob, "elasticjob": self._elasticjob}[self.kind]
        version, kind = {
            "trainjob": ("trainer.kubeflow.org/v1alpha1", "TrainJob"), "pytorchjob": ("kubeflow.org/v1", "PyTorchJob"),
            "elasticjob": ("elastic.iml.github.io/v1alpha1", "ElasticJob"),
        }[self.kind]  # fmt: skip
        config_map = {
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": self._metadata(called),
            "data": {"config.json": json.dumps(config.to_dict(), indent=1)},
        }  # fmt: skip
        volume = {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": self._metadata(called),
            "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": self.storage}}},
        }  # fmt: skip
        job = {
            "apiVersion": version, "kind": kind, "metadata": self._metadata(called), "spec": spec(config, name, called)
        }  # fmt: skip
        return [config_map, *([] if self.claim else [volume]), job]

    def _metadata(self, called: str) -> dict[str, Any]:
        return {"name": called, **({"namespace": self.namespace} if self.namespace else {})}

    def _trainjob(self, config: TrainConfig, name: str, called: str) -> dict[str, Any]:
        command = self._torchrun(config, name, "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)")
        pod = {"volumes": self._volumes(called), "containers": [{"name": "node", "volumeMounts": self._mounts()}]}
        job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
        return {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": self.image, "command": command, "env": self._env(),
                "numNodes": int(self.nodes), "numProcPerNode": config.nproc,
                "resourcesPerNode": self._resources(config),
            },
            "runtimePatches": [
                {"manager": "gptlab/launcher",
                 "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
            ],
        }  # fmt: skip

    def _pytorchjob(self, config: TrainConfig, name: str, called: str) -> dict[str, Any]:
        least, most = settings.node_range(self.nodes)
        command = self._torchrun(config, name, "$(PET_RDZV_ENDPOINT)")
        template = {"spec": self._pod("pytorch", command, config, called)}  # the operator wants the container so called
        return {
            "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": self.restarts},
            "nprocPerNode": str(config.nproc),
            "elasticPolicy": {
                "rdzvBackend": "c10d", "minReplicas": least, "maxReplicas": most, "maxRestarts": self.restarts
            },
            "pytorchReplicaSpecs": {
                "Worker": {"replicas": most, "restartPolicy": "OnFailure", "template": template}
            },
        }  # fmt: skip

    def _elasticjob(self, config: TrainConfig, name: str, called: str) -> dict[str, Any]:
        _, most = settings.node_range(self.nodes)
        command = [
            "dlrover-run", f"--nnodes={self.nodes}", f"--nproc-per-node={config.nproc}",
            f"--max-restarts={self.restarts}", *self._worker(name),
        ]  # fmt: skip
        pod = self._pod("main", command, config, called) | {"restartPolicy": "Never"}  # DLRover's master replaces pods
        return {
            "distributionStrategy": "AllreduceStrategy",
            "optimizeMode": "single-job",
            "replicaSpecs": {
                "worker": {"replicas": most, "restartCount": self.restarts, "template": {"spec": pod}}
            },
        }  # fmt: skip

    def _torchrun(self, config: TrainConfig, name: str, endpoint: str) -> list[str]:
        return [
            "torchrun", f"--nnodes={self.nodes}", f"--nproc-per-node={config.nproc}", "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint}", f"--rdzv-id={_literal(name)}", f"--rdzv-conf={MEETING}",
            f"--max-restarts={self.restarts}", *self._worker(name),
        ]  # fmt: skip

    def _worker(self, name: str) -> list[str]:
        run = PurePosixPath(self.mount) / name
        return ["-m", "gptlab.worker", _literal(str(run)), "--config", f"{CONFIG}/config.json"]

    def _pod(self, container: str, command: list[str], config: TrainConfig, called: str) -> dict[str, Any]:
        return {
            "containers": [
                {"name": container, "image": self.image, "command": command, "env": self._env(),
                 "resources": self._resources(config), "volumeMounts": self._mounts()}
            ],
            "volumes": self._volumes(called),
        }  # fmt: skip

    def _env(self) -> list[dict[str, str]]:
        # The prepared text lies on the volume too, so that it is prepared once.
        values = {**ENVIRONMENT, "PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": str(PurePosixPath(self.mount) / ".cache")}
        return [{"name": name, "value": _literal(value)} for name, value in values.items()]

    def _resources(self, config: TrainConfig) -> dict[str, Any]:
        amounts = {"cpu": str(self.cpus * config.nproc)}
        if self.memory:
            amounts["memory"] = self.memory
        if self.gpus:
            amounts["nvidia.com/gpu"] = str(self.gpus)
        return {"requests": dict(amounts), "limits": dict(amounts)}

    def _mounts(self) -> list[dict[str, Any]]:
        return [
            {"name": "runs", "mountPath": self.mount},
            {"name": "config", "mountPath": CONFIG, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - a mount of the pod's own
        ]

    def _volumes(self, called: str) -> list[dict[str, Any]]:
        return [
            {"name": "runs", "persistentVolumeClaim": {"claimName": self.claim or called}},
            {"name": "config", "configMap": {"name": called}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL and gloo want more than a pod's 64 MB
        ]


def label(name: str) -> str:
    """A run's name as Kubernetes takes names (RFC 1123, and short enough for what operators append)."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    if plain == name and plain[0].isalpha():
        return plain
    return f"run-{plain}-{hashlib.sha256(name.encode()).hexdigest()[:6]}".replace("--", "-")


def _literal(text: str) -> str:
    """A text in which Kubernetes shall see no variable of its own: `$(X)` is written `$$(X)`."""
    return text.replace("$(", "$$(")
