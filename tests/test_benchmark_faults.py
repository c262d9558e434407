"""Paths broken on purpose: each is caught with its own status, and what is wrong is named; and cells that do not come
to an end leave a row all the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptlab import attention, initial, kvcache, sampling
from gptlab.benchmark import isolation
from gptlab.benchmark.accuracy import Verdict
from gptlab.benchmark.cell import settle
from gptlab.benchmark.cells import Cell, Plan, grid
from gptlab.benchmark.inside import generating, judging, training
from gptlab.cli import main
from gptlab.model import GPT
from gptlab.parallel.world import World

PLAIN = {"block_size": 16, "threads": 1, "device": "cpu", "n_embd": 32, "kernels": "torch"}


def cell_of(kind: str = "train", backend: str = "eager", **changes: Any) -> Cell:
    options = {"pairs": 1, "new_tokens": 4, "prompt": 4, "memory": False}
    values = {"global_batch_size": 4, **PLAIN, **changes}
    batch, nproc = values.pop("global_batch_size"), values.pop("nproc", 1)
    axes = {"backend": [backend], "global_batch_size": [batch], "nproc": [nproc]}
    return grid(Plan(kind, "tiny", changes=values, options=options), axes)[0][0]


def judge(cell: Cell, folder: Path, break_it: Any = None) -> Verdict:
    """Judges a training cell in this process; `break_it` gets the side first."""
    world = World(0, 1, torch.device("cpu"))
    setting = settle(cell, cell.config, strict=True)
    side = training.make("ours", cell, setting, world)
    if break_it:
        break_it(side)
    return judging.judge_training(cell, side, setting, world, judging.Meeting(folder, world), lambda _: None)[0]


def judge_sampling(cell: Cell) -> Verdict:
    model = generating.model_of(cell, "cpu")
    way = generating.make("ours", cell, model, torch.float32, "sdpa")
    return judging.judge_generation(cell, way.greedy, model, torch.float32, lambda _: None)


@pytest.mark.parametrize(
    "changes",
    [{}, {"dtype": "bfloat16"}, {"dtype": "float16"}, {"micro_batch_size": 3}, {"optimizer": "muon"},
     {"rope": True, "mlp": "swiglu", "qk_norm": True}],
)  # fmt: skip
def test_what_is_right_passes(changes: dict[str, Any], tmp_path: Path) -> None:
    found = judge(cell_of(**changes), tmp_path)
    assert found.status == "pass", found
    assert found.figures["compared"] >= 40


def test_attention_that_is_off_by_one_fails_and_the_tensor_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def blind(kernel: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float) -> Tensor:
        seen = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril(-1)  # not its own key
        seen[0, 0] = True
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    monkeypatch.setattr(attention, "_attend_fused", blind)
    found = judge(cell_of(), tmp_path)
    assert found.status == "fail_accuracy" and ".attn." in found.worst and found.worst in found.note
    assert found.figures["rmse"] > 10 * found.figures["limit"]


def test_a_gradient_that_is_dropped_is_missing(tmp_path: Path) -> None:
    def drop(side: Any) -> None:
        dict(side.parts.strategy.part.named_parameters())["h.1.mlp.c_fc.bias"].register_hook(torch.zeros_like)

    found = judge(cell_of(), tmp_path, drop)
    assert (found.status, found.worst) == ("missing_gradient", "grad h.1.mlp.c_fc.bias")


def test_an_update_that_forgets_weight_decay_fails(tmp_path: Path) -> None:
    def forget(side: Any) -> None:
        for group in side.parts.strategy.optimizer.param_groups:
            group["weight_decay"] = 0.0

    found = judge(cell_of(), tmp_path, forget)
    assert found.status == "fail_accuracy" and found.worst.startswith("update ")


def test_dropout_that_is_left_on_makes_two_runs_differ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fused = F.scaled_dot_product_attention

    def drops(*tensors: Any, **options: Any) -> Tensor:
        return fused(*tensors, **options | {"dropout_p": 0.5})

    monkeypatch.setattr(F, "scaled_dot_product_attention", drops)
    assert judge(cell_of(), tmp_path).status == "runs_differ"
    sampled = judge_sampling(cell_of("generate", "config", vocab_size=50257, global_batch_size=8))
    assert sampled.status in ("runs_differ", "tokens_differ")


def test_float16_that_overflows_is_not_finite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def huge(config: Any, say: Any) -> dict[str, Tensor]:
        weights = GPT(config).state_dict()
        weights["ln_f.weight"].fill_(1e6)
        return weights

    monkeypatch.setattr(initial, "read", huge)
    found = judge(cell_of(dtype="float16", init_from="somewhere"), tmp_path)
    assert found.status == "not_finite" and "golden's is" in found.note and found.worst


@pytest.mark.parametrize("backend", ["config", "eager", "nocache"])
def test_sampling_that_is_right_passes(backend: str) -> None:
    cell = cell_of("generate", "config")
    model = generating.model_of(cell, "cpu")
    name = "ours" if backend == "config" else backend
    way = generating.make(name, cell, model, torch.float32, "sdpa")
    found = judging.judge_generation(cell, way.greedy, model, torch.float32, lambda _: None)
    assert found.status == "pass" and found.figures["logit_gap"] == 0


def test_a_cache_that_is_stale_at_the_edge_changes_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ring(kvcache.KVCache):
        """Goes on past the edge with the last position, and never forgets."""

        def __init__(self, config: Any, batch: int, length: int, *rest: Any, **options: Any) -> None:
            super().__init__(config, batch, length + 8, *rest, **options)

        def positions(self, T: int) -> Tensor:
            return super().positions(T).clamp(max=15)

    monkeypatch.setattr(sampling, "KVCache", Ring)
    monkeypatch.setattr(sampling._Texts, "slides", lambda self, row: False)
    found = judge_sampling(cell_of("generate", "config", seed=3))
    assert (found.status, found.worst) == ("tokens_differ", "tokens after a edge prompt")
    assert found.figures["first_difference"] >= judging.EDGE - 1 and found.figures["logit_gap"] > found.figures["limit"]


# In processes of their own: a fault is put into them by a sitecustomize on their path.


def with_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_processes_that_do_not_synchronise_differ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_fault(
        tmp_path, monkeypatch,
        "import sys\nif 'gptlab.benchmark.cell' in ' '.join(sys.orig_argv):\n"
        "    from gptlab.parallel.replicas import Replicas\n"
        "    Replicas._send_in_order = lambda self: None\n",
    )  # fmt: skip
    row = isolation.run(cell_of(nproc=2, micro_batch_size=2))
    assert row["accuracy"] == "ranks_differ" and "process 1" in row["note"], row
    assert "speedup" not in row  # what is wrong is not raced


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("import os; os.abort()", "fail_to_run", "SIGABRT"),
        ("raise MemoryError('no room')", "OOM", "no room"),
        ("import time; time.sleep(600)", "timeout", "more than"),
    ],
)
def test_what_ends_early_is_a_row(
    fault: str, status: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_fault(
        tmp_path, monkeypatch,
        "import sys\nif 'gptlab.benchmark.cell' in ' '.join(sys.orig_argv):\n"
        "    from gptlab import worker\n"
        "    def broken(*_):\n"
        f"        {fault}\n"
        "    worker.settle = broken\n",
    )  # fmt: skip
    import dataclasses

    limit = 4.0 if status == "timeout" else 600.0
    row = isolation.run(dataclasses.replace(cell_of(), limit_s=limit))
    assert row["accuracy"] == status and words in row["note"], row


def test_without_a_compiler_rows_say_so_and_so_does_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    words = ["--backend", "inductor", "--block-size", "16", "--device", "cpu", "--threads", "1", "--json"]
    assert main(["bench", "train", "tiny", *words]) == 3
    captured = capsys.readouterr()
    row = json.loads(captured.out)
    assert row["accuracy"] == "unavailable" and "no-such-compiler was not found" in row["note"]
    assert "not all rows ran" in captured.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_bench_that_is_ended_leaves_no_process_and_no_folder(number: int, tmp_path: Path) -> None:
    words = ["bench", "train", "10m", "--nproc", "2", "--pairs", "30", "--budget", "600", "--performance"]
    bench = subprocess.Popen(
        [sys.executable, "-m", "gptlab.cli", *words], env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        until = time.monotonic() + 60
        while len(cells := psutil.Process(bench.pid).children()) < 2 or not list(tmp_path.glob("*/stage")):
            assert time.monotonic() < until and bench.poll() is None
            time.sleep(0.05)
        bench.send_signal(number)
        _, problem = bench.communicate(timeout=10)
    finally:
        bench.kill()
    _, alive = psutil.wait_procs(cells, timeout=4)
    assert not alive and not problem
    if number == signal.SIGTERM:
        assert bench.returncode == 128 + number and not list(tmp_path.glob("gptlab-bench-*"))
