"""What the README and the pages show is run, or at the least read by the command that it is meant for."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gptlab
from gptlab import docs
from gptlab.cli import COMMANDS, main
from gptlab.flags import Parser
from gptlab.runs import Run, list_runs

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "data" / "README.md", *sorted((ROOT / "gptlab" / "docs").glob("*.md"))]
SHAPE = ["--n-layer", "1", "--n-head", "2", "--n-embd", "32"]
TINY = (
    "--block-size=16 --global-batch-size=4 --micro-batch-size=2 --max-iters=4 --eval-iters=1 --device=cpu",
    "--dtype=float32 --kernels=torch --threads=1",
)
PRELUDE = """
import gptlab, gptlab.presets
whole = gptlab.presets.preset
def small(name, **changes):
    tiny = {"block_size": 16, "global_batch_size": 4, "eval_iters": 1, "threads": 1, "kernels": "torch"}
    return whole(name, **changes | tiny | ({"max_iters": 4, "data": "mytext.txt"} if "data" in changes else {}))
gptlab.preset = gptlab.presets.preset = small
"""
"""Before the pages' own code: the same calls with models and texts that take no time."""


def blocks(path: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each code block: fenced, or indented by four spaces after an empty line."""
    language, held, indented, before = None, list[str](), list[str](), ""
    for line in [*path.read_text().splitlines(), ""]:
        if line.startswith("```"):
            if language is not None:
                yield language, "\n".join(held)
            language, held = (line[3:], []) if language is None else (None, [])
        elif language is not None:
            held.append(line)
        elif line.startswith("    ") and (indented or not before):
            indented.append(line[4:])
        elif indented:
            yield "", "\n".join(indented)
            indented = []
        before = line.strip()


def commands(path: Path) -> list[str]:
    """Every `gptlab ...` line of a page, in blocks and in sentences."""
    inline = re.findall(r"`(gptlab [^`]+)`", re.sub(r"\s*\n\s*", " ", path.read_text()))
    shown = [line for _, text in blocks(path) for line in text.splitlines() if line.startswith("gptlab ")]
    return [line for line in (*shown, *inline) if line != "gptlab ..."]


def is_read(line: str) -> bool:
    """Whether a line's command knows its flags; ConfigError where it does not. A command's mere name is its mention."""
    _, name, *words = shlex.split(line.replace(" ...", ""), comments=True)
    if name == "--version" or words in ([], ["--help"]):
        return name in (*COMMANDS, "--version")
    text, build = COMMANDS[name]
    parser = Parser(f"gptlab {name}", text)
    build(parser)
    return bool(parser.parse(words))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_is_of_a_kind_that_is_tried(path: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for language, text in blocks(path):
        if language == "python":
            compile(text, str(path), "exec")  # and run, below
            continue
        first = text.split()[0]
        assert first in ("gptlab", "make", "python") or "iter 10:" in text or "    " in text or first.startswith("{"), (
            text
        )
        for line in text.splitlines():
            if line.startswith("python -m "):
                assert importlib.util.find_spec(line.split()[2]), line
            if line.startswith("make "):
                words = line.partition("#")[0].split()[1:]
                assert {word for word in words if "=" not in word} <= targets, line
    for line in commands(path):
        assert is_read(line), line


def test_links_lead_somewhere() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
            if target.startswith("#"):
                assert re.search(rf"^#+ {target[1:]}$", path.read_text(), re.M | re.I), (path, target)
            else:
                assert target.startswith("https://") or (path.parent / target).exists(), (path, target)


@pytest.mark.parametrize("name", [pytest.param("README.md", marks=pytest.mark.slow), "gptlab/docs/how-it-works.md"])
def test_python_is_run_from_top_to_bottom(name: str, tinytext: Path, tmp_path: Path) -> None:
    (tmp_path / "mytext.txt").write_text(tinytext.read_text())
    code = PRELUDE + "\n".join(text for language, text in blocks(ROOT / name) if language == "python")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    states = [run.state for run in list_runs()]
    assert states and set(states) == {"finished"}


@pytest.mark.slow
def test_the_readmes_commands_do_what_it_says(
    tinytext: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mytext.txt").write_text(tinytext.read_text())
    monkeypatch.setenv("GPTLAB_RUNS", "runs")
    ((_, text),) = [block for block in blocks(ROOT / "README.md") if block[1].startswith("gptlab train --data")]
    done = set()
    for line in text.splitlines():
        _, name, *words = shlex.split(line, comments=True)
        if name in ("bench", "data"):  # minutes, and a network: their flags were parsed above
            continue
        if "--resume" in words:  # "after a stop, a crash": it was lost before its last word
            (Run.open(words[1]).path / "result.json").unlink()
        elif name in ("train", "sweep"):  # a study of equal compute is as it stands: a smaller one determines no law
            words += () if "--isoflops" in words else [*" ".join(TINY).split(), *(SHAPE if name == "train" else ())]
            words += () if "--data" in words else ("--data", "mytext.txt")
        if name == "sample":
            words += ["--max-new-tokens", "4"]
        assert main([name, *words]) == 0, line
        done.add(name)
    assert done == {"train", "sample", "eval", "sweep", "runs", "cost", "fit", "report", "doctor"}
    out = capsys.readouterr().out
    assert "To be" in out and (tmp_path / "report.html").stat().st_size > 1000
    line = next(text for _, text in blocks(ROOT / "README.md") if text.startswith("iter 10:"))
    assert pattern(line) in {pattern(said) for said in out.splitlines()}
    (tree,) = [text for _, text in blocks(ROOT / "README.md") if text.startswith("runs/NAME/")]
    for row in tree.splitlines()[1:]:
        name = row.split()[0].rstrip("/").replace("attempts/NN", "attempts/01")
        assert (tmp_path / "runs" / "mine" / name).exists(), row


def pattern(line: str) -> str:
    """A printed line without its numbers."""
    return re.sub(r"[\d.]+(e[+-]\d+)?", "#", line).rstrip("#")


def test_the_readmes_size_of_gpt2_is_what_the_command_counts(capsys: pytest.CaptureFixture[str]) -> None:
    rows = re.findall(r"\| `([\w-]+)` \| ([\d,]+) \|", (ROOT / "gptlab" / "docs" / "figures.md").read_text())
    assert len(rows) == 4
    for name, count in rows:
        assert main(["cost", "--preset", name]) == 0
        assert count in capsys.readouterr().out


def test_the_changelog_names_this_version() -> None:
    from gptlab import __version__

    text = (ROOT / "gptlab" / "docs" / "changelog.md").read_text()
    assert re.search(rf"^## \[{re.escape(__version__)}\] - (unreleased|\d{{4}}-\d\d-\d\d)$", text, re.M)


def test_every_page_is_part_of_the_reference() -> None:
    included = re.findall(r"^\.\. include:: (\S+)$", docs.__doc__ or "", re.M)
    assert sorted(included) == sorted(path.name for path in (ROOT / "gptlab" / "docs").glob("*.md"))


def test_the_reference_shows_the_pages_and_a_warning_fails_it(tmp_path: Path) -> None:
    # In a process of its own: what packages load late is loaded for it.
    command = [sys.executable, "-m", "gptlab.docs", str(tmp_path), "gptlab.docs"]
    done = subprocess.run([*command, "gptlab.none"], capture_output=True, text=True)
    assert done.returncode == 1 and "Cannot find spec for gptlab.none" in done.stderr, done.stderr
    page = (tmp_path / "gptlab" / "docs.html").read_text()
    assert 'src="data:image/svg+xml;base64,' in page and "How it works</h1>" in page and "124,439,808" in page


@pytest.mark.slow
def test_make_docs_builds_the_whole_reference_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "gptlab.docs", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "gptlab.html").read_text()
    assert all(f'id="{name}"' in text for name in gptlab.__all__)
    modules = {info.name for info in pkgutil.walk_packages(gptlab.__path__, "gptlab.")}
    written = {".".join(path.relative_to(tmp_path).with_suffix("").parts) for path in tmp_path.rglob("*.html")}
    assert {name for name in modules if not name.endswith("__main__")} <= written
