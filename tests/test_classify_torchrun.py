"""Plain torchrun trains a classifier of 12 layers in 4 stages, as PiPPy's example does, and Hugging Face's too."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from labels import write_jsonl

import gptlab
from gptlab.config import TrainConfig
from gptlab.recording import create_run
from gptlab.runs import Run
from gptlab.worker import run_rank


def torchrun(run: Run, processes: int) -> subprocess.CompletedProcess[str]:
    """The command of the README, on this machine's loopback."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = os.environ | {"PYTHONPATH": str(Path(gptlab.__file__).parents[1])}
    command += ["-m", "gptlab.worker", "--", "--run", str(run.path)]  # torchrun has flags that begin with --run, too
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)


def column(run: Run, key: str) -> dict[int, Any]:
    return {row["step"]: row[key] for row in run.metrics() if key in row}


@pytest.mark.parametrize(
    ("model", "layers", "schedule"),
    [("gptlab", 12, "1f1b"), pytest.param("huggingface", 4, "gpipe", marks=pytest.mark.slow)],
)
def test_a_classifier_in_four_stages_has_the_loss_of_one_process(
    model: Any, layers: int, schedule: Any, tmp_path: Path
) -> None:
    if model == "huggingface" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is an optional dependency, and not installed")
    config = TrainConfig(
        task="classify", model=model, n_layer=layers, n_head=2, n_embd=16, block_size=24, global_batch_size=8,
        micro_batch_size=2, max_iters=4, warmup_iters=1, eval_iters=1, eval_interval=2, checkpoint_interval=2,
        data=str(write_jsonl(tmp_path / "a.jsonl", 20)), device="cpu", dtype="float32", threads=1,
    )  # fmt: skip
    alone = create_run(config, "alone", tmp_path / "runs")
    (alone.path / "attempts" / "01").mkdir(parents=True)
    run_rank(alone.path, attempt=1, rank=0, world_size=1, rendezvous="")
    piped = create_run(
        config.replace(strategy="pp", nproc=4, pipeline_schedule=schedule), "piped", tmp_path / "runs"
    )  # fmt: skip
    done = torchrun(piped, 4)
    result, wanted = piped.result(), alone.result()
    assert done.returncode == 0 and result is not None and wanted is not None, done.stderr[-4000:]
    assert result["status"] == "finished" and result["val_accuracy"] == wanted["val_accuracy"]
    for key in ("loss", "val_loss", "grad_norm"):
        found, its = column(piped, key), column(alone, key)
        assert found and found == pytest.approx(its, abs=1e-5, rel=1e-5), key
    assert "accuracy" in done.stdout and {row["world_size"] for row in piped.metrics() if "loss" in row} == {4}
