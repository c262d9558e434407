"""What is optional is missed in one sentence that names the extra, before anything is made."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from gptlab.cli import main
from gptlab.config import ConfigError
from gptlab.launcher.engines import Dlrover

ROOT = Path(__file__).parent.parent


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """As if a package were not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize(
    ("package", "line", "extra"),
    [
        ("transformers", "train --model huggingface --data {text} --max-iters 1", "huggingface"),
        ("transformers", "bench train tiny --against transformers", "huggingface"),
        ("transformers", "bench generate tiny --against transformers", "huggingface"),
        ("tensorboard", "train --tensorboard --data {text} --max-iters 1", "tensorboard"),
    ],
)
def test_a_command_names_the_extra_that_it_misses(
    package: str, line: str, extra: str, tinytext: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    without(monkeypatch, package)
    assert main(line.format(text=tinytext).split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and f"pip install 'gptlab[{extra}]'" in err, (out, err)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["Lab", "ConfigPanel", "RunsView"])
def test_the_widgets_name_theirs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from gptlab import lab

    without(monkeypatch, "ipywidgets")
    with pytest.raises(ImportError, match=r"pip install 'gptlab\[lab\]'"):
        getattr(lab, name)


def test_the_demo_names_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from gptlab.lab import demo

    without(monkeypatch, "nbclient")
    assert demo.main() == 2
    assert capsys.readouterr().err.strip() == "The demo needs the lab's packages: pip install 'gptlab[lab]'."


def test_dlrover_is_named_with_its_environment(tinytext: Path) -> None:
    from gptlab.config import TrainConfig

    with pytest.raises(ConfigError, match=r"pip install 'gptlab\[dlrover\]' in an environment of its own"):
        Dlrover().check(TrainConfig(data=str(tinytext)))


def test_every_extra_that_a_sentence_names_is_one() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        extra
        for path in (*(ROOT / "gptlab").rglob("*.py"), ROOT / "README.md")
        for extra in re.findall(r"gptlab\[(\w+)\]", path.read_text())
    }
    assert named and named <= set(extras)
