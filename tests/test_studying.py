"""The subcommands of studies: fit, report, nanoGPT's logs as runs, CSV and TensorBoard out, rows for sweeps."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptlab.cli import main
from gptlab.config import ConfigError, TrainConfig
from gptlab.foreign import import_log
from gptlab.lab import report
from gptlab.mirror import Mirror, to_csv
from gptlab.recording import Claim, RunWriter, create_run
from gptlab.runs import Run, default_runs_dir

NANOGPT = """Overriding config with config/train_shakespeare_char.py:
# train a miniature character-level shakespeare model
out_dir = 'out-shakespeare-char'
eval_interval = 250 # keep frequent because we'll overfit
dataset = 'shakespeare_char'
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256 # context of up to 256 previous characters
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2
learning_rate = 1e-3 # with baby networks can afford to go a bit higher
max_iters = 5000
lr_decay_iters = 5000 # make equal to max_iters usually
min_lr = 1e-4 # learning_rate / 10 usually
warmup_iters = 100 # not super necessary potentially

Overriding: max_iters = 20
tokens per iteration will be: 16,384
found vocab_size = 65 (inside data/shakespeare_char/meta.pkl)
Initializing a new model from scratch
number of parameters: 10.65M
step 0: train loss 4.2874, val loss 4.2823
iter 0: loss 4.2649, time 27155.48ms, mfu -100.00%
iter 10: loss 3.1321, time 290.27ms, mfu 3.10%
iter 20: loss 2.7321, time 300.00ms, mfu 3.05%
step 20: train loss 2.6, val loss 2.5
"""


def made_run(name: str, folder: Path, **config: Any) -> Run:
    """A finished run that nobody trained."""
    run = create_run(TrainConfig(vocab_size=257, max_iters=3, **config), name, folder)
    with Claim(run.path) as claim:
        writer = RunWriter(run.path, claim.new_attempt())
        for step in (1, 2, 3):
            writer.log({"step": step, "tokens": 10 * step, "loss": 4.0 - step, "lr": 1e-3, "tokens_per_s": 5.0,
                        "mfu": 0.5, "time_s": float(step)})  # fmt: skip
        writer.log({"step": 3, "val_loss": 1.25})
        writer.result("finished", step=3, val_loss=1.25, tokens=30)
        writer.status("finished")
    return run


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Sizes, FLOPs and losses that follow a law, with a little noise."""
    noise = np.random.default_rng(0)
    path = tmp_path / "runs.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["params", "flops", "final_loss", "note"])
        for n in np.geomspace(1e7, 1e10, 5):
            for d in np.geomspace(1e9, 1e12, 5):
                loss = (1.69 + 406.4 / n**0.34 + 410.7 / d**0.28) * np.exp(noise.normal(0, 0.003))
                writer.writerow([n, 6 * n * d, loss, "x"])
    return path


