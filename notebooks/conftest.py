"""Notebooks under test spend the tests' budget, and leave their runs in a folder that goes away."""

from __future__ import annotations

import os
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Kernels inherit this; nbval gives tests no other way to them."""
    os.environ.setdefault("GPTLAB_BUDGET", "test")
    folder = tempfile.TemporaryDirectory(prefix="gptlab-notebooks-")
    os.environ["GPTLAB_RUNS"] = folder.name
    config.add_cleanup(folder.cleanup)
