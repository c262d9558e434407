"""Live tables: what they say of rows, and the lines where no terminal is."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from labtools import made_run, until

from gptlab import watching
from gptlab.cli import main


def drawn(table: object, width: int = 120) -> str:
    """A table as a terminal shows it."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system=None).print(table)
    return out.getvalue()


def test_a_row_has_a_bar_its_values_and_the_time_left(tmp_path: Path) -> None:
    run = made_run(tmp_path, rows=25, state="running")
    row = run.summary() | {"state": "running"}
    assert watching.left_s(row, tokens_a_step=16_000) == 25 * 16_000 / 40_000
    text = drawn(watching.live_table([row], {"one": 10.0}))
    for word in ("one", "running", "25/50", "40.0 k", "20.00%", "10 s", "━"):
        assert word in text, word
    assert watching.left_s(row | {"state": "finished"}, 16_000) is None
    invalid = {"name": "x", "n_layer": 1, "n_head": 3, "n_embd": 64, "state": "invalid"}
    assert "1x3x64" in drawn(watching.live_table([invalid], {}, names=False))


def test_a_table_fits_eighty_columns(tmp_path: Path) -> None:
    row = made_run(tmp_path, "sweep-0130-1x2x64", rows=25).summary()
    lines = drawn(watching.live_table([row], {row["name"]: 7200.0}, names=False), width=80).rstrip("\n").split("\n")
    assert len(lines) == 2 and "…" not in lines[1]


def test_runs_watch_follows_to_the_end_in_lines_where_no_terminal_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import threading

    from labtools import FakeLauncher

    from gptlab.config import TrainConfig

    assert main(["runs", "watch", "--runs-dir", str(tmp_path)]) == 2
    assert "No run trains now" in capsys.readouterr().err
    handle = FakeLauncher(endless=True).launch(
        TrainConfig(n_layer=1, n_head=1, n_embd=32), name="slow", runs_dir=tmp_path
    )
    watcher = threading.Thread(target=main, args=(["runs", "watch", "--runs-dir", str(tmp_path)],))
    watcher.start()
    said: list[str] = []

    def heard(word: str) -> bool:
        said.append(capsys.readouterr().out)
        return word in "".join(said)

    until(lambda: heard("slow: running at step 1 of 2000"))
    handle.stop()
    until(lambda: heard("slow: stopped"))
    watcher.join(30)
    assert not watcher.is_alive()


def test_train_shows_a_live_table_under_its_lines_in_a_terminal(tmp_path: Path, tinytext: Path) -> None:
    ours, theirs = pty.openpty()
    command = ["train", "--n-layer", "1", "--n-head", "1", "--n-embd", "32", "--block-size", "16", "--max-iters", "30",
               "--data", str(tinytext), "--eval-iters", "1", "--runs-dir", str(tmp_path), "--name", "seen"]  # fmt: skip
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "110"}
    process = subprocess.Popen(
        [sys.executable, "-m", "gptlab.cli", *command], stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    said, deadline = b"", time.monotonic() + 240
    with contextlib.suppress(OSError):  # the other end is closed
        while process.poll() is None or select.select([ours], [], [], 0.0)[0]:
            if select.select([ours], [], [], 0.5)[0]:
                said += os.read(ours, 65536)
            if time.monotonic() > deadline:
                process.kill()
    os.close(ours)
    assert process.wait(60) == 0
    text = said.decode(errors="replace")
    assert "iter 30: loss" in text and "30/30" in text and "finished at step 30" in text


def test_a_sweeps_table_says_the_time_left_while_its_queue_works() -> None:
    shape = {"n_layer": 1, "n_head": 1, "n_embd": 64, "parameters": 1e5, "max_iters": 100}
    done = shape | {"name": "a", "state": "finished", "step": 100, "seconds": 2.0}
    halted = shape | {"name": "b", "state": "stopped", "step": 50, "seconds": 1.0}
    begun: Any = SimpleNamespace(rows=lambda: [done, halted], runs=[], is_active=True)
    assert "1 of 2 runs ended, 75% of the work, about 1 s left" in drawn(watching._sweep_table(begun))
    begun.is_active = False
    assert "of the work\n" in drawn(watching._sweep_table(begun)), "after a stop nothing is left to wait for"
    begun.is_active, halted["reason"] = True, "halving: loss 5.0 at step 50 was 2 of 2"
    assert "2 of 2 runs ended, 100% of the work\n" in drawn(watching._sweep_table(begun))
