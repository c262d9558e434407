"""Labelled documents for tests: two kinds of sentences that a tiny model learns to tell apart in some steps."""

from __future__ import annotations

import json
import random
from pathlib import Path

_WORDS = {"good": ["fine", "bright", "lovely", "warm"], "bad": ["dull", "grey", "awful", "cold"]}


def rows(count: int) -> list[dict[str, str]]:
    """`count` documents of each of two classes, of different lengths, in a fixed disorder."""
    drawn = random.Random(0)
    found = [
        {"text": f"{number}: " + " ".join(drawn.choices(words, k=drawn.randint(1, 6))), "label": label}
        for label, words in _WORDS.items()
        for number in range(count)
    ]
    drawn.shuffle(found)
    return found


def write_jsonl(path: Path, count: int = 40) -> Path:
    """The documents as a .jsonl file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(count)))
    return path


def write_folder(path: Path, count: int = 40) -> Path:
    """The same documents as a folder with one subfolder a class."""
    for number, row in enumerate(rows(count)):
        (path / row["label"]).mkdir(parents=True, exist_ok=True)
        (path / row["label"] / f"{number:04}.txt").write_text(row["text"])
    return path
