"""A pipeline as a run: launched, resumed, evaluated, and shown."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import gptlab
from gptlab import cli, evaluation
from gptlab.config import TrainConfig
from gptlab.runs import Run


def test_a_run_of_two_stages_resumes_bit_for_bit_and_its_checkpoint_is_one_like_any(
    tinytext: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = TrainConfig(
        n_layer=2, n_head=2, n_embd=32, block_size=16, global_batch_size=8, micro_batch_size=2, max_iters=6,
        eval_interval=3, eval_iters=1, checkpoint_interval=2, keep_checkpoints=9, dropout=0.1, device="cpu",
        dtype="float32", data=str(tinytext), strategy="pp", nproc=2, stages=2, pipeline_schedule="zero_bubble",
    )  # fmt: skip
    whole = gptlab.launch(config, name="whole").wait()
    assert whole["status"] == "finished"
    run = Run(tmp_path / "runs" / "whole")
    assert evaluation.evaluate(run)["loss"] == pytest.approx(whole["val_loss"], abs=1e-5)

    again = tmp_path / "runs" / "again"  # as if it had been lost after its second step
    shutil.copytree(run.path, again)
    (again / "result.json").unlink()
    for checkpoint in Run(again).checkpoints():
        if checkpoint.name > "step-00000002":
            shutil.rmtree(checkpoint)
    assert gptlab.resume("again").wait()["status"] == "finished"
    before, after = run.metrics(), Run(again).metrics()
    assert [row["attempt"] for row in after if "loss" in row] == [1, 1, 2, 2, 2, 2]
    for key in ("loss", "grad_norm", "val_loss"):
        assert [row.get(key) for row in after] == [row.get(key) for row in before]
    last = ["checkpoints/step-00000006/model.safetensors", "checkpoints/step-00000006/optimizer.safetensors"]
    assert all((again / name).read_bytes() == (run.path / name).read_bytes() for name in last)

    record = run.pipeline()
    assert record is not None and record["step"] == 3 and record["blocks"] == [[0, 1], [1, 2]]
    assert cli.main(["pipeline", "whole"]) == 0
    assert "zero_bubble: 2 stages over 2 processes" in capsys.readouterr().out
    assert cli.main(["pipeline", "whole", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == record
    assert (again / "attempts" / "02" / "pipeline.json").exists()


def test_a_run_without_a_pipeline_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs" / "plain"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"config": TrainConfig().to_dict()}))
    assert cli.main(["pipeline", "plain"]) == 2
    assert "has no pipeline: train one with --strategy pp" in capsys.readouterr().err
