"""The rule of a bench, its turns, its table and its command: what is said about numbers, and in which form."""

from __future__ import annotations

import json
import math
import random
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from gptlab.benchmark import baseline, bench, isolation, provenance, readme, table
from gptlab.benchmark.accuracy import compare, first_difference
from gptlab.benchmark.cells import Cell, Plan, grid
from gptlab.benchmark.pairing import interval, is_tight, take_turns, verdict, warm_up
from gptlab.benchmark.picture import draw
from gptlab.benchmark.upstream import translate
from gptlab.cli import main
from gptlab.config import ConfigError, TrainConfig

KNOWN = (
    "dev,name,batch_size,speedup,abs_latency,compilation_latency,compression_ratio,eager_peak_mem,dynamo_peak_mem,"
    "calls_captured,unique_graphs,fallbacks_to_eager,graph_breaks,unique_graph_breaks,autograd_captures,"
    "autograd_compiles,cudagraph_skips"
)
SMALL = ["--block-size", "16", "--batch-size", "2", "--pairs", "2", "--threads", "1", "--device", "cpu"]


def pretend(monkeypatch: pytest.MonkeyPatch, **columns: Any) -> list[Cell]:
    """No cell is run: each is found to be twice as fast as its opponent."""
    asked: list[Cell] = []
    figures = {
        "dev": "cpu", "accuracy": "pass", "speedup": 2.0, "speedup_low": 1.9, "speedup_high": 2.1, "pairs": 5,
        "median_s": 0.5, "against_median_s": 1.0, "compile_s": 3.0, "peak_bytes": 10, "against_peak_bytes": 15,
        "seconds": [0.5] * 5,
    }  # fmt: skip

    def run(cell: Cell) -> dict[str, Any]:
        asked.append(cell)
        return figures | columns

    monkeypatch.setattr(isolation, "run", run)
    return asked


def test_sides_take_turns_and_the_first_are_not_timed() -> None:
    told: list[str] = []
    sides = lambda: told.append("a"), lambda: told.append("b")
    warm_up(*sides)
    assert told == ["a", "b"] * 2
    a, b = take_turns(*sides, 3)
    assert told == ["a", "b"] * 5
    assert len(a) == len(b) == 3 and min(*a, *b) > 0


def test_a_race_ends_when_its_interval_is_tight_or_its_time_is_over() -> None:
    assert is_tight([1.0] * 10, [2.0] * 10) and not is_tight([1.0] * 9, [2.0] * 9)
    assert not is_tight([1.0, 2.0] * 5, [2.0] * 10)
    a, _ = take_turns(lambda: None, lambda: None, 1000, budget_s=0.0)
    assert len(a) == 1


def test_the_interval_of_few_pairs_holds_the_ratio_as_often_as_it_says() -> None:
    draw = random.Random(2)
    times = lambda: [draw.gauss(1.0, 0.03) for _ in range(6)]  # noqa: E731
    bounds = [interval(times(), times()) for _ in range(100)]
    assert sum(low <= 1 <= high for low, high in bounds) >= 90
    assert interval([2.0], [1.0]) == (2.0, 2.0)


def test_the_interval_holds_the_ratio() -> None:
    draw = random.Random(1)
    alike = [[draw.gauss(1.0, 0.05) for _ in range(40)] for _ in range(2)]
    low, high = interval(alike[0], alike[1])
    assert low < 1 < high and high - low < 0.1
    assert verdict(1.03, low, high) == "same"
    low, high = interval([2 * t for t in alike[0]], alike[1])
    assert 1.8 < low < 2 < high < 2.2
    assert verdict(2.0, low, high) == "faster" and verdict(0.5, 0.4, 0.6) == "slower"


def test_the_rule_takes_errors_as_large_as_eagers_and_no_larger_ones() -> None:
    draw = torch.Generator().manual_seed(0)
    golden = {"grad w": 1e-5 * torch.randn(50, 50, generator=draw, dtype=torch.float64), "loss": torch.ones(1).double()}
    off = {name: torch.randn(value.shape, generator=draw, dtype=torch.float64) for name, value in golden.items()}

    def at(share: float) -> dict[str, torch.Tensor]:
        size = {"grad w": 1e-5, "loss": 1.0}
        return {name: value + share * size[name] * off[name] for name, value in golden.items()}

    assert compare(golden, at(1e-3), at(1.9e-3), half=False).status == "pass"
    wrong = compare(golden, at(1e-3), at(2.2e-3) | {"loss": golden["loss"]}, half=False)
    assert (wrong.status, wrong.worst) == ("fail_accuracy", "grad w") and "grad w is off by 2.2" in wrong.note
    assert wrong.figures["rmse"] == pytest.approx(2.2e-3, rel=0.1) and wrong.figures["compared"] == 2
    assert compare(golden, at(1e-3), at(2.2e-3), half=True).status == "pass"
    assert compare(golden, at(0), at(3e-6), half=False).status == "pass"  # within the tolerance itself


