"""Scaling laws: fits over tables of runs, with intervals, and predictions of runs that are not in the table.

    >>> from gptlab import scaling
    >>> fit = scaling.fit({"N": parameters, "D": tokens}, losses)     # L(N, D) = E + A/N^alpha + B/D^beta
    >>> fit.values["alpha"], fit.intervals["alpha"], fit.predict({"N": 1e9, "D": 2e10})

`laws.py` is the formula and its solver, `fits.py` the fit with its intervals and refusals, `isoflop.py` the parabolas,
`table.py` what tables hold and the three ways to count N. Left out on purpose: running what a table needs
(`sweeps.py`, `dial.py`) and drawing (`lab/plots.py`).
"""

from __future__ import annotations

from gptlab.scaling.fits import Check, Fit, Undetermined, check, fit
from gptlab.scaling.isoflop import Budget, IsoFlop, isoflop
from gptlab.scaling.table import CONVENTIONS, Points, from_rows, read_csv, sizes

__all__ = [
    "CONVENTIONS", "Budget", "Check", "Fit", "IsoFlop", "Points", "Undetermined",
    "check", "fit", "from_rows", "isoflop", "read_csv", "sizes",
]  # fmt: skip
