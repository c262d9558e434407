"""The archives: what is in them, and that the wheel works in an environment and a folder without a clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from gptlab import __version__

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it, of a copy: setuptools leaves its work beside the sources."""
    clone = tmp_path_factory.mktemp("clone")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    shutil.copytree(ROOT / "gptlab", clone / "gptlab", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(clone / "dist"), str(clone)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (sdist,), (wheel,) = (clone / "dist").glob("*.tar.gz"), (clone / "dist").glob("*.whl")
    return sdist, wheel


def test_both_archives_hold_the_package_whole_and_nothing_else(archives: tuple[Path, Path]) -> None:
    sdist, wheel = archives
    ours = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "gptlab").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"gptlab/native/gpt.cpp", "gptlab/docs/how-it-works.svg", "gptlab/docs/changelog.md"} <= ours
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    info = f"gptlab-{__version__}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == ours
    assert f"{info}licenses/LICENSE" in names
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert ours | {"pyproject.toml", "README.md", "LICENSE"} <= inside


def test_the_wheel_says_what_it_is(archives: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(archives[1]) as file:
        info = f"gptlab-{__version__}.dist-info"
        said = Parser().parsestr(file.read(f"{info}/METADATA").decode())
        points = file.read(f"{info}/entry_points.txt").decode()
    assert (said["Name"], said["Version"], said["License-Expression"]) == ("gptlab", __version__, "MIT")
    assert said["Requires-Python"] == ">=3.11" and "gptlab = gptlab.cli:main" in points
    assert set(said.get_all("Provides-Extra") or []) >= {"lab", "huggingface", "tensorboard", "dlrover", "docs", "test"}
    assert "scaling lab" in str(said.get_payload())


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(archives: tuple[Path, Path], tinytext: Path, tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "env", tmp_path / "some where"
    venv.create(home, with_pip=True)
    elsewhere.mkdir()
    shutil.copy(tinytext, elsewhere / "mytext.txt")
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(home / "bin" / program), *words]
        return subprocess.run(command, cwd=elsewhere, env=environ, capture_output=True, text=True, timeout=1800)

    installed = run("pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(archives[1]))
    assert installed.returncode == 0, installed.stderr
    shape = ("--n-layer=1", "--n-embd=32", "--n-head=2", "--block-size=16", "--global-batch-size=4", "--max-iters=4")
    tiny = [*shape, "--eval-iters=1", "--device=cpu", "--threads=1", "--data=mytext.txt"]
    for words, expected in (
        (["doctor"], "torch"),
        (["train", "--name", "first", *tiny], "finished at step 4"),
        (["sample", "first", "--prompt", "def ", "--max-new-tokens", "4"], "def "),
        (["sweep", "--name", "grid", *tiny, "--n-embd", "16", "32"], "grid-1x2x16: finished"),
        (["report", "grid"], "report.html"),
    ):
        done = run("gptlab", *words)
        assert done.returncode == 0 and expected in done.stdout, (words, done.stdout, done.stderr)
    for words, extra in (
        (["train", "--tensorboard", *tiny], "tensorboard"),
        (["train", "--model", "huggingface", *tiny], "huggingface"),
        (["bench", "train", "tiny", "--against", "transformers"], "huggingface"),
    ):
        done = run("gptlab", *words)
        assert done.returncode == 2 and f"'gptlab[{extra}]'" in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1
    for module, extra in (("gptlab.lab.demo", "lab"), ("gptlab.docs", "docs")):
        done = run("python", "-m", module)
        assert done.returncode == 2 and f"'gptlab[{extra}]'" in done.stderr, done.stderr
    done = run("python", "-c", "import gptlab; print(gptlab.__file__); from gptlab.lab import Lab")
    assert str(home) in done.stdout and done.stderr.splitlines()[-1].endswith("pip install 'gptlab[lab]'.")
