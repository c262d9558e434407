"""The one thread that owns a Lab's state, and how a Lab that is made again takes over from the one before.

Jupyter calls widgets' callbacks on the main thread or on another, also while a cell runs; so they only queue commands,
and this thread does them. It goes on while a cell blocks the kernel, as a task of the kernel's event loop would not.
Left out on purpose: what the commands do (`notebook.py`).
"""

from __future__ import annotations

import queue
import threading
import weakref
from typing import TYPE_CHECKING, Any

from gptlab.lab.drawing import Artist

if TYPE_CHECKING:
    from gptlab.lab.notebook import Lab
    from gptlab.sweeps import Sweep


class Owner(threading.Thread):
    """The one thread that owns a Lab's state. It holds the Lab weakly, and ends with it."""

    def __init__(
        self,
        key: str,
        lab: Lab,
        commands: queue.SimpleQueue[tuple[Any, ...]],
        artist: Artist,
        widget: Any,
        closed: threading.Event,
    ) -> None:
        super().__init__(name=key, daemon=True)
        self._lab, self._commands, self._artist, self._widget, self._closed = (
            weakref.ref(lab),
            commands,
            artist,
            widget,
            closed,
        )

    def run(self) -> None:
        wait = 0.0
        while True:
            try:
                command = self._commands.get(timeout=wait) if wait else self._commands.get_nowait()
            except queue.Empty:
                command = None
            lab = self._lab()
            if lab is None or command == ("close",):
                break
            try:
                if command is not None:
                    lab._obey(*command)
                wait = lab._tick() if self._commands.empty() else 0.0
            except Exception as error:  # a thread that dies leaves dead buttons: say it, and go on
                lab._say(f"{type(error).__name__}: {error}", bad=True)
                wait = 1.0
            del lab
        self._closed.set()
        self._artist.close()
        self._widget.close()

    def retire(self) -> Sweep | None:
        """Ends the thread; gives the sweep that is still running, for another Lab to watch."""
        lab = self._lab()
        self._commands.put(("close",))
        self.join(5)
        sweep = lab._sweep if lab is not None else None
        return sweep if sweep is not None and sweep.is_active else None


def take_over(key: str) -> Sweep | None:
    """Ends the thread of the Lab of that name, if there is one; gives its running sweep."""
    for thread in threading.enumerate():
        if isinstance(thread, Owner) and thread.name == key:
            return thread.retire()
    return None
