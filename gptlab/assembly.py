"""From a config and what its `auto` became to a model, an optimizer and a step that are ready to go.

    parts = assemble(config, setting, tokens, world)
    parts.step(0).loss

Training, benchmarks and tuning all take their step from here, so what is measured is what trains.

Left out on purpose: choosing the setting (`worker.py`), the loop (`training.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer

from gptlab import compiling
from gptlab.attention import Attention
from gptlab.batches import Batches, Tokens
from gptlab.config import TrainConfig
from gptlab.model import GPT
from gptlab.native.engine import Engine
from gptlab.optimizer import make_optimizer
from gptlab.parallel.replicas import Replicas
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

    model: GPT
    optimizer: Optimizer
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
    model = GPT(config, attention=setting.attention, seed=config.seed).to(world.device)
    whole = setting.compile == "step"
    optimizer = make_optimizer(model, config, fused=not whole)
    native = setting.kernels == "native"
    replicas = Replicas(model, world, keep=native)
    batches = Batches(
        tokens, block_size=config.block_size, global_batch_size=config.global_batch_size, order=config.data_order,
        seed=config.seed,
    )  # fmt: skip
    step = TrainStep(
        compiling.compiled(model, setting.compile, backend), optimizer, replicas, batches, config, world,
        micro_batch_size=setting.micro_batch_size, dtype=setting.dtype,
        engine=Engine(model, batch=setting.micro_batch_size, threads=setting.threads, dtype=setting.dtype)
        if native else None,
        compiled_update=compiling.CompiledUpdate(optimizer, lambda: replicas.gradients) if whole else None,
    )  # fmt: skip
    return Parts(model, optimizer, step)
