"""The fields of the Kubernetes kinds that gptlab writes, for a check without a cluster that lets nothing unknown pass.

    check(document)    # raises where a field is unknown, missing or of the wrong type

TrainJob: the types of PyPI's kubeflow-trainer-api. PyTorchJob: kubeflow/training-operator, branch release-1.9,
pkg/apis/kubeflow.org/v1/pytorch_types.go and common_types.go. ElasticJob: intelligent-machine-learning/dlrover,
go/elasticjob/api/v1alpha1/elasticjob_types.go and go/elasticjob/pkg/common/api/v1/types.go. Kubernetes' own kinds, and
the templates of pods within the others: PyPI's kubernetes-validate, strict.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any, Literal

import jsonschema
from kubernetes_validate.utils import schema_contents
from pydantic import BaseModel, ConfigDict, Field
from referencing import Registry, Resource

VERSION = "1.33.0"
"""Of Kubernetes, whose schemas are taken."""


class Kind(BaseModel):
    """A Go struct: unknown fields are refused, and no type is taken for another."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ObjectMeta(Kind):
    name: str = Field(pattern=r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$")
    namespace: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class RdzvConf(Kind):
    key: str
    value: str


class ElasticPolicy(Kind):
    minReplicas: int | None = None
    maxReplicas: int | None = None
    rdzvBackend: Literal["c10d", "etcd", "etcd-v2"] | None = None
    rdzvPort: int | None = None
    rdzvHost: str | None = None
    rdzvId: str | None = None
    rdzvConf: list[RdzvConf] | None = None
    standalone: bool | None = None
    nProcPerNode: int | None = None
    maxRestarts: int | None = None
    metrics: list[dict[str, Any]] | None = None


class SchedulingPolicy(Kind):
    minAvailable: int | None = None
    queue: str | None = None
    minResources: dict[str, str] | None = None
    priorityClass: str | None = None
    scheduleTimeoutSeconds: int | None = None


class RunPolicy(Kind):
    cleanPodPolicy: Literal["", "All", "Running", "None"] | None = None
    ttlSecondsAfterFinished: int | None = None
    activeDeadlineSeconds: int | None = None
    backoffLimit: int | None = None
    schedulingPolicy: SchedulingPolicy | None = None
    suspend: bool | None = None
    managedBy: str | None = None


class PyTorchReplica(Kind):
    replicas: int | None = None
    template: dict[str, Any]
    restartPolicy: Literal["Always", "OnFailure", "Never", "ExitCode"] | None = None


class PyTorchReplicas(Kind):
    Master: PyTorchReplica | None = None
    Worker: PyTorchReplica | None = None


class PyTorchJobSpec(Kind):
    runPolicy: RunPolicy
    elasticPolicy: ElasticPolicy | None = None
    pytorchReplicaSpecs: PyTorchReplicas
    nprocPerNode: str | None = None


class PyTorchJob(Kind):
    apiVersion: Literal["kubeflow.org/v1"]
    kind: Literal["PyTorchJob"]
    metadata: ObjectMeta
    spec: PyTorchJobSpec


class ElasticReplica(Kind):
    replicas: int | None = None
    template: dict[str, Any]
    restartPolicy: Literal["Always", "OnFailure", "Never", "ExitCode"] | None = None
    restartCount: int | None = None
    autoScale: bool | None = None
    restartTimeout: int | None = None
    priority: str | None = None
    BatchScheduler: str | None = None


class ElasticReplicas(Kind):
    worker: ElasticReplica


class ElasticJobSpec(Kind):
    distributionStrategy: Literal["AllreduceStrategy", "ParameterServerStrategy"] | None = None
    resourceLimits: dict[str, str] | None = None
    optimizeMode: Literal["manual", "single-job", "cluster"] | None = None
    brainService: str | None = None
    replicaSpecs: ElasticReplicas
    envs: dict[str, dict[str, Any]] | None = None
    suspend: bool | None = None


class ElasticJob(Kind):
    apiVersion: Literal["elastic.iml.github.io/v1alpha1"]
    kind: Literal["ElasticJob"]
    metadata: ObjectMeta
    spec: ElasticJobSpec


class TrainJob(Kind):
    apiVersion: Literal["trainer.kubeflow.org/v1alpha1"]
    kind: Literal["TrainJob"]
    metadata: ObjectMeta
    spec: dict[str, Any]


def check(document: dict[str, Any]) -> None:
    """Raises ValueError (pydantic's and jsonschema's among them) where a document is not what its kind says."""
    kind = document.get("kind")
    if kind == "TrainJob":
        from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

        TrainJob.model_validate(document)
        known = copy.deepcopy(document)
        with contextlib.suppress(KeyError, TypeError, AttributeError):  # of what is misspelt, to be refused in a moment
            for amounts in known["spec"]["trainer"]["resourcesPerNode"].values():
                amounts.clear()  # their type here is not what YAML has; `core` looks at them below
        read = TrainerV1alpha1TrainJob.model_validate(known).model_dump(by_alias=True, exclude_unset=True)
        same(known, read)  # these types leave out what they do not know
        trainer = document["spec"]["trainer"]
        core({"containers": [{"name": "node", "image": trainer["image"], "command": trainer["command"],
                              "env": trainer["env"], "resources": trainer["resourcesPerNode"]}]})  # fmt: skip
        for patch in document["spec"]["runtimePatches"]:
            for job in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
                core(job["template"]["spec"]["template"]["spec"])
    elif kind == "PyTorchJob":
        job = PyTorchJob.model_validate(document)
        for replica in (job.spec.pytorchReplicaSpecs.Master, job.spec.pytorchReplicaSpecs.Worker):
            if replica is not None:
                template(replica.template)
    elif kind == "ElasticJob":
        template(ElasticJob.model_validate(document).spec.replicaSpecs.worker.template)
    else:
        kubernetes(document)


def same(given: Any, read: Any, path: str = "") -> None:
    """Raises where a field was not read."""
    if isinstance(given, dict) and isinstance(read, dict):
        for key in given:
            if key not in read:
                raise ValueError(f"{path}.{key} is unknown")
            same(given[key], read[key], f"{path}.{key}")
    elif isinstance(given, list) and isinstance(read, list):
        for index, (one, other) in enumerate(zip(given, read, strict=True)):
            same(one, other, f"{path}[{index}]")


def template(value: dict[str, Any]) -> None:
    """A PodTemplateSpec."""
    Template.model_validate(value)
    core(value["spec"])


class Template(Kind):
    metadata: dict[str, Any] | None = None
    spec: dict[str, Any]


def core(pod: dict[str, Any]) -> None:
    """A PodSpec, every field of which Kubernetes must know."""
    kubernetes({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod})


def kubernetes(document: dict[str, Any]) -> None:
    """One of Kubernetes' own kinds."""
    for error in _validator(document["kind"].lower(), document["apiVersion"].replace("/", "-")).iter_errors(document):
        raise ValueError(f"{list(error.path)}: {error.message}")


@functools.cache
def _validator(kind: str, version: str) -> jsonschema.Draft202012Validator:
    """kubernetes-validate's own, kept: it reads a megabyte for each document."""
    folder = f"kubernetes-json-schema/v{VERSION}-local-strict"
    schema = schema_contents(f"{folder}/{kind}-{version}.json", VERSION)
    known = [
        Resource.from_contents(schema),
        Resource.from_contents(schema_contents(f"{folder}/_definitions.json", VERSION)),
    ]
    return jsonschema.Draft202012Validator(schema, registry=known @ Registry())
