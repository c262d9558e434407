"""JSON objects in files that are replaced as a whole.

    >>> from pathlib import Path
    >>> from gptlab.jsonfile import read_json, write_json
    >>> write_json(Path("status.json"), {"state": "running"})
    >>> read_json(Path("status.json"))
    {'state': 'running'}

Left out on purpose: which files there are (`runs.py`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    """Replaces a JSON file as a whole: a reader sees the old one or the new one. `durable` also reaches the disk."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(beside, "w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(beside, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None where there is none."""
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):  # neither JSON nor even text
        return None
    return value if isinstance(value, dict) else None
