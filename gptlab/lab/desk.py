"""The desk: the one thread of a kernel that owns the state of all its widgets, and the processes it asks.

Jupyter calls widgets' callbacks on the main thread or on another, also while a cell runs; so they only put a command
into the mailbox, and this thread does it. It goes on while a cell blocks the kernel, as a task of the kernel's event
loop would not. However many parts a notebook shows, they share the thread and the drawing process; a part that is made
again with the same key, as by running its cell twice, takes over from the one before.

    >>> class Clock(Part):
    ...     def look(self): return {"kind": "list", "runs_dir": "runs"}    # asked of the drawing process
    ...     def display(self, answer): print(answer)

Left out on purpose: what a part asks and shows (`runsview.py`, `panel.py`, ...), how it is drawn (`drawing.py`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import queue
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlab.lab.process import Process

if TYPE_CHECKING:
    from gptlab.launcher import Handle
    from gptlab.sweeps import Sweep

PATIENCE_S = 30.0
"""Seconds after which a drawing process that does not answer is replaced."""
IDLE_S = 0.5
"""Seconds between two turns of the thread, at most, while nobody waits for anything."""
_numbers = itertools.count(1)


class Mailbox:
    """Takes a part's commands from any thread. It holds the part weakly: ipywidgets keeps every callback for ever."""

    def __init__(self, part: Part, desk: Desk) -> None:
        self.part, self._queue = weakref.ref(part), desk.commands

    def put(self, command: str, *values: Any) -> None:
        """Queues a command: the desk's thread calls the part's method of that name, with a `do_` before it."""
        self._queue.put((self.part, command, values))


