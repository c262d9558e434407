"""JSON objects in files, and files that are replaced as a whole.

    >>> from pathlib import Path
    >>> from gptlab.jsonfile import read_json, write_json
    >>> write_json(Path("status.json"), {"state": "running"})
    >>> read_json(Path("status.json"))
    {'state': 'running'}

Left out on purpose: which files there are (`runs.py`), and files that a user names (`given.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to, which takes its place at the end of the block: whoever reads sees the old file
    or the new one. Where anything fails, as on a full disk, the old one stays and nothing of the new one is left."""
    # By thread too: two of one process may write the same table.
    beside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}")
    try:
        yield beside
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    """Replaces a JSON file as a whole. `durable` also reaches the disk."""
    with replacing(path) as beside, open(beside, "w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        if durable:
            file.flush()
            os.fsync(file.fileno())


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None where there is none that can be read: a run's folder is data, and whatever
    lies in it must not end who looks at it."""
    try:
        if not path.is_file():  # a pipe would be waited on for ever
            return None
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):  # neither JSON nor even text, or nested without end
        return None
    return value if isinstance(value, dict) else None
