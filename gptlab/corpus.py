"""Prepared text on disk: token files that training maps into memory, and how they are made.

A corpus is a folder: train.bin, val.bin and meta.json. The .bin files are llm.c's (256 int32: 20240520, 1, tokens,
zeros; then uint16), so its trainers read them too; a vocabulary above 65,536 takes llm.c's other header (20240801, 7)
with uint32. nanoGPT's bare uint16 files are read as well, told apart by the first number. data/README.md has the rest.

    >>> from gptlab.corpus import ensure
    >>> ensure("pysrc", "byte").split("train")[:4]

Validation is the last tenth of the characters of a single text, as nanoGPT has it; of several documents it is whole
ones, drawn by a hash of their names, a tenth of the bytes and at most 131,072, the same for every tokenizer.
Prepared corpora are looked for in ./data by name, then in the user's cache, where a changed file is another corpus.

Left out on purpose: shards, streaming from a network, mixing of corpora, and nanoGPT's meta.pkl, since reading a
pickle runs code.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import time
from pathlib import Path

from gptlab import labelled, sources
from gptlab.config import ConfigError, did_you_mean
from gptlab.prepared import Corpus, is_corpus, open_corpus
from gptlab.preparing import VAL_BYTES, VERSION, Progress, build
from gptlab.sources import Source
from gptlab.tokenizer import NAMES, get_tokenizer
from gptlab.userfolder import cache_folder

__all__ = ["Corpus", "check", "ensure", "find", "list_corpora", "open_corpus", "prepare", "seen_from"]

_AT_ONCE = {"byte": 4_000_000, "char": 4_000_000, "gpt2": 2_000_000}  # bytes that well under a second prepares
_STALE_S = 86_400  # a preparation that has not ended in a day was killed


def find(data: str, tokenizer: str, task: str = "lm") -> Corpus | None:
    """The corpus that is prepared already, or None; no text is read. `data` is a source, a path, or a corpus's name.
    Task classify needs one with labels.

    Raises:
        ConfigError: a corpus of that name exists but is damaged, or was made with another tokenizer.
    """
    path = _path(data)
    _check_tokenizer(tokenizer)
    if _is_plain_name(data):
        for folder in (Path("data", f"{data}-{tokenizer}"), Path("data", data)):
            if is_corpus(folder):
                return _made_with(open_corpus(folder), tokenizer)
    if is_corpus(path):
        return _made_with(open_corpus(path), tokenizer)
    if data in sources.NAMES or path.exists():
        cached = _cache_path(sources.source(data), tokenizer, task)
        with contextlib.suppress(ConfigError):  # a damaged entry of the cache is made again
            return open_corpus(cached) if is_corpus(cached) else None
    elif _is_plain_name(data):
        for cached in sorted(_cache().glob("*"), key=_modified, reverse=True):
            if cached.name.startswith(data) and is_corpus(cached) and not cached.name.startswith("."):
                corpus = open_corpus(cached)
                fits = task == "lm" or corpus.classes
                if fits and corpus.name in (data, f"{data}-{tokenizer}"):
                    return _made_with(corpus, tokenizer)
    return None


def check(data: str, tokenizer: str, block_size: int, task: str = "lm") -> None:
    """Refuses, in under a second, text that cannot be trained on; a small one is prepared at once to know.

    Raises:
        ConfigError: missing, empty or unreadable; a folder without text; shorter than block_size.
    """
    if (corpus := find(data, tokenizer, task)) is not None:
        return corpus.check_length(block_size, task)
    text = _source(data)
    if text.size is not None and text.size <= _AT_ONCE[tokenizer]:
        return prepare(data, tokenizer, task=task).check_length(block_size, task)
    if tokenizer == "gpt2":
        get_tokenizer(tokenizer)
    if task == "classify":
        return labelled.check_form(text)
    most = VAL_BYTES if text.size is None else text.size // 10 + 1  # tokens that validation can have
    if block_size + 1 > most:
        raise ConfigError(
            f"block_size {block_size} is longer than the validation part of {data}: use at most {most - 1}."
        )


def seen_from(folder: Path, data: str) -> str:
    """`data` as it is meant in another working folder: a path from there where it leads to something, else as it is."""
    try:
        inside = folder / data
        return str(inside) if data.strip() and inside.exists() else data
    except OSError:  # a name that no file can have: who opens it says so
        return data


def ensure(data: str, tokenizer: str, progress: Progress | None = None, task: str = "lm") -> Corpus:
    """The corpus, prepared now if it is not yet."""
    return prepare(data, tokenizer, progress=progress, task=task)


def prepare(
    data: str, tokenizer: str, *, out: Path | None = None, progress: Progress | None = None, task: str = "lm"
) -> Corpus:
    """Tokenizes a source into `out`, or into the user's cache; what is there already is not done again.

    The folder appears whole or not at all, and two may do it at once: the first to end wins.

    Raises:
        ConfigError: the text is missing, unreadable, not UTF-8, or too short; `out` holds something else.
    """
    if out is None and (corpus := find(data, tokenizer, task)) is not None:
        return corpus
    _check_tokenizer(tokenizer)
    text = _source(data)
    target = _cache_path(text, tokenizer, task) if out is None else _path(str(out))
    if out is not None and target.exists() and not (target.is_dir() and not any(target.iterdir())):
        if is_corpus(target) and _same(there := open_corpus(target), text, tokenizer, task):
            return there
        raise ConfigError(f"{out} exists and holds something else: choose another folder, or remove it.")
    report = progress or (lambda share, message: None)
    beside = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        _remove_stale(target)
        beside.mkdir(parents=True)
        build(text, tokenizer, beside, report, task)
        _publish(beside, target)
    except OSError as error:
        other = "choose another folder" if out is not None else "set XDG_CACHE_HOME to a folder that can be written"
        raise ConfigError(f"{target} cannot be written ({error.strerror}): mend that, or {other}.") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    report(1.0, "done")
    return open_corpus(target)


def list_corpora() -> list[Corpus]:
    """All prepared corpora of ./data and the user's cache, by name; damaged ones are left out."""
    found, roots = [], [Path("data")]
    with contextlib.suppress(ConfigError):  # no home, and so no cache
        roots.append(_cache())
    for root in roots:
        for path in root.glob("*"):
            if not path.name.startswith(".") and is_corpus(path):
                with contextlib.suppress(ConfigError):
                    found.append(open_corpus(path))
    return sorted(found, key=lambda corpus: corpus.name)


