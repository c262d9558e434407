"""Labelled texts: where documents with a class each come from, and which of them validate.

Two forms: a folder with one subfolder a class, each file below it a document; or a .jsonl file with a line a document,

    {"text": "a fine film", "label": "good"}

where a label is a word or a whole number. The classes are in the order of their names, of numbers by value.

    >>> from gptlab.sources import source
    >>> read(source("reviews.jsonl")).names    # doctest: +SKIP
    ['bad', 'good']

Validation is a tenth of each class's documents, at least one and at most 2,048 in all, chosen by a hash of their text:
a text that stands there twice never validates what it trained. Left out on purpose: splits that come with the data,
several labels a document, and numbers as targets.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gptlab.config import ConfigError
from gptlab.sources import Document, Source

VAL_DOCUMENTS = 2048
"""The most documents that validate."""


@dataclass(frozen=True)
class Labelled:
    """Documents, the class of each, and the names of the classes."""

    documents: list[Document]
    labels: list[int]
    names: list[str]

    @cached_property
    def validating(self) -> list[bool]:
        """Which documents validate.

        Raises:
            ConfigError: a class without two different texts.
        """
        hashes = [_digest(document) for document in self.documents]
        by_class: dict[int, list[str]] = defaultdict(list)
        for digest, label in zip(hashes, self.labels, strict=True):
            by_class[label].append(digest)
        chosen: set[str] = set()
        for found in by_class.values():
            budget = min(len(found) // 10, VAL_DOCUMENTS * len(found) // len(hashes))
            chosen.update(sorted(found)[: max(1, budget)])
        for label, found in sorted(by_class.items()):
            if chosen.issuperset(found):
                raise ConfigError(
                    f"The class {self.names[label]!r} has {len(set(found))} text of its own, and one trains and one "
                    "validates: give at least 2."
                )
        return [digest in chosen for digest in hashes]


def read(text: Source) -> Labelled:
    """The labelled documents of a source.

    Raises:
        ConfigError: it is of neither form, a line or a file has no label, or all have the same one.
    """
    check_form(text)
    where = text.about["path"]
    if text.about["kind"] == "folder":
        found: list[tuple[Document, Any]] = [(document, _folder(document, where)) for document in text.documents()]
    else:
        found = _lines(Path(where))
    values = {label for _, label in found}
    numbers = all(type(label) is int for label in values)
    ordered = sorted(values) if numbers else sorted(values, key=str)
    names = [str(label) for label in ordered]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{where} has the label {twice} as a word and as a number: write it in one way.")
    if len(names) < 2:
        raise ConfigError(f"{where} has {len(names)} class, and telling apart takes two: give documents of another.")
    index = {label: at for at, label in enumerate(ordered)}
    return Labelled([document for document, _ in found], [index[label] for _, label in found], names)


def check_form(text: Source) -> None:
    """Refuses a source that is neither a folder nor a .jsonl file."""
    kind, where = text.about.get("kind"), text.about.get("path", text.name)
    if kind != "folder" and not (kind == "file" and Path(where).suffix == ".jsonl"):
        raise ConfigError(
            f"{where} has no labels, which task classify needs: give a folder with one subfolder a class, or a .jsonl "
            'file with lines such as {"text": "a fine film", "label": "good"}.'
        )


def _folder(document: Document, where: str) -> str:
    """The class of a file: the subfolder that it lies in."""
    name, below, _ = document.name.partition("/")
    if not below:
        raise ConfigError(f"{document.where} lies in no subfolder of {where}, so it has no class: move it into one.")
    return name


def _lines(path: Path) -> list[tuple[Document, str | int]]:
    """The documents of a .jsonl file, held in memory while they are prepared."""
    found = []
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): mend that.") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number},"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError(f"{where} is not JSON in UTF-8: write one object a line.") from None
        if not isinstance(row, dict) or not isinstance(row.get("text"), str) or not row["text"]:
            raise ConfigError(f'{where} has no "text" with characters in it: give it one, or leave the line out.')
        label = row.get("label")
        if isinstance(label, bool) or not isinstance(label, str | int) or label == "":
            raise ConfigError(f'{where} has label {label!r}: give a word or a whole number as "label".')
        try:
            data = row["text"].encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{where} has half a surrogate pair in its text: mend its escapes.") from None
        found.append((Document(str(number), len(data), _opener(data), where.rstrip(",")), label))
    return found


def _opener(data: bytes) -> Any:
    return lambda: io.BytesIO(data)


def _digest(document: Document) -> str:
    digest = hashlib.sha256()
    for chunk in document.chunks():
        digest.update(chunk.encode())
    return digest.hexdigest()
