"""Asking runs to stop, whoever started them, and the queues that would start more.

    >>> from gptlab.lab import stopping
    >>> stopping.stop_all(Path("runs"))
    ["gptlab.Run.open('first', 'runs').request_stop()"]

Each function gives the calls that do the same. Left out on purpose: the buttons (`actions.py`, `sweeppanel.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path

from gptlab.config import ConfigError
from gptlab.lab.naming import sweeps_in
from gptlab.lab.parts import call
from gptlab.runs import Run, list_runs
from gptlab.sweeps import Sweep


def stop_runs(runs: Sequence[Run]) -> list[str]:
    """Asks those that train to stop after the step they take, each with a checkpoint; a queued one at its turn."""
    active = [run for run in runs if run.is_active]
    for run in active:
        run.request_stop()
    return [f"{call('gptlab.Run.open', run.name, str(run.path.parent))}.request_stop()" for run in active]


def stop_all(runs_dir: Path, sweep: str | None = None, own: Collection[str] = ()) -> list[str]:
    """Asks all runs of a folder, or of one of its sweeps, to stop, and their sweeps' queues to start no more.

    Args:
        own: names of the sweeps whose queue works in this process: it may be between two runs.

    Raises:
        ConfigError: the one sweep that is asked for cannot be read. Of all, such a one is passed over.
    """
    calls = []
    for name in [sweep] if sweep else sweeps_in(runs_dir):
        with contextlib.suppress(ConfigError):
            found = Sweep.open(name, runs_dir)
            if name in own or any(run.is_active for run in found.runs):  # then another process works its queue
                found.request_stop()
                calls.append(f"{call('gptlab.Sweep.open', name, str(runs_dir))}.request_stop()")
    return calls + stop_runs(Sweep.open(sweep, runs_dir).runs if sweep else list_runs(runs_dir))
