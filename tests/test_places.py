"""Disks that are full or read-only, and terminals that take little: a sentence, and nothing half made."""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from labtools import made_run

from gptlab import launcher
from gptlab.cli import main
from gptlab.config import ConfigError, TrainConfig
from gptlab.foreign import import_log
from gptlab.launcher import client
from gptlab.launcher.engines import Torchrun, starting
from gptlab.recording import create_run
from gptlab.runs import Run


class Full(io.TextIOWrapper):
    """A file that opens and takes nothing, as on a full disk."""

    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on every text file that is opened for writing is on a full disk."""
    plain = builtins.open

    def opened(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        made: Any = plain(file, mode, *rest, **more)
        return Full(made.detach()) if set(mode) & set("wax") and "b" not in mode else made

    return lambda: monkeypatch.setattr(builtins, "open", opened)


def test_a_full_disk_leaves_nothing_half_made(full: Callable[[], None], tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    (tmp_path / "old.log").write_text("iter 0: loss 4.2, time 20ms, mfu 1%\n")
    full()
    for make in (
        lambda: create_run(TrainConfig(), "a", folder),
        lambda: import_log(tmp_path / "old.log", name="b", runs_dir=folder),
    ):
        with pytest.raises(ConfigError, match="No space left"):
            make()
    assert list(folder.iterdir()) == []


def test_a_launch_that_the_disk_ends_takes_its_run_away(
    tinytext: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(client, "supervisor", lambda: None)
    monkeypatch.setattr(client, "start", refuse)
    config = TrainConfig(n_layer=1, n_head=1, n_embd=32, block_size=16, data=str(tinytext), device="cpu")
    with pytest.raises(ConfigError, match="No space left"):
        launcher.launch(config, name="a", runs_dir=tmp_path / "runs")
    assert list((tmp_path / "runs").iterdir()) == []
    create_run(config, "b", tmp_path / "runs")
    with pytest.raises(ConfigError, match="No space left"):
        launcher.resume("b", runs_dir=tmp_path / "runs")
    assert (tmp_path / "runs" / "b" / "run.json").exists()


def test_an_engine_on_a_disk_that_takes_nothing_is_a_sentence(
    tinytext: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config = TrainConfig(n_layer=1, n_head=1, n_embd=32, block_size=16, data=str(tinytext), device="cpu")
    runs = tmp_path / "runs"
    with monkeypatch.context() as patch:
        patch.setattr(starting, "write_json", refuse)
        with pytest.raises(ConfigError, match="No space left"):
            launcher.launch(config, name="a", runs_dir=runs, engine=Torchrun())
    assert list(runs.iterdir()) == []
    monkeypatch.setattr(Torchrun, "start", refuse)
    for start in (
        lambda: launcher.launch(config, name="b", runs_dir=runs, engine=Torchrun()),
        lambda: launcher.resume("b", runs_dir=runs, engine=Torchrun()),
    ):
        with pytest.raises(ConfigError, match=r"b cannot be written \(No space left"):
            start()


def test_a_launch_where_files_cannot_be_locked_takes_its_run_away(
    tinytext: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(client, "supervisor", lambda: None)
    monkeypatch.setattr(fcntl, "flock", refuse)
    config = TrainConfig(n_layer=1, n_head=1, n_embd=32, block_size=16, data=str(tinytext), device="cpu")
    with pytest.raises(ConfigError, match="cannot be locked"):
        launcher.launch(config, name="a", runs_dir=tmp_path / "runs")
    assert list((tmp_path / "runs").iterdir()) == []


def test_what_the_system_refuses_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made_run(Path(os.environ["GPTLAB_RUNS"]), "one")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "there")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    assert main(["runs", "rm", "one"]) == 2
    said = capsys.readouterr().err
    assert "Read-only" in said and len(said.splitlines()) == 1 and run.path.exists()
    monkeypatch.setattr(Run, "why", refuse)  # any other place
    assert main(["runs", "show", "one"]) == 1
    said = capsys.readouterr().err
    assert "Read-only" in said and "there" in said and len(said.splitlines()) == 1


def test_a_terminal_that_knows_few_letters_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    made_run(Path(os.environ["GPTLAB_RUNS"]), "ü漢")
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert main(["runs"]) == 0
    sys.stdout.flush()
    assert b"\\xfc\\u6f22" in shown.getvalue()
