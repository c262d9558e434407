"""From a config and what its `auto` became to a strategy and a step that are ready to go.

    parts = assemble(config, setting, tokens, world)
    parts.step(0).loss

Training, benchmarks and tuning all take their step from here, so what is measured is what trains.

Left out on purpose: choosing the setting (`worker.py`), the loop (`training.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gptlab import compiling
from gptlab.attention import Attention
from gptlab.batches import Batches, Tokens
from gptlab.config import TrainConfig
from gptlab.model import GPT
from gptlab.native.engine import Engine
from gptlab.parallel.replicated import Replicated
from gptlab.parallel.strategy import Strategy, Work
from gptlab.parallel.world import World
from gptlab.precision import allow_tfloat32
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


def assemble(config: TrainConfig, setting: Setting, tokens: Tokens, world: World) -> Parts:
    """Builds the parts on this process's device.

    Args:
        tokens: the training split.
    """
    allow_tfloat32(setting.dtype)
    batches = Batches(
        tokens, block_size=config.block_size, global_batch_size=config.global_batch_size, order=config.data_order,
        seed=config.seed,
    )  # fmt: skip
    work = Work(config, batches, world, setting.micro_batch_size, setting.dtype)
    model = GPT(config, attention=setting.attention, seed=config.seed).to(world.device)
    whole = setting.compile == "step"
    strategy = Replicated(
        model, work, callee=compiling.compiled(model, setting.compile), fused=not whole,
        engine=Engine(model, batch=setting.micro_batch_size, threads=setting.threads)
        if setting.kernels == "native" else None,
    )  # fmt: skip
    update = compiling.CompiledUpdate(strategy.optimizer, lambda: strategy.gradients) if whole else None
    return Parts(strategy, TrainStep(strategy, work, compiled_update=update))
