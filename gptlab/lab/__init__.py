"""The lab: widgets and live figures for notebooks. They start, stop and read runs; they never train.

    >>> from gptlab.lab import Lab
    >>> lab = Lab()
    >>> lab

`Lab` (`notebook.py`) is made of parts that stand alone as well: `ConfigPanel` (`panel.py`), `SweepPanel`
(`sweeppanel.py`), `RunsView`, `SampleBox` and `ClusterView`. They share a thread that owns their state (`desk.py`), the
process that draws (`drawing.py`: `gathering.py` reads, `curves.py`, `figures.py`, `tables.py`, `tiles.py` and
`comparing.py` say what is drawn, `rendering.py` how it leaves), the one that samples (`sampler.py`) and the one that
writes reports (`reporting.py`; `report.py` is the page); `process.py` is what these have in common. `choosers.py` has
widgets for single settings, `plan.py` what a choice costs, `measuring.py` this machine's speed, `naming.py` sweeps'
names, `viewbar.py` and `actions.py` what stands around a view, `stopping.py` what Stop does and `scripts.py` the calls
behind it, `parts.py` what parts share; `demo.py` runs the notebook without a browser. Notebooks draw with `plots.py`
(scaling laws), `steps.py` (a step's time) and `gantt.py` (a pipeline) too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gptlab.lab.clusterview import ClusterView as ClusterView
    from gptlab.lab.notebook import Lab as Lab
    from gptlab.lab.panel import ConfigPanel as ConfigPanel
    from gptlab.lab.runsview import RunsView as RunsView
    from gptlab.lab.samplebox import SampleBox as SampleBox
    from gptlab.lab.sweeppanel import SweepPanel as SweepPanel

_HOMES = {
    "Lab": "notebook", "ConfigPanel": "panel", "SweepPanel": "sweeppanel", "RunsView": "runsview",
    "SampleBox": "samplebox", "ClusterView": "clusterview",
}  # fmt: skip

__all__ = ["ClusterView", "ConfigPanel", "Lab", "RunsView", "SampleBox", "SweepPanel"]


def __getattr__(name: str) -> Any:
    """Loads the widgets when they are asked for: figures and the drawing process do without."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import ipywidgets  # noqa: F401
    except ImportError:
        raise ImportError("The lab's widgets are not installed: pip install 'gptlab[lab]'.") from None
    return getattr(importlib.import_module(f"gptlab.lab.{_HOMES[name]}"), name)