def _publish(beside: Path, target: Path) -> None:
    """Gives the finished folder its name; whoever was first keeps it, unless theirs is damaged."""
    try:
        beside.rename(target)
    except OSError:
        with contextlib.suppress(ConfigError):
            open_corpus(target)
            return
        target.rename(beside.with_suffix(".broken"))
        beside.rename(target)
        shutil.rmtree(beside.with_suffix(".broken"), ignore_errors=True)


def _remove_stale(target: Path) -> None:
    """Removes what a preparation that was killed left beside its target, once it is a day old."""
    for part in target.parent.glob(f".{target.name}.*.part"):
        if time.time() - _modified(part) > _STALE_S:
            shutil.rmtree(part, ignore_errors=True)


def _cache() -> Path:
    return cache_folder() / "corpora"


def _cache_path(text: Source, tokenizer: str, task: str) -> Path:
    """Where the cache keeps this text; another format, tokenizer or state of it, or labels, are another folder."""
    parts = (VERSION, text.fingerprint, tokenizer) + ((task,) if task != "lm" else ())
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
    name = os.fsencode(text.name)[:80].decode(errors="ignore")  # file systems count bytes
    return _cache() / f"{name}-{tokenizer}-{key}"


def _source(data: str) -> Source:
    """The source that `data` names; where there is none, the error knows the corpora too."""
    if data in sources.NAMES or (path := _path(data)).exists():
        if data not in sources.NAMES and path.suffix == ".bin" and path.is_file():
            raise ConfigError(f"{data} is a file of tokens, not of text: give the folder that has it as train.bin.")
        return sources.source(data)
    known = [*sources.NAMES, *(corpus.name for corpus in list_corpora())]
    raise ConfigError(
        f"There is no file, folder or prepared corpus {data!r}{did_you_mean(data, known)}: give a path, or a "
        f"source's name ({', '.join(sources.NAMES)})."
    )


def _path(data: str) -> Path:
    """`data` as a path that the system can be asked about."""
    try:
        path = Path(data).expanduser()
        path.exists()
        if "\0" in data:
            raise ValueError("it has a zero byte")
    except (OSError, RuntimeError, ValueError) as error:  # too long, no permission on the way, no such user's home
        why = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise ConfigError(f"{data[:60]!r} cannot be looked for ({why}): give another path.") from None
    if not data.strip():
        raise ConfigError("data is empty: give a source's name, a prepared corpus, a text file or a folder.")
    return path


def _check_tokenizer(name: str) -> None:
    if name not in NAMES:
        raise ConfigError(
            f"tokenizer {name!r} is unknown{did_you_mean(name, NAMES)}: choose one of {', '.join(NAMES)}."
        )


def _made_with(corpus: Corpus, tokenizer: str) -> Corpus:
    """The corpus, if its tokenizer is the one that is asked for."""
    has = corpus.meta["tokenizer"]["name"]
    if has != tokenizer:
        raise ConfigError(
            f"The corpus {corpus.path} was prepared with tokenizer {has}, not {tokenizer}: use tokenizer {has}."
        )
    return corpus


def _same(corpus: Corpus, text: Source, tokenizer: str, task: str) -> bool:
    about = corpus.meta.get("source")
    same_text = isinstance(about, dict) and about.get("fingerprint") == text.fingerprint
    return same_text and bool(corpus.classes) == (task == "classify") and corpus.meta["tokenizer"]["name"] == tokenizer


def _is_plain_name(data: str) -> bool:
    return data not in ("", ".", "..", "~") and Path(data).name == data


def _modified(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0