class Part:
    """A widget that the desk keeps up to date. Whoever makes one calls `_open` last.

    Attributes:
        widget: what a notebook shows.
        desk: the kernel's.
        post: where callbacks put commands.
    """

    widget: Any

    def __init__(self, kind: str, runs_dir: Path) -> None:
        self.runs_dir = runs_dir
        self.desk = desk()
        self.post = Mailbox(self, self.desk)
        self.key = f"{kind} {runs_dir.absolute()}"
        self.view = f"{kind}-{next(_numbers)}"
        self.due = 0.0
        """When it wants to look again, in seconds of `time.monotonic()`."""
        self.closed = threading.Event()

    def _open(self) -> Part | None:
        """Takes its seat at the desk; gives the part of the same key that had it, which is closed now."""
        return self.desk.seat(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The widgets, and a text that is always the same, so that executed notebooks can be compared."""
        return {**(self.widget._repr_mimebundle_() or {}), "text/plain": type(self).__name__}

    def close(self) -> None:
        """Takes the part off the page and off the desk. Runs go on."""
        self.desk.leave(self)

    def check_open(self) -> None:
        """Raises RuntimeError where a part that was made later has taken over."""
        if self.closed.is_set():
            raise RuntimeError(
                f"This {type(self).__name__} is closed, or one that was made later has taken over: use that one."
            )

    def left(self) -> None:
        """It has left the desk, by `close` or because another part took over: what it alone used ends here."""

    # The desk's thread calls these -------------------------------------------------------------------------------

    def turn(self) -> float:
        """What is to be done at every turn; gives the seconds until the next one it needs."""
        return IDLE_S

    def look(self) -> dict[str, Any] | None:
        """What to ask of the drawing process now that `due` has come; sets `due` anew."""
        self.due = time.monotonic() + IDLE_S
        return None

    def display(self, answer: dict[str, Any]) -> None:
        """Puts the answer into widgets."""

    def say(self, text: str, *, bad: bool = False) -> None:
        """Shows a message."""


class Desk:
    """The thread, its parts, the drawing process, and the runs and sweeps that this kernel has started."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[tuple[Any, str, tuple[Any, ...]]] = queue.SimpleQueue()
        self.artist = Process("gptlab.lab.drawing")
        self.sweeps: list[Sweep] = []
        self.handles: dict[Path, Handle] = {}
        self._parts: dict[str, weakref.ref[Part]] = {}
        self._widgets: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._asked: tuple[weakref.ref[Part], float] | None = None

    @property
    def thread(self) -> threading.Thread | None:
        """The thread that owns the parts, while there are some."""
        return self._thread

    def seat(self, part: Part) -> Part | None:
        """Takes a part in, instead of the one with the same key."""
        with self._lock:
            reference = self._parts.get(part.key)
            before = reference() if reference is not None else None
            if before is not None:
                self.leave(before)
            self._parts[part.key], self._widgets[part.key] = weakref.ref(part), part.widget
            if self._thread is None:
                self.artist.start()
                self._thread = threading.Thread(target=self._work, name="gptlab desk", daemon=True)
                self._thread.start()
        self.commands.put((weakref.ref(part), "nothing", ()))
        return before

    def leave(self, part: Part) -> None:
        """Lets a part go."""
        with self._lock:
            reference = self._parts.get(part.key)
            if reference is not None and reference() is part:
                del self._parts[part.key]
                self._widgets.pop(part.key).close()
            part.closed.set()
            part.left()

    def active_sweeps(self, runs_dir: Path) -> list[Sweep]:
        """Sweeps whose queue works in this kernel, on a folder."""
        self.sweeps = [sweep for sweep in self.sweeps if sweep.is_active]
        return [sweep for sweep in self.sweeps if sweep.runs_dir.absolute() == runs_dir.absolute()]

    def handle(self, path: Path) -> Handle | None:
        """What this kernel holds of a run it has started."""
        return self.handles.get(path.absolute())

    def _work(self) -> None:
        wait = 0.0
        while True:
            with contextlib.suppress(queue.Empty):
                reference, command, values = self.commands.get(timeout=wait) if wait else self.commands.get_nowait()
                part = reference()
                if part is not None and not part.closed.is_set() and command != "nothing":
                    _tried(part, getattr(part, f"do_{command}"), *values)
                    part.due = 0.0
                del part
            parts = self._living()
            if parts is None:
                return
            wait = 0.0 if not self.commands.empty() else self._turn(parts)
            del parts

    def _living(self) -> list[Part] | None:
        """The parts that someone still holds; those of the others are taken off the page. None ends the thread."""
        with self._lock:
            found = []
            for key, reference in list(self._parts.items()):
                part = reference()
                if part is None:
                    del self._parts[key]
                    self._widgets.pop(key).close()
                else:
                    found.append(part)
            if not found:
                self._thread = None
                self._asked = None
                self.artist.close()
                return None
            return found

    def _turn(self, parts: list[Part]) -> float:
        """Takes an answer, asks for the next; gives the seconds until its next turn."""
        wait = min(_tried(part, part.turn) or IDLE_S for part in parts)
        try:
            return min(wait, self._ask(parts) if self._asked is None else self._take())
        except (OSError, ValueError):  # no process is to be had now, or it said what is no JSON: the next may
            self.artist.close()
            self._asked = None
            return IDLE_S

    def _ask(self, parts: list[Part]) -> float:
        """Asks for what the part wants that has waited longest."""
        now = time.monotonic()
        late = min(parts, key=lambda part: part.due)
        if late.due > now:
            return late.due - now
        request = _tried(late, late.look)
        if late.due <= now:
            late.due = now + IDLE_S
        if request is not None and self.artist.send(request | {"view": late.view}):
            self._asked = (weakref.ref(late), now)
        return 0.0

    def _take(self) -> float:
        assert self._asked is not None
        answer = self.artist.receive(timeout=0.05)
        reference, at = self._asked
        if answer is None:
            if self.artist.pid is None or time.monotonic() - at > PATIENCE_S:
                self.artist.close()
                self._asked = None
            return 0.01
        self._asked = None
        part = reference()
        if part is not None and not part.closed.is_set():
            _tried(part, part.display, answer)
        return 0.0


def _tried(part: Part, method: Any, *values: Any) -> Any:
    """Calls a part's method; a thread that dies leaves dead buttons, so what goes wrong is said, and it goes on."""
    from gptlab.config import ConfigError

    try:
        return method(*values)
    except ConfigError as error:
        part.say(str(error), bad=True)
    except Exception as error:
        part.say(f"{type(error).__name__}: {error}", bad=True)
    part.due = time.monotonic() + IDLE_S
    return None


def desk() -> Desk:
    """This process's desk."""
    return _of_process(os.getpid())


@functools.cache
def _of_process(pid: int) -> Desk:
    """By process id: a fork has no thread of its parent."""
    return Desk()
