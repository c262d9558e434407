"""What the subcommands of studies tell a person: predictions, held-back runs, tuning, imports and spreads."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptlab import tuning
from gptlab.cli import main
from gptlab.config import TrainConfig
from gptlab.runs import default_runs_dir
from gptlab.studying import print_spread

LOG = "iter 0: loss 4.2, time 20ms, mfu 1%\n"


@pytest.fixture
def sizes(tmp_path: Path) -> Path:
    """Five sizes whose losses follow a law of N exactly: too few to hold one back."""
    path = tmp_path / "sizes.csv"
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([["n", "loss"], *([n, 1.69 + 406.4 / n**0.34] for n in (1e7, 1e8, 1e9, 3e9, 1e10))])
    return path


@pytest.fixture
def budgets(tmp_path: Path) -> Path:
    """Four budgets of FLOPs with a lowest loss within the sizes of each; best N grows as C^(0.28 / 0.62)."""
    path, rows = tmp_path / "budgets.csv", [["n", "c", "loss"]]
    for c in np.geomspace(1e17, 1e20, 4):
        for n in 0.3 * (c / 6) ** 0.5 * np.array([0.1, 0.3, 1.0, 3.0, 10.0]):
            rows.append([n, c, 1.69 + 406.4 / n**0.34 + 410.7 / (c / 6 / n) ** 0.28])
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def test_a_fit_of_too_few_to_hold_back_says_so_and_predicts(sizes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", str(sizes), "--n", "n", "--loss", "loss", "--draws", "20", "--predict", "N=2e10"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "held back    no check: 4 runs cannot determine the 3 parameters" in out
    assert f"predicted    N 2e+10: loss {1.69 + 406.4 / 2e10**0.34:.4f}" in out and "best split" not in out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["held_back"].startswith("4 runs cannot")


def test_a_fit_with_budgets_says_how_the_best_size_grows(budgets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(budgets), "--n", "n", "--c", "c", "--loss", "loss", "--draws", "20"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("iso-FLOP")]
    assert float(line.split("C^")[1].split()[0]) == pytest.approx(0.28 / 0.62, abs=0.01)
    few = budgets.with_name("few.csv")  # two sizes a budget: none has a lowest point
    rows = budgets.read_text().splitlines()
    few.write_text("\n".join([rows[0], *(row for at in (1, 6, 11, 16) for row in rows[at : at + 2])]))
    assert main(["fit", str(few), "--n", "n", "--c", "c", "--loss", "loss", "--draws", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["isoflop"] is None


@pytest.mark.parametrize("point", ["N=x", "N", "N=nan", "N=inf", "N=0", "N=-1", "D=1e9", "N=1e9,D=1e9"])
def test_what_is_no_point_is_not_predicted(point: str, sizes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(sizes), "--n", "n", "--loss", "loss", "--draws", "20", "--predict", point]) == 2
    assert capsys.readouterr().err == f"--predict {point} is no point: give N=1e9.\n"


def test_tune_writes_what_it_found_where_it_was_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tuned(config: TrainConfig, budget_s: float | None) -> TrainConfig:
        assert budget_s == 5.0 and config.n_layer == 3
        return config.replace(dtype="bfloat16", micro_batch_size=2)

    monkeypatch.setattr(tuning, "tune_aloud", tuned)
    given, out = tmp_path / "given.json", tmp_path / "out.json"
    given.write_text(json.dumps({"n_layer": 2}))
    words = ["tune", str(given), "--n-layer", "3", "--tune-budget", "5"]
    assert main([*words, "--out", str(out)]) == 0
    line = capsys.readouterr().out
    assert line.startswith("fastest: --dtype bfloat16 ") and "--micro-batch-size 2" in line
    assert f"(written to {out})" in line and json.loads(given.read_text()) == {"n_layer": 2}
    assert TrainConfig.from_dict(json.loads(out.read_text())).micro_batch_size == 2
    assert main([*words, "--json"]) == 0  # without --out, into the file that was given
    record = json.loads(capsys.readouterr().out)
    assert record["chosen"]["dtype"] == "bfloat16" and record["config"] == json.loads(given.read_text())
    assert main(["tune", "tiny", "--n-layer", "3", "--tune-budget", "5"]) == 0
    assert "written" not in capsys.readouterr().out
    assert main(["tune", "tiny", "--preset", "tiny"]) == 2
    assert "`gptlab tune tiny`, without --preset" in capsys.readouterr().err


def test_logs_take_settings_and_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    for log in logs:
        log.write_text(LOG)
    sets = ["--set", "n_layer=3", "--set", "data=a text", "--set", "n_head=2", "--set", "n_embd=64"]
    assert main(["runs", "import", *map(str, logs), *sets]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "name" in out[0] and [line.split()[0] for line in out[1:]] == ["a", "b"]
    config = json.loads((default_runs_dir() / "b" / "run.json").read_text())["config"]
    assert (config["n_layer"], config["data"]) == (3, "a text")
    assert main(["report", "a", "--out", str(tmp_path / "r.html"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["runs"] == ["a"] and record["bytes"] == (tmp_path / "r.html").stat().st_size


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "n_layer"], "--set n_layer sets nothing: give FIELD=VALUE"),
        (["--set", "n_layer={[]: 1}"], "n_layer"),
        (["b.log", "--name", "one"], "--name one is one run's, and these are 2 logs"),
    ],
)
def test_an_import_that_cannot_be_is_one_sentence(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.log").write_text(LOG)
    assert main(["runs", "import", "a.log", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and not default_runs_dir().exists()


def test_seeds_of_a_cell_are_one_line_with_their_spread(capsys: pytest.CaptureFixture[str]) -> None:
    def row(width: int, seed: int, loss: float | None) -> dict[str, Any]:
        return {"name": f"{width}-{seed}", "n_embd": width, "seed": seed, "dropout": width / 100, "block_size": 16,
                "flops": width * 1e9, "val_loss": loss}  # fmt: skip

    print_spread([row(32, 1, 2.0), row(32, 2, 3.0), row(64, 1, 1.0), row(64, 2, 2.0), row(64, 3, None)])
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.split() == ["n_embd", "dropout", "seeds", "val_loss", "sd", "least", "most"]
    assert [line.split()[:4] for line in lines] == [["32", "0.32", "2", "2.5000"], ["64", "0.64", "2", "1.5000"]]
    assert lines[0].split()[4:] == ["0.707107", "2", "3"]
    print_spread([row(32, 1, 2.0), row(64, 1, 1.0)])
    assert capsys.readouterr().out == "", "a single seed has no spread"
