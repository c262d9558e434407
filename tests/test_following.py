"""Following a run: lines of all attempts, the bar while text is prepared, a table under the lines, and signals."""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from labtools import made_run

from gptlab import following
from gptlab.config import TrainConfig
from gptlab.recording import Claim, RunWriter, create_run
from gptlab.runs import Run


class Screen(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self) -> bool:
        return True


class Told:
    """A started run of which each look finds what the next deed left; it is over after the last."""

    def __init__(self, run: Run, *deeds: Callable[[], object]) -> None:
        self.run, self.deeds, self.asked = run, list(deeds), list[str]()
        self.over: Callable[[], object] = lambda: None  # done as it ends, after the last look

    @property
    def is_over(self) -> bool:
        if not self.deeds:
            self.over()
            return True
        self.deeds.pop(0)()
        return False

    def stop(self) -> None:
        self.asked.append("stop")

    def kill(self) -> None:
        self.asked.append("kill")

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        return {"status": "finished"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(following, "POLL_S", 0.0)
    monkeypatch.setattr(following, "TABLE_S", -1.0)
    return create_run(TrainConfig(n_layer=1, n_head=1, n_embd=32, max_iters=30), "one", tmp_path)


def terminal(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Both streams of a terminal from here on."""
    seen = Screen()
    for name, value in {"TERM": "xterm", "COLUMNS": "110", "LINES": "40"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, seen)
    monkeypatch.setattr("rich._console", None)  # it kept a stream of another test
    return seen


def prints(run: Run, attempt: int, text: bytes) -> None:
    folder = run.path / "attempts" / f"{attempt:02d}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "rank-0.out", "ab") as file:
        file.write(text)


def test_each_line_comes_once_and_whole_and_an_attempt_says_why_it_began(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    prints(run, 1, b"of an earlier start\n")
    lost = {"type": "WorkerKilled", "message": "rank 1 was killed"}
    handle = Told(
        run,
        lambda: prints(run, 2, "iter 1: Größe".encode()[:-2]),
        lambda: prints(run, 2, "Größe".encode()[-2:] + b"\niter 2\n"),
        lambda: (run.path / "attempts" / "02" / "error.json").write_text(json.dumps(lost)),
        lambda: prints(run, 3, b"iter 2 again\n"),
        lambda: prints(run, 4, b"iter 3\n"),
    )
    assert following.follow(handle, print_lines=True, attempts_before=1) == {"status": "finished"}
    assert capsys.readouterr().out.splitlines() == [
        "iter 1: Größe", "iter 2", "attempt 3, since rank 1 was killed", "iter 2 again",
        "attempt 4, since a process was lost", "iter 3",
    ]  # fmt: skip
    prints(run, 4, b"unseen\n")
    following.follow(Told(run), print_lines=False)
    assert capsys.readouterr().out == ""


def test_the_bar_of_the_preparation_is_gone_when_the_run_trains(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = terminal(monkeypatch)
    drawn: list[str] = []

    def waits() -> None:
        before = len(seen.getvalue())
        time.sleep(0.3)  # a bar is drawn anew ten times a second
        drawn.append(seen.getvalue()[before:])

    with Claim(run.path) as claim:
        writer = RunWriter(run.path, claim.new_attempt())
        prepares = lambda: writer.status("preparing", pids=[], progress=0.6, message="tokenizing x")  # noqa: E731
        following.follow(
            Told(run, prepares, waits, lambda: writer.status("running"), waits), print_lines=False
        )  # no share of 1 is ever seen
    assert "tokenizing x" in drawn[0] and "60%" in drawn[0] and drawn[1] == ""


def test_a_bar_ends_at_one_and_the_next_work_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = terminal(monkeypatch)
    with following.progress_bar() as show:
        show(0.5, "tokenizing")
        show(1.0, "done")
        before = len(seen.getvalue())
        show(1.0, "done")
        assert len(seen.getvalue()) == before
        show(0.25, "reading val")
    assert "reading val" in seen.getvalue()[before:] and "25%" in seen.getvalue()[before:]


def test_no_bar_is_drawn_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    with following.progress_bar() as show:
        show(0.5, "tokenizing")
    assert capsys.readouterr() == ("", "")


def test_in_a_terminal_a_table_stands_under_all_lines(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = terminal(monkeypatch)
    finished = made_run(run.path.parent, "two", rows=30)
    handle = Told(finished, lambda: prints(finished, 1, b"iter 1\n"), lambda: prints(finished, 1, b"the last\n"))
    handle.over = handle.deeds.pop()
    following.follow(handle, print_lines=True)
    text = seen.getvalue()
    assert text.index("iter 1") < text.index("30/50") < text.rindex("the last") < text.rindex("30/50")


def test_the_first_signal_stops_and_a_later_one_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: Run
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    asked: list[list[str]] = []

    def hears(number: int, repeat_s: float = 600.0) -> Callable[[], None]:
        def deed() -> None:
            monkeypatch.setattr(following, "REPEAT_S", repeat_s)
            signal.raise_signal(number)
            asked.append(list(handle.asked))

        return deed

    handle = Told(run, hears(signal.SIGTERM), hears(signal.SIGINT), hears(signal.SIGINT, 0.0))
    following.follow(handle, print_lines=False)
    assert asked == [["stop"], ["stop"], ["stop", "kill"]], "two signals at once are one wish"
    assert capsys.readouterr().err == "stopping after this step; once more ends it at once\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_is_ignored_stays_ignored(run: Run) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        handle = Told(run, lambda: signal.raise_signal(signal.SIGINT))
        following.follow(handle, print_lines=False)
        assert handle.asked == [] and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_signals_are_left_alone(run: Run) -> None:
    seen: list[object] = []
    handle = Told(run, lambda: seen.append(signal.getsignal(signal.SIGINT)))
    thread = threading.Thread(target=following.follow, args=(handle,), kwargs={"print_lines": False})
    thread.start()
    thread.join(30)
    assert seen == [signal.getsignal(signal.SIGINT)]
