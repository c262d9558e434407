"""Tables in CSV files: replaced as a whole, and read with care where a user names them.

    >>> from pathlib import Path
    >>> from gptlab.csvfile import write_csv
    >>> write_csv(Path("runs.csv"), ["step", "loss"], [{"step": 1, "loss": 5.5}])

Left out on purpose: what the columns are.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gptlab.fields import ConfigError
from gptlab.given import check_input
from gptlab.jsonfile import replacing


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Replaces a CSV file: a line of names, then a row each. What is not among the columns is left out."""
    with replacing(path) as beside, open(beside, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a line of names, as texts; cells past the names are left out, lacking ones are empty.

    Raises:
        ConfigError: it cannot be read, or is no such file.
    """
    check_input(path, "a CSV file with a line of names")
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file, restkey=""))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give a CSV file with a line of names.") from None
    except (UnicodeDecodeError, csv.Error):
        raise ConfigError(f"{path} is no CSV file: give one with a line of names.") from None
    return [{name: text or "" for name, text in row.items() if name} for row in rows]
