"""From a config and what its `auto` became to a strategy and a step that are ready to go.

    parts = assemble(config, setting, tokens, world)
    parts.step(0).loss

Training, benchmarks and tuning all take their step from here, so what is measured is what trains.

Left out on purpose: choosing the setting (`worker.py`), the loop (`training.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gptlab import compiling
from gptlab.attention import Attention
from gptlab.batches import Batches, Tokens
from gptlab.config import TrainConfig
from gptlab.model import GPT
from gptlab.native.engine import Engine
from gptlab.parallel.pipeline.pipelined import Pipelined
from gptlab.parallel.replicated import Replicated
from gptlab.parallel.sharded import Sharded
from gptlab.parallel.strategy import Strategy, Work
from gptlab.parallel.world import World
from gptlab.precision import allow_tfloat32
from gptlab.spread import PIPELINES
from gptlab.step import TrainStep


@dataclass(frozen=True)
class Setting:
    """What the config's `auto` became for this run; run.json keeps it, and a resumed run takes it from there."""

    device: str
    dtype: str
    attention: Attention
    micro_batch_size: int
    threads: int
    kernels: str = "torch"
    compile: str = "off"


@dataclass(frozen=True)
class Parts:
    """What trains."""

    strategy: Strategy
    step: TrainStep


def assemble(
    config: TrainConfig, setting: Setting, tokens: Tokens, world: World, *, backend: str = "inductor"
) -> Parts:
    """Builds the parts on this process's device.

    Args:
        tokens: the training split.
        backend: what torch.compile hands the graphs to, where the setting compiles.
    """
    allow_tfloat32(setting.dtype)
    batches = Batches(
        tokens, block_size=config.block_size, global_batch_size=config.global_batch_size, order=config.data_order,
        seed=config.seed,
    )  # fmt: skip
    work = Work(config, batches, world, setting.micro_batch_size, setting.dtype)
    strategy = _spread(work, setting, backend)
    update = None
    if setting.compile == "step":
        update = compiling.CompiledUpdate(strategy.optimizer, lambda: strategy.gradients)
    return Parts(strategy, TrainStep(strategy, work, compiled_update=update))


def _spread(work: Work, setting: Setting, backend: str) -> Strategy:
    """The strategy that the config asks for; in a world of one all are the same."""
    if work.config.strategy in PIPELINES and work.world.size > 1:
        return Pipelined(work, attention=setting.attention)
    if work.config.strategy == "fsdp" and work.world.size > 1:
        with torch.device("meta"):
            empty = GPT(work.config, attention=setting.attention)
        return Sharded(empty, work)
    model = GPT(work.config, attention=setting.attention, seed=work.config.seed).to(work.world.device)
    engine = None
    if setting.kernels == "native":
        engine = Engine(model, batch=setting.micro_batch_size, threads=setting.threads, dtype=setting.dtype)
    return Replicated(
        model, work, callee=compiling.compiled(model, setting.compile, backend), fused=setting.compile != "step",
        engine=engine,
    )  # fmt: skip
