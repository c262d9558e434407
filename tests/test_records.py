"""Run directories as others leave them: whatever is in their files, readers answer, and other runs are shown."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from labtools import made_run

from gptlab.cli import main
from gptlab.config import ConfigError
from gptlab.jsonfile import write_json
from gptlab.lab import report, tables, tiles
from gptlab.lab.curves import describe, read
from gptlab.lab.gathering import Gatherer
from gptlab.records import _AMOUNTS, _COUNTS, _LOSSES, _OBJECTS, _WORDS, sound
from gptlab.runs import Run, list_runs
from gptlab.watching import live_table

NAMES = (*_WORDS, *_OBJECTS, *_COUNTS, *_AMOUNTS, *_LOSSES, "pids", "unknown")
PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([10**400, 1e308])
)
ANYTHING = st.recursive(
    PLAIN, lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inside, max_size=4)
)
RECORD = st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=8)
FILES = ("run.json", "status.json", "result.json", "lock", "attempts/01/attempt.json", "attempts/01/error.json",
         "attempts/01/rank-0.json", "attempts/01/paused.json", "attempts/01/pipeline.json")  # fmt: skip


def look(folder: Path) -> None:
    """Everything that reads runs, at a folder with a good one and a spoilt one."""
    rows = tables.run_rows(list_runs(folder))
    assert {row["name"] for row in rows} == {"good", "spoilt"}
    assert "good" in tables.table(tables.ordered(rows, "val_loss"), {}, names=True)
    tables.progress(rows, running=True)
    live_table(rows, {})
    rows, series, _ = Gatherer().gather(folder, None)
    describe(series)
    run = Run(folder / "spoilt")
    tiles.tiles(run, run.status())
    tiles.attempts(run.attempts_table())
    run.why(), run.log(), run.frame(), run.step(), run.tokens()
    with contextlib.suppress(ConfigError):
        describe([read(run)])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs; the tests spoil one of them, over and over."""
    folder = tmp_path_factory.mktemp("runs")
    made_run(folder, "good", 3)
    shutil.copytree(made_run(folder, "spoilt", 3).path, folder.parent / f"{folder.name}-whole")
    return folder


def restored(pair: Path) -> Path:
    shutil.rmtree(pair / "spoilt")
    shutil.copytree(pair.parent / f"{pair.name}-whole", pair / "spoilt")
    return pair / "spoilt"


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), entries=RECORD)
def test_whatever_a_record_says_readers_answer(pair: Path, name: str, entries: dict[str, Any]) -> None:
    path = restored(pair) / name
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | entries))
    look(pair)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, ANYTHING)) | ANYTHING, max_size=5))
@example(rows=[{"val_loss": 10**400}])
def test_whatever_rows_say_readers_answer(pair: Path, rows: list[Any]) -> None:
    with open(restored(pair) / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    look(pair)


@pytest.mark.parametrize("name", [*FILES, "metrics.jsonl"])
@pytest.mark.parametrize(
    "content", [b"", b'{"a": 1', b"\0" * 50, b"[1]", b"[" * 100_000, b"\xff\xfe", b'{"step": ' + b"9" * 5000 + b"}"]
)
def test_whatever_a_file_holds_readers_answer(pair: Path, name: str, content: bytes) -> None:
    (restored(pair) / name).write_bytes(content)
    look(pair)


@pytest.mark.parametrize("name", [*FILES, "metrics.jsonl"])
def test_pipes_and_folders_in_place_of_files_are_passed_over(pair: Path, name: str) -> None:
    for make in (os.mkfifo, os.mkdir):
        path = restored(pair) / name
        path.unlink(missing_ok=True)
        make(path)
        look(pair)


def test_folders_that_only_look_like_attempts_are_none(pair: Path) -> None:
    for name in ("1x", "0²", "99999999999999999999999"):
        (restored(pair) / "attempts" / name).mkdir()
        look(pair)


def test_sound_keeps_what_is_as_it_should_be() -> None:
    row = {"step": 3, "loss": float("inf"), "val_loss": 2, "mfu": 0.5, "unknown": [1], "pids": [1], "rank": None}
    assert sound(row) == row
    wrong = {"step": True, "loss": "2", "mfu": float("nan"), "time_s": 1e308, "attempt": -1, "config": [], "name": 3}
    assert sound(wrong) == {}


def test_the_command_lists_all_and_says_why_one_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPTLAB_RUNS", str(tmp_path))
    made_run(tmp_path, "good", 3)
    old = made_run(tmp_path, "old", 3)
    info = json.loads((old.path / "run.json").read_text())
    write_json(old.path / "run.json", info | {"config": info["config"] | {"n_hade": 3}, "gptlab": "0.0.1"})
    made_run(tmp_path, "spoilt", 3)
    (tmp_path / "spoilt" / "run.json").write_text('{"config"')
    assert main(["runs", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["good"]["step"] == 3 and "n_hade" in rows["old"]["reason"] and "0.0.1" in rows["old"]["reason"]
    assert "run.json" in rows["spoilt"]["reason"]
    assert main(["runs"]) == 0 and main(["runs", "show", "spoilt"]) == 0
    capsys.readouterr()
    for line in ("sample old", "eval spoilt", "train --resume spoilt", "report spoilt", "sample spoilt"):
        assert main(line.split()) == 2
        out, err = capsys.readouterr()
        assert len(err.splitlines()) == 1 and out == "", (line, err)
    assert report.write([Run(tmp_path / "good")], tmp_path / "r.html").exists()
