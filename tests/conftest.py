"""Fixtures: every test has caches and runs of its own, and a small real text."""

from __future__ import annotations

import json
import os
import sysconfig
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import settings

from gptlab import hardware, kernels, peaks

# Threads that wait for each other spin: on a busy machine small models are many times slower with two than with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# Hypothesis tries the same cases each time, so that a change is to blame for what fails; new ones with the slow tests.
settings.register_profile("repeatable", derandomize="GPTLAB_SLOW" not in os.environ, deadline=None)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes minutes is left out unless GPTLAB_SLOW is set; a shorter form of each stands beside it."""
    for item in items if "GPTLAB_SLOW" not in os.environ else ():
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: set GPTLAB_SLOW=1"))


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled_kernels: Path) -> None:
    """No test reads or writes the user's cache or runs. Its own cache says how fast the CPU is, so that no run
    measures, and holds the kernels that an earlier test compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rates = asdict(peaks.Rates(1e11, 1e11, 1e11, 1e10, 1e10))
    keys = [peaks.cache_key(hardware.cpu_name(), dtype, hardware.cores()) for dtype in ("float32", "bfloat16")]
    peaks.cache_file().parent.mkdir(parents=True)
    peaks.cache_file().write_text(json.dumps(dict.fromkeys(keys, rates)))
    own = asdict(kernels.KernelRates(5e10, 5e10, 1e9))
    keys = [kernels.rates_key(dtype, hardware.cores()) for dtype in ("float32", "bfloat16")]
    kernels.rates_file().write_text(json.dumps(dict.fromkeys(keys, own)))
    (peaks.cache_file().parent / "native").symlink_to(compiled_kernels)
    monkeypatch.setenv("GPTLAB_RUNS", str(tmp_path / "runs"))


@pytest.fixture(scope="session")
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all tests keep the kernels of our own: compiling one takes some seconds."""
    return tmp_path_factory.mktemp("native")


@pytest.fixture(scope="session")
def tinytext(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file of some 100 kB that every machine has: two modules of the standard library."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    path = tmp_path_factory.mktemp("text") / "tiny.txt"
    path.write_text((stdlib / "argparse.py").read_text() + (stdlib / "ast.py").read_text())
    return path
