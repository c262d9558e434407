"""Manifests: every field is one that its kind knows, what the user wrote stays data, the worker understands them."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kinds
import pytest
import yaml

import gptlab
from gptlab import joining
from gptlab.cli import main
from gptlab.config import ConfigError, TrainConfig
from gptlab.launcher.engines import Kubernetes
from gptlab.launcher.engines.kubernetes import label
from gptlab.runs import Run

KINDS = ("trainjob", "pytorchjob", "elasticjob")
ODD = '/runs/$(HOME)/it\'s: "a"\n--- {text}\t# $USER `id`.txt'


def engine(kind: str, **changes: Any) -> Kubernetes:
    values: dict[str, Any] = {
        "kind": kind,
        "image": "me/gptlab:1",
        "nodes": "2",
        "memory": "16Gi",
        "gpus": 2,
        "cpus": 4,
    }
    return Kubernetes(**(values | changes))


def small(**changes: Any) -> TrainConfig:
    return TrainConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, global_batch_size=8, nproc=2, **changes)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each field of a document is, but for those that hold words of the user's own choice."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if path[-1:] not in (("data",), ("requests",), ("limits",)):
                yield (*path, key)
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*path, index))


def inside(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [{}, {"claim": "shared", "namespace": "lab", "gpus": 0, "memory": ""}])
def test_every_field_is_known_and_none_may_be_misspelt_or_mistyped(kind: str, more: dict[str, Any]) -> None:
    documents = list(yaml.safe_load_all(engine(kind, **more).text(small(), "first")))
    assert [document["kind"] for document in documents][-1].lower() == kind
    for document in documents:
        kinds.check(document)
        for path in places(document):
            if path[0] in ("apiVersion", "kind"):
                continue
            misspelt = copy.deepcopy(document)
            parent = inside(misspelt, path[:-1])
            parent[path[-1] + "x"] = parent.pop(path[-1])
            with pytest.raises(ValueError):
                kinds.check(misspelt)
            mistyped = copy.deepcopy(document)
            parent = inside(mistyped, path[:-1])
            parent[path[-1]] = {"a": ["dictionary"]} if not isinstance(parent[path[-1]], dict) else "a text"
            with pytest.raises(ValueError):
                kinds.check(mistyped)


def test_an_elastic_pytorchjob_has_its_range_and_texts_where_numbers_would_be_refused() -> None:
    job = engine("pytorchjob", nodes="1:4").documents(small(), "first")[-1]
    kinds.check(job)
    assert job["spec"]["nprocPerNode"] == "2"  # v1's type is a string
    policy = job["spec"]["elasticPolicy"]
    assert (policy["minReplicas"], policy["maxReplicas"], policy["rdzvBackend"]) == (1, 4, "c10d")
    with pytest.raises(ConfigError, match="fixed number"):
        engine("trainjob", nodes="1:4")


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_user_wrote_is_data(kind: str) -> None:
    config = small(data=ODD)
    made = engine(kind, mount="/$(HOME) 'x", image="me/gptlab:$(TAG)")
    documents = list(yaml.safe_load_all(made.text(config, "first")))
    assert json.loads(documents[0]["data"]["config.json"])["data"] == ODD
    for document in documents:
        kinds.check(document)
    text = json.dumps(documents[-1])
    words = text[text.index("gptlab.worker") :]
    assert "/$$(HOME) 'x/first" in words  # Kubernetes writes $$( as $( and looks for no variable
    assert "sh" not in json.loads(text)["spec"].get("trainer", {}).get("command", ["torchrun"])


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_meet_where_a_restart_finds_them(kind: str) -> None:
    text = json.dumps(engine(kind).documents(small(), "first")[-1])
    if kind == "elasticjob":
        assert '"dlrover-run", "--nnodes=2"' in text and '"restartCount": 3' in text
    else:
        assert "--rdzv-backend=c10d" in text and "--rdzv-endpoint=$(PET_" in text and "--max-restarts=3" in text
    assert '{"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"}' in text


def test_the_worker_makes_the_run_of_a_manifest(tinytext: Path, tmp_path: Path) -> None:
    config = small(data="/runs/tiny.txt", max_iters=2, eval_iters=1, device="cpu", dtype="float32", threads=1)
    config_map, _, job = engine("trainjob").documents(config, "first")
    command = job["spec"]["trainer"]["command"]
    mounted = tmp_path / "config.json"  # what the pod finds at /etc/gptlab, with the text's place on the volume
    mounted.write_text(config_map["data"]["config.json"].replace("/runs/tiny.txt", str(tinytext)))
    words = command[command.index("-m") :]
    words = [str(mounted) if word.endswith("config.json") else word.replace("/runs", str(tmp_path)) for word in words]
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environ = os.environ | rank | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, *words], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "first")
    assert run.config.replace(data="x") == config.replace(data="x", vocab_size=257)
    assert (run.result() or {})["status"] == "finished"
    joining.ensure_run(run.path, mounted, joining.Spot(0, 1, 0, 1))  # a pod that comes again finds it
    mounted.write_text(json.dumps(run.config.replace(n_embd=64).to_dict()))
    with pytest.raises(ConfigError, match="n_embd 32"):
        joining.ensure_run(run.path, mounted, joining.Spot(0, 1, 0, 1))


def test_the_command_writes_and_names_kubectl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--engine", "kubernetes", "--kind", "pytorchjob", "--image", "me/gptlab:1", "--nodes", "1:2"]
    words += ["--n-layer", "2", "--name", "first", "--runs-dir", str(tmp_path / "my runs")]
    assert main([*words, "--dry-run"]) == 0
    assert not (tmp_path / "my runs").exists()
    shown = list(yaml.safe_load_all(capsys.readouterr().out))
    assert main(words) == 0
    path = tmp_path / "my runs" / "first.pytorchjob.yaml"
    assert f"kubectl apply -f '{path}'" in capsys.readouterr().out
    assert list(yaml.safe_load_all(path.read_text())) == shown


def test_gptlab_launch_writes_too(tmp_path: Path) -> None:
    made = gptlab.launch(small(), name="first", runs_dir=tmp_path, engine=engine("trainjob"))
    assert made.path.read_text() == made.text and made.command.startswith("kubectl apply -f ")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"image": ""}, "image"), ({"memory": "16 GB"}, "memory"), ({"nodes": "two"}, "nodes"),
        ({"nodes": "3:2"}, "nodes"), ({"claim": "Mine"}, "claim"), ({"mount": "runs"}, "mount"),
        ({"kind": "job"}, "kind"), ({"gpus": -1}, "gpus"),
    ],
)  # fmt: skip
def test_mistakes_are_named(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        engine(**({"kind": "trainjob"} | changes))


def test_what_pods_cannot_see_is_refused(tinytext: Path, tmp_path: Path) -> None:
    for data in (str(tinytext), "mine.txt"):
        with pytest.raises(ConfigError, match="pods cannot see it"):
            engine("trainjob").write(small(data=data), "first", tmp_path)
    with pytest.raises(ConfigError, match="global_batch_size 8"):
        engine("trainjob", nodes="5").write(small(), "first", tmp_path)
    assert not list(tmp_path.glob("*.yaml"))


def test_names_are_kubernetes_own_and_stay_apart() -> None:
    names = ["first", "First", "a b", "a-b", "a+b", "1x2", "ä" * 90, "x" * 100]
    labels = [label(name) for name in names]
    assert len(set(labels)) == len(names) and labels[0] == "first"
    for found in labels:
        kinds.ObjectMeta(name=found)
