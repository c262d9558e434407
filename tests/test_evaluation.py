"""A score counts every token but the first once, in nats, bits and bytes; and whatever cannot be scored is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gptlab import corpus, evaluation, hardware
from gptlab.cli import main
from gptlab.config import ConfigError, GPTConfig, TrainConfig
from gptlab.evaluation import Score, covering_windows, fixed_windows, padded_windows, score, split_bytes, windows_hash
from gptlab.loss import IGNORED
from gptlab.model import GPT
from gptlab.parallel.world import World
from gptlab.recording import create_run
from gptlab.runs import Run, write_json
from gptlab.tokenizer import CharTokenizer, get_tokenizer
from gptlab.worker import run_rank

ALONE = World(0, 1, torch.device("cpu"))
TOKENS = np.random.default_rng(0).integers(0, 65, 100).astype(np.uint16)


class Uniform(nn.Module):
    """Gives every one of 8 ids the same chance."""

    def forward(self, ids: Tensor, targets: Tensor, *, reduction: str) -> Tensor:
        return (targets != IGNORED).sum() * math.log(8)


def test_a_uniform_model_has_its_logarithm() -> None:
    found = score(evaluation.Plain(Uniform(), 4), TOKENS, covering_windows(TOKENS, 7), 7, world=ALONE, size=33)
    assert found.tokens == 99 and found.perplexity == pytest.approx(8)
    assert found.bits_per_byte == pytest.approx(3 * 99 / 33)
    assert Score(1.0, 2).bits_per_byte is None


@pytest.mark.parametrize("length", [2, 16, 17, 18, 33, 100])
@pytest.mark.parametrize("micro", [1, 3])
def test_every_token_but_the_first_is_predicted_once(length: int, micro: int) -> None:
    tokens = TOKENS[:length]
    starts = covering_windows(tokens, 16)
    seen: list[int] = []
    for at in range(0, len(starts), micro):
        ids, targets = padded_windows(tokens, starts[at : at + micro], 16)
        assert ids.shape == targets.shape
        seen += targets[targets != IGNORED].tolist()
    assert seen == tokens[1:].tolist()
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=65), seed=1).train()
    nats = 0.0
    for start in starts:
        piece = torch.from_numpy(tokens[start : start + 17].astype(np.int64))[None]
        with torch.no_grad():
            nats += model(piece[:, :-1], piece[:, 1:], reduction="sum").item()
    found = score(evaluation.Plain(model, micro), tokens, starts, 16, world=ALONE)
    assert found.nats == pytest.approx(nats, rel=1e-6) and found.tokens == length - 1 and model.training


def test_the_fixed_set_is_the_same_each_time_and_has_no_window_twice() -> None:
    starts = fixed_windows(TOKENS, 5, 8)
    assert starts.tolist() == fixed_windows(TOKENS, 5, 8).tolist() == sorted(set(starts.tolist()))
    assert len(starts) == 5 and all(start % 8 == 0 and start + 8 < 100 for start in starts)
    assert fixed_windows(TOKENS, 99, 8).tolist() == list(range(0, 96, 8))


def test_the_hash_is_of_what_is_looked_at() -> None:
    starts = fixed_windows(TOKENS, 5, 8)
    changed = TOKENS.copy()
    changed[starts[2] + 8] += 1  # the last target of a window
    known = windows_hash(TOKENS, starts, 8)
    assert known == windows_hash(TOKENS.astype("<u4"), starts, 8) != windows_hash(changed, starts, 8)
    assert known != windows_hash(TOKENS, starts[:4], 8)


def test_bytes_are_those_of_the_predicted_tokens(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name in range(30):
        (tmp_path / "texts" / f"{name}.txt").write_text(f"Grüße, {name}! " * 9)
    for tokenizer in ("byte", "char"):
        text = corpus.ensure(str(tmp_path / "texts"), tokenizer)
        tokens = text.split("val")
        assert (tokens == text.tokenizer.eot).any()
        wanted = len(text.tokenizer.decode_bytes(tokens[1:][tokens[1:] != text.tokenizer.eot]))
        assert split_bytes(text, "val") == wanted
        unsaid = corpus.Corpus(text.path, {key: value for key, value in text.meta.items() if key != "val"})
        assert split_bytes(unsaid, "val") == wanted


def test_a_text_file_is_read_with_the_models_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("äbc\r\n".encode())
    ids, size = evaluation.read_text(path, get_tokenizer("byte"))
    assert ids.tolist() == list("äbc\r\n".encode()) and size == 5
    assert evaluation.read_text(path, CharTokenizer("\n\rabcä"))[1] == 4
    for content, words in ((b"\xff\xfe", "UTF-8"), (b"", "empty"), (b"a", "1 tokens"), (b"xyz", "'x'")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            evaluation.read_text(path, CharTokenizer("abc"))
    with pytest.raises(ConfigError, match="no file"):
        evaluation.read_text(tmp_path / "none.txt", get_tokenizer("byte"))


# A whole run


@pytest.fixture
def run(tinytext: Path, tmp_path: Path) -> Run:
    config = TrainConfig(
        n_layer=1, n_head=2, n_embd=32, block_size=32, global_batch_size=4, max_iters=3, data=str(tinytext),
        tokenizer="char", device="cpu", dtype="float32", threads=1,
    )  # fmt: skip
    made = create_run(config, "a", tmp_path / "runs")
    (made.path / "attempts" / "01").mkdir(parents=True)
    return made


def trained(run: Run) -> Run:
    run_rank(run.path, attempt=1, rank=0, world_size=1, rendezvous="")
    return run


def test_eval_says_what_training_said(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    result: Any = trained(run).result()
    where = ["--runs-dir", str(run.path.parent)]
    capsys.readouterr()
    assert main(["eval", "a", "--json", *where]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["loss"] == pytest.approx(result["val_loss"], rel=1e-6) and record["split"] == "val"
    assert record["bits_per_byte"] == pytest.approx(result["val_bits_per_byte"], rel=1e-6)
    assert record["perplexity"] == pytest.approx(math.exp(record["loss"])) and record["step"] == 3
    assert main(["eval", "a", *where]) == 0
    line = capsys.readouterr().out
    assert f"{record['bits_per_byte']:.4f} bits a byte" in line and "a at step 3, val split" in line
    assert main(["eval", "a", "--split", "train", "--json", *where]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] > record["tokens"]


def test_eval_of_a_file_is_that_of_its_text(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = corpus.ensure(trained(run).config.data, "char")
    path = tmp_path / "val.txt"
    path.write_bytes(text.tokenizer.decode_bytes(text.split("val")))
    assert evaluation.evaluate(run, file=path)["loss"] == evaluation.evaluate(run)["loss"]
    where = ["--runs-dir", str(run.path.parent)]
    for line, words in (
        ("--split vla", "'val'"), (f"--split val --file {path}", "--split"), ("--file none.txt", "none.txt"),
    ):  # fmt: skip
        capsys.readouterr()
        assert main(["eval", "a", *line.split(), *where]) == 2
        out, err = capsys.readouterr()
        assert not out and words in err and len(err.splitlines()) == 1


def test_eval_finds_the_text_from_another_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, elsewhere = tmp_path / "there", tmp_path / "elsewhere"
    for folder in (there, elsewhere):
        folder.mkdir()
    shutil.copy(run.config.data, there / "text.txt")
    (elsewhere / "text.txt").write_text("Something else, of the same name.\n" * 500)
    info = run.info
    info["config"]["data"] = "text.txt"
    write_json(run.path / "run.json", info | {"cwd": str(there)})
    monkeypatch.chdir(there)
    wanted = (trained(run).result() or {})["val_loss"]
    monkeypatch.chdir(elsewhere)
    assert evaluation.evaluate(run)["loss"] == pytest.approx(wanted, rel=1e-6)
    shutil.rmtree(run.info["data"]["path"])  # the cache was emptied
    assert evaluation.evaluate(run)["loss"] == pytest.approx(wanted, rel=1e-6)


def test_eval_takes_the_text_that_the_run_began_on_and_no_other(run: Run) -> None:
    path = Path(trained(run).config.data)
    before = path.read_text()
    path.write_text(before + "More of it.\n" * 50)
    assert evaluation.evaluate(run)["loss"] == pytest.approx((run.result() or {})["val_loss"], rel=1e-6)
    shutil.rmtree(run.info["data"]["path"])
    with pytest.raises(ConfigError, match="no longer"):
        evaluation.evaluate(run)
    path.write_text(before)  # other tests read it too


def test_eval_wants_a_checkpoint(run: Run) -> None:
    with pytest.raises(ConfigError, match="no checkpoint yet"):
        evaluation.evaluate(run)


def test_a_precision_that_the_cpu_lacks_is_said_in_log_and_record(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = run.info
    info["config"]["dtype"] = "bfloat16"
    (run.path / "run.json").write_text(json.dumps(info))
    monkeypatch.setattr(hardware, "cpu_bfloat16", lambda: None)
    trained(run)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("dtype"))
    assert "dtype: float32" in line and hardware.FALLBACK in line
    assert run.info["setting"]["dtype"] == "float32" and run.info["reasons"]["dtype"].startswith(hardware.FALLBACK)
    assert run.info["config"]["dtype"] == "bfloat16"
