"""The project's own benches, and the README's table of them: `make bench`.

    python -m gptlab.benchmark.readme README.md

Each row is a ratio that the README quotes. The table stands between two markers; what is there is replaced, rows that
are not right are shown with their status. Left out on purpose: other benches (`gptlab bench`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gptlab.benchmark import cells_of, rows_of
from gptlab.benchmark.baseline import exit_code
from gptlab.benchmark.cells import Cell, Plan
from gptlab.benchmark.table import Row, summary, summary_line, write_csv
from gptlab.config import ConfigError

BEGIN, END = "<!-- bench: written by `make bench` -->", "<!-- bench ends -->"
WIDE = {"block_size": 256, "global_batch_size": 16, "dtype": "bfloat16"}
PLANS = (
    Plan("train", "4/4/128", "plain", {"block_size": 64, "global_batch_size": 12}),
    Plan("train", "10m", "plain", WIDE),
    Plan("train", "10m", "eager", WIDE),
    Plan("train", "10m", "transformers", WIDE),
    Plan("generate", "10m", "nocache", {"block_size": 256}),
    Plan("generate", "10m", "transformers", {"block_size": 256}),
)
"""Small enough for two cores within some minutes; what is large is quoted with the command that measured it."""


def own() -> list[Cell]:
    """The cells of the table."""
    return [cell for plan in PLANS for cell in cells_of(plan, {})]


def lines(rows: Sequence[Row]) -> list[str]:
    """The table in Markdown, and where it was measured."""
    found = ["| bench | against | right | faster | 95 % | pairs | peak memory |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        what = f"{row['kind']} {row['name']}, {row['dtype']}, T {row['block_size']}, batch {row['batch_size']}"
        ratio = f"{row['speedup']:.2f}x" if row.get("speedup") else ""
        reach = f"{row['speedup_low']:.2f} to {row['speedup_high']:.2f}" if ratio else ""
        memory = f"{1 / row['compression_ratio']:.0%} of theirs" if row.get("compression_ratio") else ""
        noisy = " (noisy machine)" if row.get("noise") else ""
        found.append(
            f"| {what} | {row['against']} | {row['accuracy']} | {ratio} | {reach}{noisy} | {row.get('pairs') or ''} | "
            f"{memory} |"
        )
    first = rows[0]
    return [
        *found, "",
        f"{first.get('device_name') or first['dev']}, {first.get('threads')} threads, torch {first['torch_version']}.",
    ]  # fmt: skip


def replace(text: str, table: Sequence[str]) -> str:
    """A README with the table between its markers.

    Raises:
        ConfigError: it has no markers.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"The README has no line {BEGIN!r} with {END!r} after it: put them where the table belongs.")
    return "\n".join((before + BEGIN, *table, END + after))


def main(argv: Sequence[str]) -> int:
    """Benches, writes `bench.csv` beside the README and the table into it."""
    path = Path(argv[0] if argv else "README.md")
    text = path.read_text()
    replace(text, ())  # what cannot be written is not measured
    rows = []
    for row in rows_of(own()):
        rows.append(row)
        print(" ".join(str(row.get(name)) for name in ("kind", "name", "against", "accuracy", "speedup")), flush=True)
        write_csv(path.with_name("bench.csv"), rows)
    path.write_text(replace(text, lines(rows)))
    print(summary_line(summary(rows)))
    return exit_code(rows)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        sys.exit(str(error))
