"""The command: flags from the config, one sentence for a mistake, and runs from start to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gptlab.cli import COMMANDS, main
from gptlab.config import TrainConfig, field_docs, field_types
from gptlab.presets import preset
from gptlab.recording import Claim, RunWriter, create_run
from gptlab.runs import Run

LINE = "--n-layer 1 --n-head 2 --n-embd 32 --block-size 32 --global-batch-size 4 --max-iters 6 --tokenizer char"
TINY = [*LINE.split(), "--device", "cpu", "--dtype", "float32", "--threads", "1"]


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def finished_run(runs_dir: Path, name: str, **changes: Any) -> Run:
    run = create_run(preset("tiny", **changes), name, runs_dir)
    with Claim(run.path) as claim:
        writer = RunWriter(run.path, claim.new_attempt())
        writer.log({"step": 1, "loss": 2.5, "tokens_per_s": 1000.0, "mfu": 0.1, "time_s": 1.0})
        writer.result("finished", step=1, val_loss=2.25)
        writer.status("finished")
    return run


# Mistakes


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train --n-layers 3", ["--n-layers", "'--n-layer'"]),
        ("train --n_layers=3", ["--n_layers", "'--n-layer'"]),
        ("train --n-lay 3", ["--n-lay", "'--n-layer'"]),  # no abbreviations
        ("trian", ["'trian'", "'train'"]),
        ("train --n-layer two", ["n_layer", "'two'", "whole number"]),
        ("train --n-layer", ["--n-layer", "expected one argument"]),
        ("train --n-embd 96 --n-head 7", ["n_embd 96", "n_head 7"]),
        ("train --max-iters -4", ["max_iters", "-4"]),
        ("train --learning-rate nan", ["learning_rate"]),
        ("train --dtype float23", ["'float23'", "'float32'"]),
        ("train --preset 11m", ["'11m'", "'1"]),
        ("train --data none/such.txt --tokenizer char", ["none/such.txt"]),
        ("train --resume nothing", ["'nothing'"]),
        ("train --resume nothing --n-layer 3", ["--n-layer"]),
        ("train surplus", ["surplus"]),
        ("train --preset gpt2-xl --n-layer 900 --data pysrc", ["GB"]),
        ("sample nothing --prompt x", ["'nothing'"]),
        ("sample nothing --promt x", ["--promt", "'--prompt'"]),
        ("eval nothing", ["'nothing'"]),
        ("train --schedule wds", ["'wds'", "'wsd'"]),
        ("sweep --n-layer 1 --bias maybe", ["bias", "'maybe'"]),
        ("sweep --n-head 5 7 --n-embd 64", ["n_head"]),
        ("runs shwo", ["'shwo'", "'show'"]),
        ("runs rm", ["name"]),
        ("runs show nothing", ["'nothing'"]),
        ("data prepare", ["source"]),
        ("data prepare none/such.txt", ["none/such.txt"]),
        ("cost --preset gpt3", ["'gpt3'", "'gpt2'"]),
    ],
)
def test_a_mistake_is_one_sentence_and_makes_nothing(
    line: str, words: list[str], runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1, (out, err)
    for word in words:
        assert word in err, err
    assert not runs_dir.exists()


def test_a_text_that_cannot_be_trained_on_makes_nothing(
    tmp_path: Path, runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("empty.txt", ""), ("short.txt", "to be or not")):
        path = tmp_path / name
        path.write_text(text)
        assert main(["train", "--data", str(path), *TINY]) == 2
        out, err = capsys.readouterr()
        assert out == "" and len(err.splitlines()) == 1
    assert not runs_dir.exists()


def test_the_command_itself_answers_a_mistake_soon(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gptlab.cli", "train", "--n-layers", "3"], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 2 and "--n-layer" in done.stderr and "Traceback" not in done.stderr


# Flags and help


def test_every_field_is_a_flag_with_its_docstring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    for command in ("train", "sweep", "cost"):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
        shown = " ".join(capsys.readouterr().out.split())
        for name, doc in field_docs(TrainConfig).items():
            assert f"--{name.replace('_', '-')}" in shown
            assert " ".join(doc.split()) in shown, name


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown and text in shown for name, (text, _) in COMMANDS.items())
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip()[0].isdigit()


def recorded(line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """The config that `gptlab cost` was asked about."""
    asked: list[TrainConfig] = []

    def cost(config: TrainConfig) -> dict[str, Any]:
        asked.append(config)
        return {}

    monkeypatch.setattr("gptlab.costs.cost", cost)
    assert main(["cost", "--json", *line.split()]) == 0
    capsys.readouterr()
    return asked[0]


def test_flags_change_a_preset(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = recorded(
        "--preset 3m --n_layer 2 --n-embd=128 --no-bias --min-lr none --deterministic", capsys, monkeypatch
    )
    assert config == preset("3m", n_layer=2, n_embd=128, bias=False, min_lr=None, deterministic=True)
    assert recorded("", capsys, monkeypatch) == TrainConfig()
    assert recorded("--preset tiny --tokenizer gpt2", capsys, monkeypatch).vocab_size == 50257


def test_every_field_takes_its_own_default(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = []
    for name in field_types(TrainConfig):
        value, flag = getattr(TrainConfig, name), name.replace("_", "-")
        words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    assert recorded(" ".join(words), capsys, monkeypatch) == TrainConfig()


def test_a_relative_text_is_made_absolute(
    tinytext: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tinytext.parent)
    assert recorded(f"--data {tinytext.name}", capsys, monkeypatch).data == str(tinytext)
    (Path("pysrc")).mkdir(exist_ok=True)
    assert recorded("--data pysrc", capsys, monkeypatch).data == "pysrc"


# Light commands


@pytest.mark.parametrize(
    ("size", "count"),
    [("gpt2", 124439808), ("gpt2-medium", 354823168), ("gpt2-large", 774030080), ("gpt2-xl", 1557611200)],
)
def test_cost_knows_the_published_counts(size: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "--preset", size, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == count
    assert main(["cost", "--preset", size]) == 0
    assert f"{count:,}" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["cost --preset gpt2", "runs", "doctor"])
def test_light_commands_answer_at_once(line: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gptlab.cli", *line.split()]
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.7


def test_runs_are_listed_shown_and_removed(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    assert "no runs yet" in capsys.readouterr().out
    finished_run(runs_dir, "one")
    finished_run(runs_dir, "two", n_layer=4)
    assert main(["runs"]) == 0
    table = capsys.readouterr().out
    assert "one" in table and "2.2500" in table and "10.00%" in table
    assert main(["runs", "list", "--json"]) == 0
    assert [(row["name"], row["n_layer"]) for row in json.loads(capsys.readouterr().out)] == [("one", 2), ("two", 4)]
    assert main(["runs", "show", "one"]) == 0
    assert str(runs_dir / "one") in capsys.readouterr().out
    assert main(["runs", "show", "two", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["val_loss"] == 2.25
    assert main(["runs", "rm", "one"]) == 0
    assert "one is removed" in capsys.readouterr().out
    assert not (runs_dir / "one").exists() and (runs_dir / "two").exists()
    assert main(["runs", "stop", "two"]) == 2
    assert main(["runs", "rm", "two", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"name": "two", "state": "removed"}]


def test_a_run_at_work_is_stopped_but_not_removed(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = create_run(preset("tiny"), "busy", runs_dir)
    with Claim(run.path) as claim:
        RunWriter(run.path, claim.new_attempt()).status("running")
        assert main(["runs", "rm", "busy"]) == 2 and run.path.exists()
        assert main(["runs", "stop", "busy"]) == 0
        assert (run.path / "stop").exists()


def test_data_is_prepared_and_listed(tinytext: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list"]) == 0
    assert "no corpora yet" in capsys.readouterr().out
    assert (
        main(["data", "prepare", str(tinytext), "--tokenizer", "char", "--out", str(tmp_path / "out"), "--json"]) == 0
    )
    row = json.loads(capsys.readouterr().out)
    assert row["tokenizer"] == "char" and row["train_tokens"] > row["val_tokens"] > 1000
    assert (tmp_path / "out" / "train.bin").exists()
    assert main(["data", "prepare", str(tinytext)]) == 0
    assert "tokens to train on" in capsys.readouterr().out
    assert main(["data"]) == 0
    assert "byte" in capsys.readouterr().out


def test_doctor_says_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "cores" in text and "torch" in text
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cores"] >= 1


def test_who_stops_reading_causes_no_trouble(runs_dir: Path) -> None:
    for number in range(3):
        finished_run(runs_dir, f"r{number}")
    for line, reader in (
        ("runs", "true"),
        ("runs --json", "grep -q r0"),
        ("cost --preset gpt2 --json", "grep -q 124439808"),
    ):
        command = f"set -o pipefail; {sys.executable} -u -m gptlab.cli {line} | {reader}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert done.stderr == ""
        assert reader == "true" or done.returncode == 0


# Real runs


def start(*words: str) -> subprocess.Popen[str]:
    # -u: lines are to be seen as they come.
    command = [sys.executable, "-u", "-m", "gptlab.cli", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_train_prints_its_lines_and_leaves_a_run_that_can_be_sampled(
    tinytext: Path, runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--name", "first", "--data", str(tinytext), *TINY, "--log-interval", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines if line.startswith("iter")] == [
        "iter 1",
        "iter 2",
        "iter 4",
        "iter 6",
    ]
    assert lines[-1].startswith("finished at step 6, val loss ") and str(runs_dir / "first") in lines[-1]
    assert main(["sample", "first", "--prompt", "def ", "--max-new-tokens", "20", "--seed", "1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("def ") and len(text) > 10
    assert main(["sample", "first", "--prompt", "def ", "--max-new-tokens", "20", "--seed", "1", "--json"]) == 0
    (made,) = json.loads(capsys.readouterr().out)["samples"]
    assert made["prompt"] == "def " and f"def {made['text']}\n" == text
    several = [
        "sample",
        "first",
        "--prompt",
        "def ",
        "--prompt",
        "class Longer",
        "--max-new-tokens",
        "70",
        "--seed",
        "1",
    ]
    ways = ["--top-p", "0.9", "--top-k", "40", "--repetition-penalty", "1.1", "--stop-id", "0"]  # a line end
    assert main([*several, *ways]) == 0
    first, second = capsys.readouterr().out.split("\n---\n")
    assert first.startswith("def ") and second.startswith("class Longer") and "\n" not in first
    assert main([*several, *ways, "--no-cache", "--json"]) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    assert [one["prompt"] + one["text"] for one in samples] == [first, second[:-1]]
    assert main([*several, "--dtype", "bfloat17"]) == 2 and main([*several, "--device", "gpu"]) == 2
    assert "'bfloat17' is unknown" in (said := capsys.readouterr().err) and "'gpu' is unknown" in said
    assert main(["train", "--name", "first", "--data", str(tinytext), *TINY]) == 2
    assert "already" in capsys.readouterr().err


def test_it_works_with_its_outputs_closed(tinytext: Path, runs_dir: Path) -> None:
    words = ["--name", "quiet", "--data", str(tinytext), *TINY, "--runs-dir", str(runs_dir)]
    for closed in (">&-", ">&- 2>&-"):
        command = ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-m", "gptlab.cli"]
        ended = subprocess.run([*command, "runs", "--json", "--runs-dir", str(runs_dir)], stderr=subprocess.PIPE)
        assert (ended.returncode, ended.stderr) == (0, b"")
    assert subprocess.run([*command, "train", *words]).returncode == 0
    assert Run.open("quiet", runs_dir).state == "finished"


def test_an_interrupt_stops_with_a_checkpoint_and_resume_goes_on(tinytext: Path, runs_dir: Path) -> None:
    # Of no end: however late the signal comes, it interrupts.
    words = ["--name", "long", "--data", str(tinytext), *TINY, "--log-interval", "1", "--max-iters", "1000000"]
    process = start("train", *words)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("iter 3:"):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "stopping after this step" in err and out.splitlines()[-1].startswith("stopped at step ")
    run = Run.open("long", runs_dir)
    assert run.checkpoints() and (run.result() or {})["status"] == "stopped"
    for pid in run.status().get("pids", []):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    before = run.step()
    process = start("train", "--resume", "long")
    assert process.stdout is not None
    assert any(line.startswith("iter ") for line in process.stdout)  # from the first on it heeds signals
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and out.splitlines()[-1].startswith("stopped at step "), err
    assert run.step() > before
    assert [row["step"] for row in run.metrics() if "loss" in row] == list(range(1, run.step() + 1))


def test_a_sweep_ends_with_its_table(tinytext: Path, runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--name", "grid", "--data", str(tinytext), *TINY]
    words[words.index("--n-head") + 1 : words.index("--n-head") + 2] = ["2", "5"]
    assert main(["sweep", *words]) == 0
    out = capsys.readouterr().out
    assert "grid-1x2x32: finished, val loss" in out and "grid-1x5x32: invalid: n_embd 32" in out
    assert str(runs_dir / "grid.sweep.csv") in out and (runs_dir / "grid.sweep.csv").exists()
    assert main(["sweep", *words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["state"] for row in rows] == ["finished", "invalid"]
