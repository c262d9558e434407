"""A prepared corpus: the folder of token files that training maps into memory, read.

    >>> from gptlab.prepared import open_corpus
    >>> open_corpus("data/pysrc-byte").split("train")[:4]    # doctest: +SKIP

Left out on purpose: how such folders are found and made (`corpus.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlab.config import ConfigError
from gptlab.preparing import FORMAT, VERSION, Split
from gptlab.tokenfile import layout
from gptlab.tokenizer import Tokenizer, from_meta, vocab_size_of

if TYPE_CHECKING:
    import numpy as np

    from gptlab.documents import Documents

_SPLITS: tuple[Split, Split] = ("train", "val")


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: where it is and what its meta.json says."""

    path: Path
    meta: dict[str, Any]

    @property
    def name(self) -> str:
        """Such as pysrc-byte."""
        return self.meta["name"]

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer has."""
        return self.meta["vocab_size"]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """How its text became ids."""
        return from_meta(self.meta["tokenizer"])

    @cached_property
    def sha256(self) -> str:
        """Hex SHA-256 of all ids as they stand on disk, train then val, without headers, and of labels too."""
        if self.meta.get("format") == FORMAT:
            return str(self.meta["sha256"])
        return self._read_through()

    def split(self, split: Split) -> np.ndarray:
        """The ids of "train" or "val", (n,) uint16 or uint32, mapped from disk and read-only."""
        import numpy as np

        path = self.path / f"{split}.bin"
        found = layout(path)
        return np.memmap(path, found.dtype, "r", found.offset, (found.tokens,))

    @property
    def classes(self) -> list[str]:
        """Names of the documents' classes; none where the text has no labels."""
        return self.meta.get("labels", {}).get("names", [])

    def documents(self, split: Split) -> Documents:
        """The labelled documents of "train" or "val"."""
        from gptlab.documents import Documents

        pad, labels = self.tokenizer.eot, self.meta["labels"].get(split)
        assert pad is not None, "documents end with the end-of-text id"
        found = Documents(self.split(split), labels, names=self.classes, pad=pad)
        if len(found.ends) != len(found):
            raise ConfigError(
                f"{self.path / split}.bin has {len(found.ends)} documents and meta.json {len(found)} labels: prepare "
                "the corpus again."
            )
        return found

    def check_length(self, block_size: int, task: str = "lm") -> None:
        """ConfigError when a split has not one window: block_size ids and the one that follows. Labelled documents may
        be shorter."""
        if task == "classify":
            if not self.classes:
                raise ConfigError(f"The corpus {self.path} has no labels, which task classify needs: prepare it anew.")
            return
        lengths = {name: layout(self.path / f"{name}.bin").tokens for name in _SPLITS}
        name, tokens = min(lengths.items(), key=lambda item: item[1])
        if tokens < block_size + 1:
            mend = f"use a block_size of at most {tokens - 1}, or more text" if tokens > 1 else "use more text"
            raise ConfigError(
                f"The {name} part of {self.name} has {tokens} tokens, and block_size {block_size} needs "
                f"{block_size + 1}: {mend}."
            )

    def _read_through(self) -> str:
        """Hash of token files that came without one; each id is looked at, since others wrote them."""
        digest = hashlib.sha256()
        for name in _SPLITS:
            tokens = self.split(name)
            for start in range(0, len(tokens), 1 << 22):
                part = tokens[start : start + (1 << 22)]
                if part.max() >= self.vocab_size:
                    raise ConfigError(
                        f"{self.path / name}.bin has token {part.max()}, more than the {self.vocab_size} of tokenizer "
                        f"{self.meta['tokenizer']['name']}: say in a meta.json which tokenizer it was made with."
                    )
                digest.update(part.tobytes())
        return digest.hexdigest()


def open_corpus(path: str | os.PathLike[str]) -> Corpus:
    """A prepared folder: ours, or nanoGPT's (tokenizer gpt2, unless a meta.json names another).

    Raises:
        ConfigError: it is no such folder, a file is cut short, or meta.json is not ours.
    """
    path = Path(path)
    if not is_corpus(path):
        raise ConfigError(f"{path} is not a prepared corpus: it needs train.bin and val.bin; prepare it from its text.")
    meta = _read_meta(path)
    if meta is None:
        if (path / "meta.pkl").exists():
            raise ConfigError(
                f"{path} has nanoGPT's meta.pkl, which is not opened since a pickle can run code: prepare its text "
                "anew, or add a meta.json that names the tokenizer (data/README.md)."
            )
        meta = {"tokenizer": {"name": "gpt2"}}
    try:
        vocab_size = vocab_size_of(meta.get("tokenizer"))
    except ConfigError as error:
        raise ConfigError(f"{path / 'meta.json'}: {error}") from None
    layouts = [layout(path / f"{name}.bin") for name in _SPLITS]
    for name, found in zip(_SPLITS, layouts, strict=True):
        if meta.get("format") == FORMAT and (
            not isinstance(meta.get(name), dict) or meta[name].get("tokens") != found.tokens
        ):
            raise ConfigError(f"{path / name}.bin and meta.json disagree on the number of tokens: prepare it again.")
    if meta.get("format") != FORMAT:
        meta = {"name": path.resolve().name, "tokenizer": meta["tokenizer"]}
    elif not isinstance(meta.get("name"), str) or not isinstance(meta.get("sha256"), str):
        raise ConfigError(f"{path / 'meta.json'} has no name or no sha256: prepare the corpus again.")
    dtype = "uint32" if layouts[0].dtype == "<u4" else "uint16"
    return Corpus(path, meta | {"vocab_size": vocab_size, "dtype": dtype})


def _read_meta(path: Path) -> dict[str, Any] | None:
    """meta.json, or None where there is none."""
    try:
        meta = json.loads((path / "meta.json").read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        raise ConfigError(f"{path / 'meta.json'} is not readable JSON: prepare the corpus again.") from None
    if not isinstance(meta, dict) or (meta.get("format") == FORMAT and meta.get("version") != VERSION):
        raise ConfigError(f"{path / 'meta.json'} is not of version {VERSION} of {FORMAT}: prepare the corpus again.")
    return meta


def is_corpus(path: Path) -> bool:
    """Whether a folder has the files of a prepared corpus, as far as one may look."""
    return all(os.path.isfile(path / f"{split}.bin") for split in _SPLITS)
