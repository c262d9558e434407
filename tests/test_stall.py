"""For how long a checkpoint holds training up: our saver and torch.distributed.checkpoint's async_save, in one run.

GPTLAB_SLOW=1 pytest -s tests/test_stall.py    # prints both medians; nothing else should run meanwhile
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gptlab import checkpoint, hardware
from gptlab.assembly import Setting, assemble
from gptlab.config import TrainConfig
from gptlab.counts import parameters
from gptlab.parallel.world import World
from gptlab.saving import Saver

SAVES = 9
"""Of each way, in turn."""
CONFIG = TrainConfig(
    n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=512, tokenizer="char", global_batch_size=2,
    kernels="torch",
)  # fmt: skip


@pytest.fixture
def process_group(tmp_path: Path) -> Any:
    """DCP wants one, and gloo's where training has another."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.fixture
def all_cores() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(hardware.cores())
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_10_9m_parameters_holds_training_up_no_longer_than_dcp_s_does(
    tmp_path: Path, all_cores: None, process_group: Any
) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    assert abs(parameters(CONFIG).total - 10.9e6) < 0.1e6
    tokens = np.random.default_rng(0).integers(0, 512, 5000).astype(np.uint16)
    parts = assemble(
        CONFIG, Setting("cpu", "float32", "sdpa", 2, torch.get_num_threads()), tokens,
        World(0, 1, torch.device("cpu")),
    )  # fmt: skip
    saver = Saver(tmp_path / "ours", keep=2)
    model, optimizer = parts.strategy.part, parts.strategy.optimizer
    stager = DefaultStager(StagingOptions(False, True, False, False))  # of its options the quickest on a CPU

    def ours(number: int) -> float:
        stall = saver.save(number, checkpoint.tensors(model, optimizer), {"val_loss": None})
        parts.step(number)
        saver.wait()
        return stall

    def theirs(number: int, **more: Any) -> float:
        began = time.perf_counter()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        saving: Any = dcp.async_save(state, checkpoint_id=str(tmp_path / f"dcp-{number}"), **more)  # type: ignore[attr-defined]
        stall = time.perf_counter() - began
        parts.step(number)
        getattr(saving, "upload_completion", saving).result()
        return stall

    ways = {
        "ours": ours, "DCP async_save": theirs,
        "DCP async_save, its buffers kept": lambda number: theirs(number, async_stager=stager),
    }  # fmt: skip
    stalls: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(SAVES + 1):
        for name, save in ways.items():
            parts.step(number)
            stalls[name].append(save(len(ways) * number + list(ways).index(name)))
    medians = {name: statistics.median(times[1:]) for name, times in stalls.items()}  # the first takes its buffers
    for name, times in stalls.items():
        each = " ".join(f"{1000 * seconds:.0f}" for seconds in times[1:])
        print(f"{name}: median {1000 * medians[name]:.1f} ms of {each}; the first {1000 * times[0]:.0f}")
    assert medians["ours"] <= medians["DCP async_save"]
    assert medians["ours"] <= 0.060