def test_what_is_missing_or_not_finite_has_a_status_of_its_own() -> None:
    golden = {"grad a": torch.ones(3).double(), "loss": torch.ones(1).double()}
    for gone in ({}, {"grad a": torch.zeros(3)}):
        found = compare(golden, golden, {"loss": golden["loss"]} | gone, half=False)
        assert (found.status, found.worst) == ("missing_gradient", "grad a")
    found = compare(golden, golden, golden | {"loss": torch.tensor([math.inf])}, half=False)
    assert (found.status, found.worst) == ("not_finite", "loss")
    assert first_difference(golden, golden) is None
    assert first_difference(golden, golden | {"loss": torch.zeros(1).double()}) == "loss"


def test_a_grid_has_every_combination_and_generate_has_one_process() -> None:
    axes: dict[str, list[Any]] = {"backend": ["eager", "inductor"], "dtype": ["float32", "bfloat16"], "nproc": [1, 2]}
    cells, notes = grid(Plan("all", "tiny"), axes)
    assert len(cells) == 8 + 4 and len({cell.label for cell in cells}) == 12
    assert all(cell.config.nproc == 1 for cell in cells if cell.kind == "generate") and "no nproc" in notes[0]
    assert {cell.config.compile for cell in cells if cell.backend == "inductor"} == {"model"}
    assert all(Cell.from_dict(json.loads(json.dumps(cell.to_dict()))) == cell for cell in cells)
    assert all(cell.against == "eager" for cell in cells)
    assert grid(Plan("train", "gpt2"), {})[0][0].config.global_batch_size == 8  # 8192 tokens, and not 480 sequences


def test_strategies_are_benched_over_processes_and_generate_knows_none(tmp_path: Path) -> None:
    (pipeline, rows), _ = grid(Plan("train", "tiny"), {"strategy": ["pp", "fsdp"], "nproc": [2]})
    assert (pipeline.config.strategy, rows.config.strategy, pipeline.config.nproc) == ("pp", "fsdp", 2)
    odd = pipeline.config.replace(pipeline_schedule="looped_bfs", stages_per_process=2, pipeline_micro_batches=4)
    assert odd.alone() == grid(Plan("train", "tiny"), {})[0][0].config
    trained = tmp_path / "trained.json"
    trained.write_text(json.dumps({"vocab_size": 65, "strategy": "pp", "nproc": 2, "global_batch_size": 8}))
    (sampled,), _ = grid(Plan("generate", str(trained)), {})
    assert (sampled.config.strategy, sampled.config.nproc) == ("ddp", 1)


def test_the_torchbench_preset_times_what_that_folder_times() -> None:
    train, generate = grid(Plan("all", "torchbench"), {"backend": ["inductor"]})[0]
    assert (train.recipe, train.length, train.tokens) == ("torchbench", 64, 64)
    assert (generate.prompt, generate.new_tokens, train.config.learning_rate) == (64, 32, 6e-4)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "tinny"], "There is no run"),
        (["race", "tiny"], "train, generate or all"),
        (["train"], "and a model"),
        (["train", "tiny", "--against", "nocache"], "choose plain or eager or transformers"),
        (["generate", "tiny", "--against", "plain"], "choose nocache or eager or transformers"),
        (["train", "tiny", "--backend", "inducter"], "did you mean"),
        (["train", "tiny", "--backend", "eager", "--compile", "model"], "leave it out"),
        (["generate", "tiny", "--new-tokens", "128"], "16 and 128 tokens are more than block_size 64"),
        (["generate", "10m", "--tune"], "nothing to tune"),
        (["train", "tiny", "--output", "x.xls"], "use .csv"),
        (["train", "tiny", "--baseline", "nothing.csv"], "There is no file"),
        (["train", "tiny", "--float16", "--amp"], "exclude each other"),
    ],
)
def test_what_cannot_be_benched_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_upstreams_command_line_is_accepted_and_says_what_it_did_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = pretend(monkeypatch)
    monkeypatch.setattr("gptlab.hardware.devices", lambda: ())
    monkeypatch.setattr("gptlab.hardware.cores", lambda: 2)
    line = "--float16 -dcuda --training --backend=inductor --ddp --multiprocess --accuracy --collect-outputs"
    assert main(["bench", *line.split(), "--only", "nanogpt"]) == 0
    (cell,) = asked
    assert (cell.kind, cell.model, cell.backend, cell.against) == ("train", "torchbench", "inductor", "eager")
    assert (cell.config.nproc, cell.config.global_batch_size, cell.config.device) == (2, 2, "cpu")
    assert cell.accuracy and not cell.performance and cell.outputs and cell.config.dtype != "float16"
    said = capsys.readouterr().err
    assert all(word in said for word in ("-dcuda: there is no GPU", "--float16: CPUs", "2 processes on the CPU"))
    with pytest.raises(ConfigError, match="--only"):
        translate({"only": "nanogpt"}, "train", "tiny")
    assert translate({"only": "nanogpt"}, "train", None).model == "torchbench"


