"""From text to the files of a corpus: parted into training and validation, tokenized, written, described.

The text is read twice, in chunks, and never held whole: once to know its characters and where to part it, once to
write it as ids. Documents end with the end-of-text id where there are several; a single text has none, as in nanoGPT.

    >>> from gptlab.preparing import build
    >>> build(source("pysrc"), "byte", Path("new/folder"), lambda share, message: None)

Left out on purpose: where the folder belongs and that it appears whole or not at all (`corpus.py`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gptlab import labelled
from gptlab.config import ConfigError
from gptlab.labelled import Labelled
from gptlab.runs import write_json
from gptlab.sources import Document, Source
from gptlab.tokenfile import HEADER_BYTES, header
from gptlab.tokenizer import CharTokenizer, Tokenizer, get_tokenizer

Progress = Callable[[float, str], None]
"""Told the share that is done (0 to 1) and what is being done."""
Split = Literal["train", "val"]

FORMAT = "gptlab-corpus"
VERSION = 1
VAL_BYTES = 131_072
"""The most validation text that is taken from several documents; no tokenizer makes more tokens than bytes."""


@dataclass(frozen=True)
class _Piece:
    """Characters start to stop of a document; `ends` where an end-of-text id follows."""

    document: Document
    start: int
    stop: int
    ends: bool


def build(text: Source, tokenizer_name: str, folder: Path, report: Progress, task: str = "lm") -> None:
    """Writes train.bin, val.bin and meta.json into an existing folder.

    Raises:
        ConfigError: text that is not UTF-8, cannot be read, or is too short to be parted.
    """
    data = text.about.get("path", text.name)
    report(0.0, f"looking for {data}")
    found = labelled.read(text) if task == "classify" else None
    documents = found.documents if found else text.documents()
    total = sum(document.size for document in documents) or 1
    done = 0
    counts: list[int] = []

    def counted(document: Document) -> Iterator[str]:
        nonlocal done
        characters = 0
        for chunk in document.chunks():
            characters += len(chunk)
            yield chunk
        counts.append(characters)
        done += document.size
        report(0.1 * done / total, f"reading {data}")

    if tokenizer_name == "char":
        tokenizer: Tokenizer = CharTokenizer.from_text(*map(counted, documents))
    else:
        tokenizer = get_tokenizer(tokenizer_name)
        for document in documents:
            for _ in counted(document):
                pass
    parts, how = _parts(documents, counts) if found is None else _labelled_parts(found, counts)
    if not all(any(piece.stop > piece.start for piece in pieces) for pieces in parts.values()):
        raise ConfigError(f"{data} has {sum(counts)} characters, too few to train on and to validate: use more text.")
    digest = hashlib.sha256()
    meta: dict[str, Any] = {
        "format": FORMAT, "version": VERSION, "name": f"{text.name}-{tokenizer_name}", "tokenizer": tokenizer.to_meta(),
        "vocab_size": tokenizer.vocab_size, "dtype": tokenizer.dtype,
    }  # fmt: skip
    characters = sum(counts) or 1
    before = 0
    for name, pieces in parts.items():
        base = before

        def tell(read: int, base: int = base) -> None:
            report(min(0.999, 0.1 + 0.9 * (base + read) / characters), f"tokenizing {data}")

        meta[name] = _write(folder / f"{name}.bin", tokenizer, pieces, digest, tell)
        before += meta[name]["characters"]
    if found is not None:
        sides = list(zip(found.validating, found.labels, strict=True))
        meta["labels"] = {"names": found.names} | {
            name: [label for validates, label in sides if validates == (name == "val")] for name in parts
        }
        digest.update(repr(meta["labels"]).encode())
    meta |= {"sha256": digest.hexdigest(), "split": how}
    meta["source"] = text.about | {"fingerprint": text.fingerprint, "documents": len(documents)}
    write_json(folder / "meta.json", meta, durable=True)


def _parts(documents: list[Document], counts: list[int]) -> tuple[dict[Split, list[_Piece]], str]:
    """What is trained on and what validates, and a sentence that says how it was parted."""
    characters, size = sum(counts), sum(document.size for document in documents)
    several = len(documents) > 1
    cut, how = int(characters * 0.9), "validation is the last tenth of the characters"
    if several:
        budget = min(size // 10, VAL_BYTES)
        chosen: set[str] = set()
        left = budget
        for document in sorted(documents, key=lambda d: hashlib.sha256(d.name.encode(errors="replace")).digest()):
            if document.size < left:
                chosen.add(document.name)
                left -= document.size + 1  # its end-of-text id counts
        how = f"validation is {len(chosen)} of {len(documents)} documents, by a hash of their names"
        how += f", a tenth of the bytes and at most {VAL_BYTES}"
        if left <= budget // 2 and chosen:
            parts: dict[Split, list[_Piece]] = {"train": [], "val": []}
            for document, n in zip(documents, counts, strict=True):
                parts["val" if document.name in chosen else "train"].append(_Piece(document, 0, n, True))
            return parts, how
        # No set of whole documents comes near a tenth: the end of the last ones, as with a single text.
        cut = characters - max(1, budget * characters // max(1, size))
        how = f"validation is the end of the text, a tenth of the bytes and at most {VAL_BYTES}"
    parts = {"train": [], "val": []}
    at = 0
    for document, n in zip(documents, counts, strict=True):
        middle = min(max(cut - at, 0), n)
        if middle:
            parts["train"].append(_Piece(document, 0, middle, several and middle == n))
        if middle < n:
            parts["val"].append(_Piece(document, middle, n, several))
        at += n
    return parts, how


def _labelled_parts(found: Labelled, counts: list[int]) -> tuple[dict[Split, list[_Piece]], str]:
    """The same for labelled documents, each of which stays whole and gets its end."""
    parts: dict[Split, list[_Piece]] = {"train": [], "val": []}
    for document, n, validates in zip(found.documents, counts, found.validating, strict=True):
        parts["val" if validates else "train"].append(_Piece(document, 0, n, True))
    how = f"validation is {len(parts['val'])} of {len(counts)} documents, of each class those whose text hashes lowest"
    return parts, how


def _write(
    path: Path, tokenizer: Tokenizer, pieces: list[_Piece], digest: Any, tell: Callable[[int], None]
) -> dict[str, int]:
    """One token file of `pieces`; gives what it counted. `digest` takes the ids in."""
    read = size = tokens = 0

    def segments() -> Iterator[str | None]:
        nonlocal read, size
        for piece in pieces:
            begin = read
            for segment in tokenizer.segments(_cut(piece.document.chunks(), piece.start, piece.stop)):
                read += len(segment)
                size += len(segment) if segment.isascii() else len(segment.encode())
                yield segment
            if read - begin != piece.stop - piece.start:
                raise ConfigError(f"{piece.document.where} changed while it was read: prepare it again.")
            if piece.ends:
                yield None

    with path.open("wb") as file:
        file.write(bytes(HEADER_BYTES))
        for ids in tokenizer.encode_stream(segments()):
            data = ids.astype("<u2" if tokenizer.dtype == "uint16" else "<u4", copy=False).tobytes()
            file.write(data)
            digest.update(data)
            tokens += len(ids)
            tell(read)
        file.seek(0)
        file.write(header(tokens, tokenizer.dtype))
        file.flush()
        os.fsync(file.fileno())
    return {"tokens": tokens, "documents": len(pieces), "characters": read, "bytes": size}


def _cut(chunks: Iterable[str], start: int, stop: int) -> Iterator[str]:
    """Characters start to stop of a text that comes in chunks."""
    at = 0
    for chunk in chunks:
        if at >= stop:
            return
        if part := chunk[max(0, start - at) : stop - at]:
            yield part
        at += len(chunk)
