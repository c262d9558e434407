"""The lab: widgets and live figures for notebooks. They start, stop and read runs; they never train.

    >>> from gptlab.lab import Lab
    >>> lab = Lab()
    >>> lab

`notebook.py` is the Lab, `owner.py` its thread, `panel.py` its choices, `plan.py` what they cost, `naming.py` what
sweeps are called; `drawing.py` is the process that draws, `figures.py` and `tables.py` what it draws; `demo.py` runs
the notebook without a browser.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gptlab.lab.notebook import Lab as Lab

__all__ = ["Lab"]


def __getattr__(name: str) -> Any:
    """Loads the widgets when they are asked for: figures and the drawing process do without."""
    if name != "Lab":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import ipywidgets  # noqa: F401
    except ImportError:
        raise ImportError("The lab's widgets are not installed: pip install 'gptlab[lab]'.") from None
    from gptlab.lab.notebook import Lab

    return Lab
