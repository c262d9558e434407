"""The cost model against runs: a row a case, its errors and the verdict. The full table is the benchmark's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gptlab.benchmark import predictions
from gptlab.runs import Run

TINY = {
    "n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 32, "global_batch_size": 4, "dtype": "float32",
    "kernels": "torch", "max_iters": 12,
}  # fmt: skip


def row(time: float, memory: float) -> dict[str, Any]:
    """A case whose step was foretold as 100 ms, and whose memory as 50 MB, and that took so many."""
    return {
        "name": "one", "predicted_step_s": 0.1, "measured_step_s": time, "off_step_s": 0.1 / time - 1,
        "predicted_peak_bytes": 50e6, "measured_peak_bytes": memory, "off_peak_bytes": 50e6 / memory - 1,
    }  # fmt: skip


def test_a_case_is_trained_and_held_against_what_was_foretold(tmp_path: Path) -> None:
    found = predictions.check("tiny", TINY, tmp_path)
    run = Run(tmp_path / "run")
    assert run.state == "finished" and run.config.n_embd == 32
    steps = {one["step"]: one for one in run.metrics() if "loss" in one}
    assert sorted(steps) == list(range(1, 13))
    warm = sorted(steps[step]["step_s"] for step in range(4, 11))  # neither the first three nor those after the saving
    assert found["measured_step_s"] == warm[3], "the median"
    assert found["measured_peak_bytes"] == max(one["peak_bytes"] for one in steps.values()) - run.info["base_bytes"]
    assert [path.name for path in (run.path / "checkpoints").iterdir() if path.name.endswith("10")], "saved at 10"
    for what in ("step_s", "peak_bytes"):
        assert found[f"predicted_{what}"] > 0
        assert found[f"off_{what}"] == pytest.approx(found[f"predicted_{what}"] / found[f"measured_{what}"] - 1)


def test_a_case_that_does_not_finish_is_no_row(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="wild: the run is diverged"):
        predictions.check("wild", TINY | {"learning_rate": 1000.0, "warmup_iters": 0, "grad_clip": 0.0}, tmp_path)


@pytest.mark.parametrize(
    ("time", "memory", "good"),
    [(0.1, 50e6, True), (0.081, 46e6, True), (0.13, 55e6, True), (0.079, 50e6, False), (0.14, 50e6, False),
     (0.1, 45e6, False), (0.1, 56e6, False)],
)  # fmt: skip
def test_the_verdict_is_of_both_figures_and_either_side(
    time: float, memory: float, good: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders: list[Path] = []

    def check(name: str, fields: Any, folder: Path) -> dict[str, Any]:
        assert folder.is_dir() and not any(folder.iterdir()) and fields is TINY
        folders.append(folder)
        return row(time, memory) if name == "odd" else row(0.1, 50e6)

    monkeypatch.setattr(predictions, "check", check)
    assert predictions.main({"even": TINY, "odd": TINY}) == (0 if good else 1)
    head, even, odd, verdict = capsys.readouterr().out.splitlines()
    assert head.split() == ["predicted", "measured", "off"] * 2
    assert even.split() == ["even", "100", "ms", "100", "ms", "+0%", "50", "MB", "50", "MB", "+0%"]
    assert odd.split()[:5] == ["odd", "100", "ms", f"{1000 * time:.0f}", "ms"]
    assert verdict == f"{2 if good else 1} of 2 within 25% in time and 10% in memory"
    assert len(set(folders)) == 2 and not any(folder.exists() for folder in folders), "each had one of its own"


def test_the_cases_stand_for_all_precisions_and_kernels() -> None:
    cases = predictions.CASES.values()
    assert {case["dtype"] for case in cases} == {"float32", "bfloat16"}
    assert {case.get("kernels", "auto") for case in cases} == {"auto", "torch"}
    assert all(case["max_iters"] - 2 > predictions.WARM for case in cases), "steps are left to be timed"
