"""The ground: pyproject.toml, constraints.txt and environment.yml agree, and one command sets a machine up."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
CONDA_NAMES = {"pytorch": "torch", "matplotlib-base": "matplotlib"}
"""What conda-forge calls differently from PyPI."""


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def ranges(*extras: str) -> dict[str, str]:
    """Package to version range in pyproject.toml: the core's, and those of some extras."""
    project = pyproject()["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    wanted = [Requirement(text) for texts in lists for text in texts]
    return {canonicalize_name(r.name): str(r.specifier) for r in wanted if r.name != "gptlab"}


def locked() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_the_locked_set_lies_in_the_ranges() -> None:
    versions = locked()
    for name, specifier in ranges("docs", "lab", "test").items():
        assert Requirement(f"{name}{specifier}").specifier.contains(versions[name]), (name, specifier, versions[name])
    assert versions["torch"] == "2.13.0"


def test_the_locked_set_is_whole_and_holds_nothing_else() -> None:
    todo, closure = [Requirement("gptlab[lab,test]")], set[str]()
    visited = set[tuple[str, frozenset[str]]]()
    while todo:
        wanted = todo.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key in visited:
            continue
        visited.add(key)
        closure.add(key[0])
        for text in distribution(wanted.name).requires or []:
            needed = Requirement(text)
            if not needed.marker or any(needed.marker.evaluate({"extra": extra}) for extra in wanted.extras | {""}):
                todo.append(needed)
    # What a GPU build of torch brings is chosen by torch's own exact pins.
    ours = {name for name in closure if not name.startswith(("nvidia-", "cuda-", "triton"))} - {"gptlab"}
    assert not ours - locked().keys()
    if (sys.platform, *sys.version_info[:2]) == ("linux", 3, 11):  # some are for this Python alone
        assert not locked().keys() - ours


def test_conda_users_get_the_same_ranges() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert pip[-1] == "-e .[lab,test]"
    assert "python" + pyproject()["project"]["requires-python"] in conda
    found = {}
    for text in [entry for entry in conda if entry != "pip" and not entry.startswith("python>")] + pip[:-1]:
        requirement = Requirement(text)
        found[canonicalize_name(CONDA_NAMES.get(requirement.name, requirement.name))] = str(requirement.specifier)
    assert found == ranges("lab")


def test_one_python_everywhere() -> None:
    settings = pyproject()
    assert settings["project"]["requires-python"] == ">=3.11"
    assert settings["tool"]["ruff"]["target-version"] == "py311"
    assert settings["tool"]["mypy"]["python_version"] == "3.11"
    assert "version_info < (3, 11)" in (ROOT / "Makefile").read_text()


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """make in a folder, knowing nothing of a make that runs these tests."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=folder, env=env, capture_output=True, text=True)


def dry_run(folder: Path, *arguments: str) -> str:
    """What make would do in a folder that has this Makefile."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    (folder / "notebooks").mkdir(exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", folder / "notebooks" / "01_sweep.ipynb")
    return make(folder, "-n", *arguments).stdout


@pytest.mark.skipif(not shutil.which("make"), reason="no make on this machine")
def test_make_installs_the_locked_set_once(tmp_path: Path) -> None:
    first = dry_run(tmp_path, "test")
    assert "-m venv .venv" in first and "-c constraints.txt -e '.[lab,test]'" in first
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".ready").touch()
    os.utime(tmp_path / ".venv" / ".ready", (2e9, 2e9))
    for target in ("test", "lab", "demo"):
        assert "pip install" not in dry_run(tmp_path, target)


@pytest.mark.skipif(not shutil.which("make"), reason="no make on this machine")
def test_make_test_ends_with_pytest_over_everything(tmp_path: Path) -> None:
    lines = dry_run(tmp_path, "test").splitlines()
    for tool in ("ruff check", "ruff format --check", "mypy", "lint-imports", "nbstripout --verify"):
        assert any(f".venv/bin/{tool}" in line for line in lines), tool
    assert "pytest" in lines[-1] and "--nbval-lax" in lines[-1]
    assert "tests notebooks/01_sweep.ipynb" in lines[-1]


@pytest.mark.skipif(not shutil.which("make"), reason="no make on this machine")
def test_make_says_in_one_sentence_that_python_is_missing(tmp_path: Path) -> None:
    dry_run(tmp_path, "test")
    shutil.rmtree(tmp_path / ".venv", ignore_errors=True)
    done = make(tmp_path, "PYTHON=", "demo")
    assert done.returncode != 0 and "Python 3.11 or newer" in done.stderr


@pytest.mark.skipif(not shutil.which("make"), reason="no make on this machine")
def test_lab_opens_the_first_notebook_on_loopback_with_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    line = dry_run(tmp_path, "lab").splitlines()[-1]
    assert "--ip=127.0.0.1" in line and "notebooks/01_sweep.ipynb" in line and "token" not in line
    if sys.platform == "linux":
        assert "--no-browser" in line
        assert "--no-browser" not in dry_run(tmp_path, "lab", "DISPLAY=:0")


def test_continuous_integration_runs_the_same_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("exec make test")


def test_commit_hooks_run_tools_that_make_test_runs() -> None:
    hooks = [
        hook
        for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
        for hook in repo["hooks"]
    ]
    makefile = (ROOT / "Makefile").read_text()
    for hook in hooks:
        assert hook["language"] == "system", hook["id"]
        tool = hook["entry"].removeprefix(".venv/bin/").split(" --force-exclude")[0]
        assert re.search(rf"\$\(BIN\)/{tool}\b", makefile), tool


def test_the_licence_is_mit() -> None:
    assert (ROOT / "LICENSE").read_text().startswith("MIT License")
    assert pyproject()["project"]["license"] == "MIT"
