"""Labelled documents: two forms of one thing, parted by class and by text; what has no label is refused by line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from labels import rows, write_folder, write_jsonl

from gptlab import corpus
from gptlab.config import ConfigError
from gptlab.labelled import read
from gptlab.sources import source


def texts(found: corpus.Corpus, split: str) -> list[tuple[str, str]]:
    """Text and class of a split's documents."""
    documents = found.documents(split)  # type: ignore[arg-type]
    ids, labels = documents.rows(documents.fixed(10**6), 200)
    decoded = [found.tokenizer.decode(row[row != documents.pad].numpy()) for row in ids]
    return [(text, found.classes[label]) for text, label in zip(decoded, labels.tolist(), strict=True)]


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_both_forms_are_the_same_documents(tokenizer: str, tmp_path: Path) -> None:
    wanted = {(row["text"], row["label"]) for row in rows(40)}
    sides = []
    for path in (write_jsonl(tmp_path / "a.jsonl"), write_folder(tmp_path / "b")):
        found = corpus.ensure(str(path), tokenizer, task="classify")
        assert found.classes == ["bad", "good"]
        train, val = texts(found, "train"), texts(found, "val")
        assert {*train, *val} == wanted and len(train) + len(val) == len(wanted)
        assert Counter(label for _, label in val) == {"good": 4, "bad": 4}
        sides.append((set(train), set(val)))
    assert sides[0] == sides[1]  # a text's hash decides, wherever it lies


def test_the_labels_are_part_of_the_hash_and_of_the_key(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl")
    labelled, plain = corpus.ensure(str(path), "byte", task="classify"), corpus.ensure(str(path), "byte")
    assert labelled.path != plain.path and not plain.classes
    again = corpus.find(str(path), "byte", "classify")
    assert again is not None and again.path == labelled.path and again.classes == ["bad", "good"]
    path.write_text(path.read_text().replace('"good"', '"best"'))
    assert corpus.ensure(str(path), "byte", task="classify").sha256 != labelled.sha256


def test_a_text_that_stands_twice_never_validates_what_it_trained(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n % 7}", "label": n % 7 % 2}) + "\n" for n in range(70)))
    found = corpus.ensure(str(path), "byte", task="classify")
    train, val = set(texts(found, "train")), set(texts(found, "val"))
    assert found.classes == ["0", "1"] and val and train and not train & val


def test_numbers_are_in_the_order_of_their_values(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n}", "label": n % 12}) + "\n" for n in range(36)))
    assert read(source(str(path))).names == [str(n) for n in range(12)]


GOOD = '{"text": "a", "label": "x"}\n{"text": "b", "label": "x"}\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "a", "label": "x"\n', "line 1, is not JSON"),
        ('\n[1]\n', 'line 2, has no "text"'),
        ('{"text": "", "label": "x"}\n', 'line 1, has no "text"'),
        ('{"text": "a", "label": null}\n', "line 1, has label None"),
        ('{"text": "a", "label": true}\n', "line 1, has label True"),
        ('{"text": "\\ud800", "label": "x"}\n', "half a surrogate"),
        (GOOD, "has 1 class"),
        (GOOD + '{"text": "c", "label": "y"}\n', "'y' has 1 text"),
        (GOOD + '{"text": "a", "label": 1}\n{"text": "c", "label": "1"}\n', "as a word and as a number"),
        ("\n", "has 0 class"),
    ],
)  # fmt: skip
def test_what_cannot_be_learnt_from_is_refused_at_once(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        corpus.check(str(path), "byte", 16, "classify")


def test_text_without_labels_is_refused(tinytext: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no labels, which task classify needs: give a folder"):
        corpus.check(str(tinytext), "byte", 16, "classify")
    with pytest.raises(ConfigError, match="pysrc has no labels"):
        corpus.check("pysrc", "byte", 16, "classify")
    folder = write_folder(tmp_path / "b")
    (folder / "stray.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"stray.txt lies in no subfolder"):
        corpus.check(str(folder), "byte", 16, "classify")
    made = corpus.prepare(str(tinytext), "byte", out=tmp_path / "made")
    with pytest.raises(ConfigError, match="has no labels"):
        corpus.check(str(made.path), "byte", 16, "classify")


def test_a_meta_json_that_lost_a_label_is_refused(tmp_path: Path) -> None:
    made = corpus.prepare(str(write_jsonl(tmp_path / "a.jsonl")), "byte", out=tmp_path / "made", task="classify")
    meta = json.loads((made.path / "meta.json").read_text())
    meta["labels"]["train"].pop()
    (made.path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match=r"72 documents and meta\.json 71 labels"):
        corpus.open_corpus(made.path).documents("train")
