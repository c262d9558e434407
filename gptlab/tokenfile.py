"""The .bin file: token ids on disk, in llm.c's form, or nanoGPT's.

    from gptlab.tokenfile import layout
    layout(path).tokens

llm.c (dev/data/data_common.py): 256 int32, of which the first three are a magic number, a version and the number of
tokens; then the ids. 20240520 and 1 announce uint16, 20240801 and 7 uint32 (llm.c's pair for Llama 3's vocabulary),
which is written for more than 65,536 ids. nanoGPT's file is bare uint16, told apart by lacking both magic numbers: as
ids they would begin with 55448 or 56257, which no vocabulary of GPT-2's size has. All is little-endian.

Left out on purpose: files of more than 2^31 - 1 tokens, which the header cannot count.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from gptlab.config import ConfigError

HEADER_BYTES = 1024
"""256 int32."""
_MAGIC = {"uint16": (20240520, 1), "uint32": (20240801, 7)}
_WIDTH = {"uint16": 2, "uint32": 4}
_MOST = 2**31 - 1


@dataclass(frozen=True)
class Layout:
    """Where the ids of a file begin (bytes), how many there are, and numpy's name of their little-endian type."""

    offset: int
    tokens: int
    dtype: str


def header(tokens: int, dtype: str) -> bytes:
    """The 1024 bytes before the ids; `dtype` is uint16 or uint32.

    Raises:
        ConfigError: more tokens than the format can count.
    """
    if tokens > _MOST:
        raise ConfigError(f"The text has {tokens} tokens, and a .bin file at most {_MOST}: prepare it in parts.")
    return struct.pack("<3i", *_MAGIC[dtype], tokens).ljust(HEADER_BYTES, b"\0")


def layout(path: Path) -> Layout:
    """How to map a .bin file, found from its first 12 bytes and its size.

    Raises:
        ConfigError: it is missing, has no tokens, is cut short, or is of a version that is not known.
    """
    try:
        with path.open("rb") as file:
            start = file.read(12)
        size = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): prepare the corpus again.") from None
    magic, version, tokens = struct.unpack("<3i", start.ljust(12, b"\0"))
    for dtype, (known, wanted) in _MAGIC.items():
        if magic == known:
            if version != wanted:
                raise ConfigError(f"{path} is of version {version}, and {wanted} is what is known: prepare it again.")
            if tokens < 1 or size != HEADER_BYTES + tokens * _WIDTH[dtype]:
                raise ConfigError(f"{path} should hold {tokens} tokens and has {size} bytes: prepare the corpus again.")
            return Layout(HEADER_BYTES, tokens, f"<u{_WIDTH[dtype]}")
    if size == 0 or size % 2:
        raise ConfigError(f"{path} has {size} bytes, which are no uint16 tokens: prepare the corpus again.")
    return Layout(0, size // 2, "<u2")
