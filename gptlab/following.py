"""Following a run from a terminal: its lines as they come, a bar while its text is prepared, a stop on Ctrl-C.

    >>> from gptlab.following import follow  # doctest: +SKIP
    >>> follow(gptlab.launch(config), print_lines=True)["status"]

Everything is read from the run directory. Left out on purpose: starting runs (`launcher/`), the tables (`watching.py`).
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from gptlab.runs import Run, read_json
from gptlab.watching import run_table, screen

POLL_S = 0.1
"""Seconds between two looks."""
TABLE_S = 0.5
"""Seconds between two pictures of the table under the lines."""
REPEAT_S = 0.1
"""Two signals closer than that are one wish: `timeout` signals a process and its group."""


class Handle(Protocol):
    """What following needs of a started run."""

    @property
    def run(self) -> Run: ...
    @property
    def is_over(self) -> bool: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> dict[str, Any]: ...


def follow(handle: Handle, *, print_lines: bool, attempts_before: int = 0) -> dict[str, Any]:
    """Waits for a run's end and prints what its first rank prints. Returns the final record.

    An interrupt (Ctrl-C, or the signal TERM) asks for a stop, with a checkpoint; a second one ends them at once.

    Args:
        attempts_before: attempts of earlier starts, whose lines were printed then.
    """
    lines = _Lines(handle.run, attempts_before) if print_lines else None
    with interrupts(handle.stop, handle.kill):
        _watch(handle, lines)
        return handle.wait(timeout=30)


def _watch(handle: Handle, lines: _Lines | None) -> None:
    """Until the run is over. In a terminal a table with a bar and the time left stands under the lines."""
    run = handle.run
    with progress_bar() as show, contextlib.ExitStack() as stack:
        table: Callable[[Any], None] | None = None
        drawn = 0.0
        while not handle.is_over:
            status = run.status()
            if status.get("state") == "preparing" and "progress" in status:
                show(status["progress"], str(status.get("message", "")))
            else:
                show(1.0, "")  # the last share is seldom seen here
                if lines is not None:
                    lines.print_new()
                if lines is not None and sys.stdout.isatty() and time.monotonic() - drawn > TABLE_S:
                    drawn = time.monotonic()
                    table = table or stack.enter_context(screen())
                    table(run_table(run) or "")
            time.sleep(POLL_S)
        if lines is not None:
            lines.print_new()
        if table is not None:
            table(run_table(run) or "")


class _Lines:
    """What rank 0 printed, attempt after attempt, as far as it was not printed yet."""

    def __init__(self, run: Run, skip: int) -> None:
        self.run, self.skip = run, skip
        self.read: dict[Path, int] = {}

    def print_new(self) -> None:
        for count, folder in enumerate(self.run.attempts()[self.skip :]):
            if folder not in self.read:
                self.read[folder] = 0
                if count:
                    lost = read_json(folder.with_name(f"{int(folder.name) - 1:02d}") / "error.json") or {}
                    print(f"attempt {int(folder.name)}, since {lost.get('message', 'a process was lost')}", flush=True)
            with contextlib.suppress(FileNotFoundError), open(folder / "rank-0.out", "rb") as file:
                file.seek(self.read[folder])
                new = file.read()
                whole = new[: new.rfind(b"\n") + 1]
                self.read[folder] += len(whole)
                sys.stdout.write(whole.decode(errors="replace"))
                sys.stdout.flush()


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[float, str], None]]:
    """A function that shows a share (0..1) and what is done, as a bar on stderr if that is a terminal; 1 ends it."""
    shown: Any = None

    def show(share: float, text: str) -> None:
        nonlocal shown
        if share >= 1 and shown is not None:
            shown.stop()
            shown = None
        if share >= 1 or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import Progress

        if shown is None:
            shown = Progress(console=Console(stderr=True), transient=True)
            shown.start()
            shown.add_task(text, total=1.0)
        shown.update(shown.task_ids[0], completed=share, description=text)

    try:
        yield show
    finally:
        if shown is not None:
            shown.stop()


@contextlib.contextmanager
def interrupts(stop: Callable[[], None], kill: Callable[[], None]) -> Iterator[None]:
    """Meanwhile the first interrupt calls `stop` and the next one `kill`.

    The signal TERM counts as Ctrl-C does, so that who ends the command politely gets a checkpoint as well.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = 0.0

    def hear(number: int, frame: object) -> None:
        nonlocal heard
        now = time.monotonic()
        if not heard:
            heard = now
            print("stopping after this step; once more ends it at once", file=sys.stderr, flush=True)
            stop()
        elif now - heard > REPEAT_S:
            kill()

    # What the shell ignores for a job in the background stays ignored.
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    heeded = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, hear)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])
