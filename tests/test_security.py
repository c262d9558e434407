"""Nothing that a user did not ask for: no code from data, no line break into a script, no secret into a record."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import gptlab
from gptlab.config import ConfigError, TrainConfig
from gptlab.launcher.engines import Kubernetes, Slurm

ROOT = Path(__file__).parent.parent
PLANTED = "hunter2-in-the-environment"


def tiny(text: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 16, "global_batch_size": 4, "max_iters": 2,
        "eval_iters": 1, "device": "cpu", "dtype": "float32", "kernels": "torch", "threads": 1, "data": str(text),
    }  # fmt: skip
    return TrainConfig(**(values | changes))


def calls() -> Iterator[tuple[str, str, dict[str, ast.expr]]]:
    """File, called name and keywords of every call in the package."""
    for path in sorted((ROOT / "gptlab").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                keywords = {word.arg: word.value for word in node.keywords if word.arg}
                yield f"{path.relative_to(ROOT)}:{node.lineno}", ast.unparse(node.func), keywords


def test_no_call_can_run_what_a_file_holds() -> None:
    # ruff's S rules refuse eval, shells, pickle and unsafe YAML; what they do not know stands here.
    loads = 0
    for place, name, keywords in calls():
        if name == "torch.load":
            assert ast.unparse(keywords["weights_only"]) == "True", place
            loads += 1
        assert "allow_pickle" not in keywords and "trust_remote_code" not in keywords, place
        assert name.rpartition(".")[2] not in ("read_pickle", "unpickle", "Unpickler"), place
    assert loads  # or the look is blind


def test_the_security_rules_are_on_and_each_exception_has_its_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert '"S"' in text.partition("[tool.ruff.lint]")[2].partition("]")[0]
    for line in text.splitlines():
        if line.strip().startswith('"S') and line.strip().endswith('",'):
            pytest.fail(f"no reason beside {line.strip()}")
    for path in (ROOT / "gptlab").rglob("*.py"):
        for line in path.read_text().splitlines():
            if re.search(r"noqa: S\d", line):
                assert " - " in line.partition("noqa:")[2], line


@pytest.mark.parametrize("odd", ["two\nlines", "two\r#SBATCH --uid=0", "two\x85lines"])
def test_a_folder_cannot_add_a_line_to_a_script(odd: str, tinytext: Path, tmp_path: Path) -> None:
    for made in (
        lambda: gptlab.launch(tiny(tinytext), name="far", runs_dir=tmp_path / odd, engine=Slurm()),
        lambda: gptlab.sweep(tiny(tinytext), {"n_layer": [1]}, name="s", runs_dir=tmp_path / odd, engine=Slurm()),
        lambda: Slurm().script("s", 1, [tmp_path / odd / "r"], tmp_path, tmp_path / odd / "%a.log"),
    ):
        with pytest.raises(ConfigError, match="line break"):
            made()
    assert not list(tmp_path.glob("two*"))


@pytest.mark.parametrize(
    "odd", ["it's", 'a "b"', "$(touch x)", "`id`", "a b", "a\nb: c", "- x", "#x", "{{x}}", "é漢字", "!!x"]
)
def test_texts_and_folders_of_any_name_reach_scripts_and_manifests_whole(
    odd: str, tinytext: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / odd
    folder.mkdir()
    text = folder / "text.txt"
    text.write_text(tinytext.read_text())
    engine = Kubernetes(image=f"me/{odd}", mount=f"/{odd}")
    (config_map, *_, job) = yaml.safe_load_all(engine.text(tiny(text), "first"))
    assert json.loads(config_map["data"]["config.json"])["data"] == str(text)
    assert job["spec"]["trainer"]["image"] == f"me/{odd}"
    assert f"/{odd}/first".replace("$(", "$$(") in job["spec"]["trainer"]["command"]
    # A script's shell gets the folder and the runs as they are, a line break in the folder included.
    stub = folder / "python"
    stub.write_text('#!/bin/bash\npwd\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    script = Slurm().script("first", 1, [folder / "first"], folder, tmp_path / "engine.log")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd="/")
    assert done.stdout == f"{folder}\n-m\ngptlab.launcher.engines.batch\n{folder / 'first'}\n", done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["python", "text.txt"]


def holders(folder: Path) -> list[Path]:
    """Files with the secret in them."""
    return [path for path in folder.rglob("*") if path.is_file() and PLANTED.encode() in path.read_bytes()]


@pytest.mark.slow
def test_no_secret_of_the_environment_is_written_down(tinytext: Path, tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
import gptlab
from gptlab.cli import main
from gptlab.launcher import client
from gptlab.launcher.engines import Slurm
from gptlab.recording import Claim, create_run

config = gptlab.TrainConfig(**{tiny(tinytext).to_dict()!r})
assert gptlab.launch(config, name="done").wait()["status"] == "finished"
assert gptlab.launch(config, name="away", detach=True).wait()["status"] == "finished"
run = create_run(config, "broken", Path("runs").absolute())
handle = client.start(run, Claim(run.path), cwd=Path.cwd(), prepared=True, worker="gptlab:gone")
assert handle.wait()["status"] == "failed"
assert main(["runs", "show", "broken"]) == 0
assert main(["report", "done", "broken", "--out", "report.html"]) == 0
Slurm().plan(gptlab.Run.open("done"))
main(["train", "--engine", "slurm", "--dry-run", "--name", "far", "--data", {str(tinytext)!r}, "--max-iters", "1"])
main(["train", "--engine", "kubernetes", "--image", "me/x", "--name", "pod"])
"""
    environ = {
        **os.environ, "SECRET_TOKEN": PLANTED, "HF_TOKEN": PLANTED, "GPTLAB_RUNS": "runs",
        "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert PLANTED not in done.stdout + done.stderr
    written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert {"run.json", "report.html", "job.sh", "pod.trainjob.yaml", "error.json", "detached.log"} <= written
    assert holders(tmp_path) == []
    (tmp_path / "planted.txt").write_text(PLANTED)
    assert [path.name for path in holders(tmp_path)] == ["planted.txt"]  # the look is not blind