def test_fit_reads_any_table_and_checks_itself(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", str(table), "--n", "params", "--c", "flops", "--loss", "final_loss", "--draws", "100"]
    assert main([*words, "--predict", "N=7e10,D=1.4e12", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["law"] == "L(N, D) = E + A/N^alpha + B/D^beta" and record["runs"] == 25
    low, high = record["intervals"]["alpha"]
    assert low < 0.34 < high and len(record["residuals"]) == 25
    (held,) = record["held_back"]
    assert held["D"] == pytest.approx(1e12) and abs(held["error"]) < 0.03
    assert record["predictions"][0]["loss"] == pytest.approx(1.69 + 406.4 / 7e10**0.34 + 410.7 / 1.4e12**0.28, rel=0.03)
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "alpha" in out and "held back" in out and "best split" in out


def test_fit_refuses_in_one_sentence(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = tmp_path / "few.csv"
    few.write_text("".join(table.read_text().splitlines(keepends=True)[:5]))
    assert main(["fit", str(few), "--n", "params", "--c", "flops", "--loss", "final_loss"]) == 2
    assert "4 runs cannot determine" in capsys.readouterr().err
    assert main(["fit", str(table), "--loss", "final_loss"]) == 2
    assert "--n" in capsys.readouterr().err
    assert main(["fit", str(table), "--n", "params", "--c", "flops", "--loss", "final_loss", "--predict", "N=3"]) == 2
    assert "N=1e9,D=1e9" in capsys.readouterr().err
    assert main(["fit", str(table), "--d", "params", "--c", "flops", "--loss", "final_loss"]) == 2
    assert "needs N" in capsys.readouterr().err


def test_a_report_is_one_escaped_file_without_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "<script>alert(1)</script>"
    made_run("one", default_runs_dir(), data=evil)
    made_run("two", default_runs_dir(), n_layer=2)
    out = tmp_path / "report.html"
    assert main(["report", "one", "two", "--out", str(out), "--title", evil]) == 0
    page = out.read_text()
    assert evil not in page and "&lt;script&gt;" in page and "<script" not in page
    assert page.count("<svg") >= 2 and "default-src 'none'" in page
    for outside in ("http://", "https://"):
        rest = page.replace("http://www.w3.org/", "")
        assert outside not in rest
    for word in ("one", "two", "n_layer", "What sets them apart", "1.250"):
        assert word in page
    assert "2 runs in" in capsys.readouterr().out
    assert main(["report", "three", "--out", str(out)]) == 2


def test_the_report_of_a_sweep_has_its_runs(tmp_path: Path) -> None:
    folder = default_runs_dir()
    made_run("s-2x6x384", folder, n_layer=2)
    manifest = {"base": TrainConfig().to_dict(), "grid": {"n_layer": [2]},
                "cells": [{"name": "2x6x384", "values": {"n_layer": 2}, "reason": None}]}  # fmt: skip
    (folder / "s.sweep.json").write_text(json.dumps(manifest))
    assert main(["report", "s", "--out", str(tmp_path / "r.html")]) == 0
    assert "s-2x6x384" in (tmp_path / "r.html").read_text()
    with pytest.raises(ConfigError, match="needs a run"):
        report.page([])


def test_nanogpt_logs_are_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "old.log"
    log.write_text(NANOGPT)
    assert main(["runs", "import", str(log), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["state"], row["step"], row["loss"], row["val_loss"]) == (
        "old",
        "finished",
        21,
        2.7321,
        2.5,
    )
    run = Run.open("old")
    config = run.config
    assert (config.n_layer, config.n_embd, config.dropout, config.vocab_size) == (6, 384, 0.2, 65)
    assert (config.global_batch_size, config.max_iters, config.min_lr) == (64, 20, 1e-4)
    rows = run.metrics()
    assert [one["step"] for one in rows] == [0, 1, 11, 20, 21]
    assert rows[2]["tokens"] == 11 * 16384 and rows[2]["tokens_per_s"] == pytest.approx(16384 / 0.29027)
    assert rows[2]["mfu"] is None and rows[2]["mfu_of_an_a100"] == pytest.approx(0.031)  # another chip's peak
    assert rows[0]["val_loss"] == 4.2823
    assert main(["report", "old", "--out", str(tmp_path / "r.html")]) == 0


def test_dlrovers_lines_and_what_a_log_does_not_say(tmp_path: Path) -> None:
    log = tmp_path / "dlrover.log"
    log.write_text("iter 10: loss 3.1321, time 290.27ms, mfu 3.10%, lr 6.00e-05, total time 33.12s\n")
    run = import_log(log, name="d", runs_dir=tmp_path / "r", given={"n_layer": 2, "n_head": 2, "n_embd": 64})
    (row,) = run.metrics()
    assert (row["lr"], row["time_s"]) == (6e-5, 33.12)
    assert run.state == "stopped" and run.config.block_size == 1024  # nanoGPT's default


@pytest.mark.parametrize(
    ("text", "given", "word"),
    [("hello\n", {}, "no line like"), (NANOGPT, {"n_layer": 3}, "counts 10.65M parameters"),
     (NANOGPT, {"layers": 3}, "no setting 'layers'")],
)  # fmt: skip
def test_what_is_no_log_or_another_shape_is_refused(
    text: str, given: dict[str, Any], word: str, tmp_path: Path
) -> None:
    log = tmp_path / "x.log"
    log.write_text(text)
    with pytest.raises(ConfigError, match=word):
        import_log(log, name="x", runs_dir=tmp_path / "r", given=given)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "line",
    ["batch_size = 'x'", "block_size = 0", "tokens per iteration will be: ,", "number of parameters: ...M",
     "learning_rate = 'fast'", "max_iters = [1]", "n_layer = -3", "n_layer = 2.5", "dropout = 1e400",
     "tokens per iteration will be: " + "9" * 5000, "found vocab_size = " + "9" * 5000, "n_layer = " + "(" * 3000,
     "iter 9999999999999999999: loss 1, time 1ms", "iter 5: loss nan, time nanms", "iter 5: loss inf, time 1e400ms",
     "n_layer = {[]: 1}"],
)  # fmt: skip
def test_a_spoilt_line_is_a_sentence_or_passed_over(line: str, tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text(f"{line}\niter 0: loss 4.2, time 20ms, mfu 1%\n{line}\n")
    try:
        run = import_log(log, name="x", runs_dir=tmp_path / "r")
    except ConfigError as error:
        assert "\n" not in str(error) and not (tmp_path / "r").exists()
    else:
        assert run.summary()["step"] >= 1


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    place=st.integers(0, len(NANOGPT)), put=st.text("0123456789.,eE+-'\"=([ x\n", max_size=12), cut=st.integers(0, 20)
)
def test_any_spoilt_log_is_a_run_or_a_sentence(place: int, put: str, cut: int, tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text(NANOGPT[:place] + put + NANOGPT[place + cut :])
    shutil.rmtree(tmp_path / "r", ignore_errors=True)
    try:
        import_log(log, name="x", runs_dir=tmp_path / "r").summary()
    except ConfigError as error:
        assert "\n" not in str(error) and not (tmp_path / "r").exists()


def test_a_log_is_data(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text(NANOGPT.replace("n_layer = 6", "n_layer = __import__('os').abort()"))
    with pytest.raises(ConfigError, match="parameters"):  # the line is no literal, so the default stands
        import_log(log, name="x", runs_dir=tmp_path)


def test_metrics_as_csv(capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run("one", default_runs_dir())
    assert main(["runs", "export", "one"]) == 0
    path = Path(capsys.readouterr().out.strip())
    with open(path) as file:
        rows = list(csv.DictReader(file))
    assert [row["loss"] for row in rows] == ["3.0", "2.0", "1.0"] and rows[2]["val_loss"] == "1.25"
    assert path == to_csv(run) == run.path / "metrics.csv"


def test_metrics_as_tensorboard_events_follow_the_newest_attempt(capsys: pytest.CaptureFixture[str]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = made_run("one", default_runs_dir())
    mirror = Mirror(run)
    mirror.update()
    with Claim(run.path) as claim:  # a worker was lost: steps 2 and 3 are taken again
        writer = RunWriter(run.path, claim.new_attempt())
        for step in (2, 3):
            writer.log({"step": step, "loss": 0.5 / step, "tokens_per_s": 5.0, "time_s": float(step)})
    mirror.close()
    events = accumulator.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert [(one.step, round(one.value, 6)) for one in events.Scalars("loss")] == [
        (1, 3.0),
        (2, 0.25),
        (3, 0.166667),
    ]
    assert main(["runs", "export", "one", "--tensorboard"]) == 0
    again = accumulator.EventAccumulator(capsys.readouterr().out.strip())
    again.Reload()
    assert [one.step for one in again.Scalars("loss")] == [1, 2, 3]


def test_training_writes_tensorboard_events_as_well(tinytext: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    words = [
        "train",
        "--data",
        str(tinytext),
        "--n-layer",
        "1",
        "--n-head",
        "1",
        "--n-embd",
        "16",
        "--block-size",
        "16",
    ]
    words += ["--global-batch-size", "4", "--max-iters", "5", "--device", "cpu", "--threads", "1", "--name", "tb"]
    assert main([*words, "--tensorboard"]) == 0
    events = accumulator.EventAccumulator(str(default_runs_dir() / "tb" / "tensorboard"))
    events.Reload()
    assert [one.step for one in events.Scalars("loss")] == [1, 2, 3, 4, 5]
    assert len(events.Scalars("val_loss")) == 1


def test_a_sweep_over_depths_budgets_and_seeds(monkeypatch: pytest.MonkeyPatch, tinytext: Path) -> None:
    from gptlab import dial, sweeps

    asked: list[Any] = []

    def pretended(base: TrainConfig, rows: Any, **more: Any) -> None:
        asked.append((rows, more))
        raise ConfigError("Enough seen.")

    monkeypatch.setattr(sweeps, "sweep", pretended)
    words = ["sweep", "--data", str(tinytext), "--block-size", "32"]
    assert main([*words, "--depth", "1", "2", "--seeds", "2", "--halving", "3"]) == 2
    rows, more = asked[-1]
    assert more["halving"] == 3
    assert [(row["n_layer"], row["n_embd"], row["seed"]) for row in rows] == [
        (1, 64, 1337), (1, 64, 1338), (2, 128, 1337), (2, 128, 1338),
    ]  # fmt: skip
    assert main([*words, "--isoflops", "1e13", "--depth", "1"]) == 2
    (row,) = asked.pop()[0]
    assert row["n_embd"] == 64 and row["warmup_iters"] == dial.warmup(row["max_iters"]), "of the steps there are"
    words += ["--global-batch-size", "4"]
    assert main([*words, "--isoflops", "1e10", "4e10", "--n-head", "1", "--n-layer", "1", "2", "--n-embd", "16"]) == 2
    rows, _ = asked[-1]
    assert [row["n_layer"] for row in rows] == [1, 2, 1, 2] and rows[0]["max_iters"] > rows[1]["max_iters"]
    assert rows[0]["learning_rate"] > 1e-3, "the rule of the dial"
    words += ["--n-head", "1", "--n-embd", "16"]
    assert main([*words, "--isoflops", "1e10", "--n-layer", "1", "2", "--learning-rate", "5e-4"]) == 2
    rows, _ = asked[-1]
    assert [row["learning_rate"] for row in rows] == [5e-4, 5e-4], "what is given stands"
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--depth 1 2 --n-layer 3 4", "--depth sets n_layer: leave out --n-layer."),
        ("--depth 2 --n-embd 64", "--depth sets n_embd"),
        ("--depth 2 --global-batch-size 4", "--depth sets global_batch_size: leave out --global-batch-size."),
        ("--depth 2 --learning-rate 1e-3 --max-iters 5", "--depth sets max_iters"),
        ("--isoflops 1e12 --max-iters 5", "--isoflops sets max_iters: leave out --max-iters."),
        ("--seeds 2 --seed 1 2", "--seeds counts on from one --seed"),
    ],
)
def test_no_flag_overrides_another_silently(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", *words.split()]) == 2
    assert said in capsys.readouterr().err
