"""What can be done to the runs of a view: a list from which some are picked, and buttons over them.

    >>> actions = Actions(post); actions.widget, actions.picked

Left out on purpose: doing it (`runsview.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ipywidgets as widgets

from gptlab.lab.desk import Mailbox
from gptlab.lab.parts import button, row, set_options
from gptlab.runs import ACTIVE

BUTTONS = (
    ("Stop", "stop", "Stop the picked runs, each with a checkpoint"),
    ("Resume", "play", "Go on with the picked runs from their newest checkpoint"),
    ("Compare", "columns", "Show the picked runs alone, and how their settings differ"),
    ("Hide", "eye-slash", "Leave the picked runs out"),
    ("Log", "file-text-o", "Show what the picked run printed"),
    ("Show all", "eye", "Take back Hide, Compare and Log"),
    ("Report", "book", "Write the picked runs, or all that are shown, as one HTML file"),
    ("Stop all", "stop-circle", "Stop every run that trains here, and start no more"),
)
"""Text, icon and tooltip of each."""


class Actions:
    """The list and the buttons. Their callbacks hold the mailbox and no view, for ipywidgets keeps them.

    Args:
        post: is told `button` with a button's text when one is pressed, and `look` when others are picked.
    """

    def __init__(self, post: Mailbox) -> None:
        self.picker = widgets.SelectMultiple(options=[], rows=4, tooltip="Runs that the buttons work on",
                                             layout={"width": "260px"})  # fmt: skip
        self.picker.add_class("gptlab-pick")
        self.picker.observe(lambda _: post.put("look"), "value")
        self.buttons = {
            text: button(text, icon, tooltip, _pressing(post, text), name=f"view-{text.lower().replace(' ', '-')}")
            for text, icon, tooltip in BUTTONS
        }
        self.widget = row([self.picker, row(list(self.buttons.values()))])

    @property
    def picked(self) -> list[str]:
        """Names of the runs that are picked."""
        return list(self.picker.value)

    def offer(self, states: Mapping[str, str]) -> None:
        """Lists runs, and offers what their states, by name, allow."""
        set_options(self.picker, list(states))
        active = any(state in ACTIVE for state in states.values())
        self.buttons["Stop all"].disabled = self.buttons["Stop"].disabled = not active
        self.buttons["Resume"].disabled = all(state in ACTIVE for state in states.values())
        self.buttons["Report"].disabled = not states


def _pressing(post: Mailbox, text: str) -> Callable[[], None]:
    """What a button does: a function that holds no view."""
    return lambda: post.put("button", text)
