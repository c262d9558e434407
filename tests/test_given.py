"""Files that a user names: what cannot be read or written is refused before any work, and nothing hangs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gptlab.config import ConfigError
from gptlab.csvfile import read_rows, write_csv
from gptlab.foreign import import_log
from gptlab.given import check_input, check_output, read_object
from gptlab.jsonfile import read_json, replacing, write_json


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """What waits on a pipe is ended."""

    def ended(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, ended)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty one."""
    made = tmp_path / "empty"
    made.mkdir()
    return made


def circle(path: Path) -> None:
    path.symlink_to(path.name)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to itself": circle,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "nothing": lambda path: None,
}
READERS: dict[str, Callable[[Path], object]] = {
    "input": lambda path: check_input(path, "a file"),
    "object": lambda path: read_object(path, "a config"),
    "table": read_rows,
    "log": lambda path: import_log(path, name="log", runs_dir=path.parent / "runs"),
}


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_and_not_waited_for(kind: str, reader: str, tmp_path: Path) -> None:
    path = tmp_path / "given"
    NO_FILES[kind](path)
    with pytest.raises(ConfigError) as caught:
        READERS[reader](path)
    assert "\n" not in str(caught.value) and "given" in str(caught.value) and str(caught.value).endswith(".")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("kind", NO_FILES)
def test_records_that_are_no_files_count_as_absent(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    NO_FILES[kind](path)
    assert read_json(path) is None


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "x" * 4000 + "/y"])
def test_names_that_no_file_can_have_are_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    for use in (*READERS.values(), lambda path: check_output(path, "--out")):
        with pytest.raises(ConfigError):
            use(tmp_path / name)


@pytest.mark.parametrize(
    "content",
    [b"", b"[1]", b'"x"', b"{", b"[" * 100_000, b"\xff\xfe{", b"\0", b'{"a": ' + b"9" * 5000 + b"}", b" " * 10_000_001],
    ids=["empty", "list", "word", "half", "deep", "utf-16", "zero", "digits", "long"],
)
def test_what_is_no_json_object_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        read_object(path, "a config")
    assert "\n" not in str(caught.value)


def test_an_output_is_tried_before_the_work_and_nothing_is_left(folder: Path) -> None:
    check_output(folder / "new.json", "--out")
    check_output(folder / "far" / "off" / "new.csv", "--output", endings=(".csv",), makes_folder=True)
    for path, said in (
        (folder, "is a folder"),
        (folder / "far" / "new.json", "no folder to lie in"),
        (Path("/proc/new.json"), "cannot be written"),
        (Path("/dev/null"), "no regular file"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_output(path, "--out")
    with pytest.raises(ConfigError, match=r"use \.png or \.svg"):
        check_output(folder / "a.xyz", "--plot", endings=(".png", ".svg"))
    assert list(folder.iterdir()) == []


def test_a_file_is_replaced_whole_or_stays_and_nothing_lies_beside_it(folder: Path) -> None:
    path = folder / "status.json"
    write_json(path, {"state": "old"})
    with pytest.raises(TypeError):
        write_json(path, {"state": object()})  # fails amid the writing, as a full disk does
    with pytest.raises(OSError), replacing(path) as beside:
        beside.write_text("half")
        raise OSError(28, "No space left on device")
    assert read_json(path) == {"state": "old"} and list(folder.iterdir()) == [path]
    inner = folder / "inner"
    inner.mkdir()
    with pytest.raises(OSError):
        write_csv(inner, ["a"], [])
    assert sorted(folder.iterdir()) == [inner, path]


def test_ragged_tables_are_read_by_their_names(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2,3,4\n5\n")
    assert read_rows(path) == [{"a": "1", "b": "2"}, {"a": "5", "b": ""}]
    path.write_bytes(b"a,b\n" + b"9" * 200_000 + b",1\n")
    with pytest.raises(ConfigError, match="no CSV file"):
        read_rows(path)
