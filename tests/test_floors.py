"""The floors: who may import whom, and what is imported without torch."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINT = Path(sys.executable).with_name("lint-imports")
HEAVY = ("torch", "pandas", "matplotlib", "rich", "tiktoken", "numpy")
"""What a light command must not pay for."""


def floors() -> list[list[str]]:
    """Modules by floor, the lowest first, from the contract in pyproject.toml."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    return [[name.strip(" ()") for name in layer.split(":")] for layer in reversed(layers)]


def modules(floor: int) -> list[str]:
    """Importable names of a floor's modules that are there, those inside packages as well."""
    found = []
    for name in floors()[floor]:
        if (ROOT / "gptlab" / f"{name}.py").exists():
            found.append(f"gptlab.{name}")
        found += [
            ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            for path in sorted((ROOT / "gptlab" / name).rglob("*.py"))
            if path.name != "__main__.py"
        ]
    return found


def imported_by(code: str) -> set[str]:
    """Top-level packages that a fresh interpreter has after some code."""
    code = f"{code}\nimport sys; print('\\n'.join({{name.partition('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_every_module_stands_on_one_floor() -> None:
    listed = [name for floor in floors() for name in floor]
    there = {
        path.stem for path in (ROOT / "gptlab").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert there - {"__init__"} <= set(listed)
    assert len(listed) == len(set(listed))


@pytest.mark.skipif(not LINT.exists(), reason="import-linter is not installed")
def test_no_file_imports_from_above_or_in_circles() -> None:
    done = subprocess.run([LINT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("floor", [0, 3, 4, 5])
def test_floors_that_plan_start_and_read_import_no_torch(floor: int) -> None:
    # launcher.preload is what the fork server imports for the workers, benchmark.inside what a cell's own process runs:
    # torch is their purpose.
    names = [name for name in modules(floor) if not name.endswith(".preload") and ".benchmark.inside." not in name]
    assert names
    code = "import importlib, sys\n" + "\n".join(
        f"importlib.import_module({name!r}); assert 'torch' not in sys.modules, {name!r}" for name in names
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "code",
    [
        "import gptlab",
        "import gptlab; gptlab.TrainConfig(); gptlab.preset('tiny')",
        "from gptlab.cli import main; main(['cost', '--preset', 'gpt2', '--json'])",
        "from gptlab.cli import main; main(['runs', '--json'])",
        "from gptlab.cli import main; main(['train', '--n-layers', '3'])",
    ],
)
def test_light_ways_import_nothing_heavy(code: str) -> None:
    assert not imported_by(code) & set(HEAVY)
