"""Texts with odd names and in odd places: found and prepared, or refused in a sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gptlab.config import ConfigError
from gptlab.corpus import check, find, list_corpora, prepare

TEXT = "to be or not to be " * 100


@pytest.fixture(autouse=True)
def own_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """./data is searched, so tests run where there is none."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.mark.parametrize(
    "name",
    ["漢" * 80, "😀" * 60, "é" * 120, "x" * 250, "a b", "new\nline", "%d", "'q'", "$(id)", "[red]", "\udcff\udcfe"],
    ids=ascii,
)  # fmt: skip
def test_names_are_cut_by_bytes(name: str) -> None:
    path = Path(f"{name}.txt")
    path.write_text(TEXT)
    made = prepare(str(path), "byte")
    assert find(str(path), "byte") == made and len(os.fsencode(made.path.name)) <= 120
    assert [corpus.path for corpus in list_corpora()] == [made.path]


def test_links_that_lead_nowhere_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXT)
    (folder / "itself").symlink_to("itself")
    (folder / "nowhere").symlink_to("none")
    os.mkfifo(folder / "pipe")
    assert prepare(str(folder), "byte").meta["source"]["documents"] == 1
    with pytest.raises(ConfigError):
        check(str(folder / "itself"), "byte", 8)


@pytest.mark.parametrize("out", ["x" * 300, "a\0b", "~no-such-user/a", "/proc/none", "/dev/null"])
def test_outs_that_cannot_be_are_refused(out: str) -> None:
    Path("a.txt").write_text(TEXT)
    with pytest.raises(ConfigError) as caught:
        prepare("a.txt", "byte", out=Path(out))
    assert "\n" not in str(caught.value) and sorted(path.name for path in Path().iterdir()) == ["a.txt"]