def test_rows_are_written_with_the_known_columns_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import pandas

    pretend(monkeypatch)
    csv, lines = tmp_path / "rows.csv", tmp_path / "deep" / "rows.jsonl"
    words = ["bench", "train", "tiny", "--backend", "eager", "native", "--output", str(csv), "--output", str(lines)]
    assert main([*words, "--plot", str(tmp_path / "grid.svg")]) == 0
    found = pandas.read_csv(csv)
    assert ",".join(found.columns[:17]) == KNOWN and found.columns[17] == "accuracy"
    assert found.speedup.tolist() == [2.0, 2.0] and found.compression_ratio.tolist() == [1.5, 1.5]
    assert found.break_even_steps.tolist() == [6, 6] and "seconds" not in found
    assert found.torch_version.tolist() == [version("torch")] * 2 and found.seed.tolist() == [1337] * 2
    assert len(pandas.read_json(lines, lines=True)) == 2
    assert "2.00x" in (tmp_path / "grid.svg").read_text() or (tmp_path / "grid.svg").stat().st_size > 5000
    rows = table.read_csv(csv)
    assert main([*words, "--accuracy", "--baseline", str(csv)]) == 0
    assert ",".join(pandas.read_csv(csv).columns[:5]) == "dev,name,batch_size,accuracy,calls_captured"
    assert rows[0]["speedup"] == 2.0 and rows[0]["note"] is None


def test_bench_gives_a_table_of_the_grid_and_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, said = pretend(monkeypatch), list[str]()
    rows = bench("train", "tiny", backend=["eager", "native"], dtype="float32", against="plain", n_layer=3)
    assert list(rows["backend"]) == ["eager", "native"] and set(rows["speedup"]) == {2.0}
    assert [(cell.config.dtype, cell.config.n_layer, cell.against) for cell in asked] == [("float32", 3, "plain")] * 2
    told = list(bench("all", "tiny", nproc=[1, 2], say=said.append)["kind"])
    assert told.count("train") == 2 and told.count("generate") == 1 and said


def test_a_tuned_bench_races_what_tuning_found(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend(monkeypatch)

    def tune(config: TrainConfig, **how: Any) -> tuple[TrainConfig, None]:
        assert how["budget_s"] == 5.0
        return config.replace(micro_batch_size=3), None

    monkeypatch.setattr("gptlab.tuning.tune", tune)
    bench("train", "tiny", tuned=True, tune_budget_s=5.0)
    assert [cell.config.micro_batch_size for cell in asked] == [3]
    with pytest.raises(ConfigError, match="nothing to tune"):
        bench("generate", "tiny", tuned=True)


def test_json_is_one_row_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(monkeypatch, speedup=2.25)
    assert main(["bench", "train", "tiny", "--backend", "eager", "native", "--json"]) == 0
    out = capsys.readouterr().out
    assert '"speedup": 2.25' in out and [json.loads(line)["backend"] for line in out.splitlines()] == [
        "eager",
        "native",
    ]


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [("pass", 0, "1 of 1 rows pass"), ("fail_accuracy", 1, "not right"), ("timeout", 3, "not all rows ran")],
)
def test_the_exit_code_tells_what_is_wrong_from_what_did_not_run(
    status: str, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, accuracy=status, note="a sentence.")
    assert main(["bench", "train", "tiny"]) == code
    out = capsys.readouterr().out
    assert words in out and status in out and "a sentence." in out


