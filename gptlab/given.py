"""Files that a user names: looked at before work begins, so that a wrong one costs a sentence and not an hour.

    >>> from pathlib import Path
    >>> from gptlab.given import check_output, read_object
    >>> check_output(Path("report.html"), "--out")
    >>> read_object(Path("config.json"), "a config")    # doctest: +SKIP

What is read must be a regular file: a pipe would be waited on for ever, and /dev/zero has no end. What will be written
must have a place that takes it. Left out on purpose: the text to train on (`sources.py`), and what a run's folder holds
(`runs.py`).
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from gptlab.fields import ConfigError

MOST_BYTES = 10_000_000
"""A JSON file of settings is not larger."""


def check_input(path: Path, what: str) -> None:
    """Refuses what is no regular file that can be read.

    Args:
        what: what is wanted of it, such as `a CSV file`.

    Raises:
        ConfigError: with the reason.
    """
    try:
        if not path.exists():
            raise ConfigError(f"There is no file {path}: give {what}.")
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "no regular file"
            raise ConfigError(f"{path} is {kind}: give {what}.")
        with open(path, "rb"):
            pass
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # a name too long, a circle of links, a NUL
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{str(path)[:200]} cannot be read ({why}): give {what}.") from None


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ConfigError: there is none.
    """
    check_input(path, f"{what} as JSON")
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ConfigError(f"{path} has {size} bytes, and {what} at most {MOST_BYTES}: give another file.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{path} is not a JSON object ({why}): give {what} as one.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object, with names and values: give {what} as one.")
    return value


def check_output(path: Path, flag: str, *, endings: tuple[str, ...] = (), makes_folder: bool = False) -> None:
    """Refuses a file that could not be written once the work is done. Nothing is made.

    Args:
        flag: what named it.
        endings: those it may have; any without.
        makes_folder: whether a folder that is not there will be made for it.

    Raises:
        ConfigError: with the reason.
    """
    if endings and path.suffix not in endings:
        raise ConfigError(f"{flag} {path} has an unknown ending: use {' or '.join(endings)}.")
    try:
        if "\0" in str(path):
            raise ValueError("it has a zero byte")
        if path.is_dir():
            raise ConfigError(f"{flag} {path} is a folder: name a file in it.")
        if path.exists() and not path.is_file():
            raise ConfigError(f"{flag} {path} is no regular file: name another.")
        folder = path.parent
        if makes_folder:
            folder = next(above for above in (folder, *folder.parents) if above.exists())
        if not folder.is_dir():
            raise ConfigError(f"{flag} {path} has no folder to lie in ({folder} is none): make it, or name another.")
        if len(os.fsencode(path.name)) > 200:  # what is written beside it has a longer name
            raise ConfigError(f"{flag} {str(path)[:80]}... has a name that is too long: use at most 200 bytes.")
        with tempfile.TemporaryFile(dir=folder) as tried:  # without a name: what permissions do not say, a try does
            tried.write(bytes(4096))
            tried.flush()
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{flag} {str(path)[:80]!r} cannot be written ({why}): name another.") from None