def test_a_baseline_tells_slower_from_noise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch)
    old = tmp_path / "old.csv"
    assert main(["bench", "train", "tiny", "--output", str(old)]) == 0
    assert main(["bench", "train", "tiny", "--baseline", str(old)]) == 0
    pretend(monkeypatch, speedup=1.5, speedup_low=1.4, speedup_high=1.6)
    assert main(["bench", "train", "tiny", "--baseline", str(old)]) == 4
    row = {"kind": "train", "accuracy": "pass", "speedup": 2.0, "speedup_low": 1.95, "speedup_high": 2.05}
    wide = row | {"speedup": 1.9, "speedup_low": 1.0, "speedup_high": 2.6}
    better = row | {"speedup": 3.0, "speedup_low": 2.9, "speedup_high": 3.1}
    broken = row | {"accuracy": "fail_accuracy", "speedup": None}
    found = [baseline.compare([one], [row])[0]["against_baseline"] for one in (row, wide, better, broken)]
    assert found == ["same", "noise", "faster", "broken"]
    assert baseline.compare([row], [])[0]["against_baseline"] == "new"


def test_the_summary_leaves_out_what_is_wrong() -> None:
    rows: list[dict[str, Any]] = [
        {"accuracy": "pass", "speedup": 2.0, "compile_s": 4.0, "compression_ratio": 1.0},
        {"accuracy": "pass", "speedup": 8.0, "compile_s": 8.0, "compression_ratio": 4.0},
        {"accuracy": "fail_accuracy", "speedup": 100.0},
        {"accuracy": "OOM"},
    ]
    found = table.summary(rows)
    assert (found["pass_rate"], found["geomean_speedup"], found["mean_compile_s"]) == (0.5, pytest.approx(4.0), 6.0)
    assert found["geomean_compression"] == pytest.approx(2.0) and found["not_run"] == 1


def test_the_readme_gets_the_table_between_its_markers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch)
    monkeypatch.setattr(readme, "PLANS", readme.PLANS[:2])
    path = tmp_path / "README.md"
    path.write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n")
    assert readme.main([str(path)]) == 0
    text = path.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert text.count("2.00x | 1.90 to 2.10") == 2 and (tmp_path / "bench.csv").exists()
    with pytest.raises(ConfigError, match="no line"):
        readme.replace("nothing", [])


def test_a_noisy_machine_is_said_to_be_noisy() -> None:
    assert provenance.noise({"others_cores": 0.0, "spread": 0.01}) == ""
    assert "1.5 cores" in provenance.noise({"others_cores": 1.5, "spread": 0.01})
    assert "30%" in provenance.noise({"others_cores": None, "spread": 0.3})
    columns = provenance.Quiet().columns()
    assert columns["load_before"] >= 0 and (columns["others_cores"] or 0) >= 0


def test_a_picture_has_a_bar_or_a_status_a_row(tmp_path: Path) -> None:
    row = {"backend": "eager", "accuracy": "pass", "speedup": 2.0, "speedup_low": 1.9, "speedup_high": 2.1}
    path = draw([row, {"backend": "native", "accuracy": "OOM"}], tmp_path / "x.png")
    assert path.stat().st_size > 1000


def test_a_real_bench_is_right_and_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "train", "tiny", *SMALL, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["accuracy"] == "pass" and row["compared"] == 2 * 28 + 3 and row["pairs"] == 2
    assert 0 <= row["speedup_low"] <= row["speedup"] <= row["speedup_high"] and row["threads"] == 1
    assert row["tokens_per_s"] == pytest.approx(32 / row["median_s"]) and len(row["against_seconds"]) == 2
    assert 1e5 < row["peak_bytes"] < 3e8 and 1e5 < row["against_peak_bytes"] < 3e8
    assert row["timed_loss_gap"] < 1e-4 and row["mfu"] > 0 and row["against_dtype"] == "float32"


@pytest.mark.slow
def test_sampling_is_timed_by_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    words = ["--new-tokens", "4", "--prompt-tokens", "4", "--against", "transformers", "--no-memory", "--json"]
    assert main(["bench", "generate", "tiny", *SMALL, *words]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["accuracy"] == "pass" and row["logit_gap"] == 0
    for side in ("", "against_"):
        assert row[f"{side}prefill_ms"] > 0 and row[f"{side}ttft_ms"] > 0
        assert row[f"{side}decode_tokens_per_s"] > 0 and row[f"{side}bandwidth_share"] > 0
