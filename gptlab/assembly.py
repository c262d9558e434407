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
from gptlab.batches import Tokens
from gptlab.config import TrainConfig
from gptlab.documents import Documents
from gptlab.making import labels_of, make_batches, make_model
from gptlab.model import GPT
from gptlab.native.engine import Engine
from gptlab.parallel.pipeline.pipelined import Pipelined
from gptlab.parallel.pipeline.published import PublishedPipeline
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
    config: TrainConfig, setting: Setting, data: Tokens | Documents, world: World, *, backend: str = "inductor"
) -> Parts:
    """Builds the parts on this process's device.

    Args:
        data: the training split.
        backend: what torch.compile hands the graphs to, where the setting compiles.
    """
    allow_tfloat32(setting.dtype)
    work = Work(
        config, make_batches(config, data), world, setting.micro_batch_size, setting.dtype, labels_of(data)
    )  # fmt: skip
    strategy = _spread(work, setting, backend)
    update = None
    if setting.compile == "step":
        update = compiling.CompiledUpdate(strategy.optimizer, lambda: strategy.gradients)
    return Parts(strategy, TrainStep(strategy, work, compiled_update=update))


def _spread(work: Work, setting: Setting, backend: str) -> Strategy:
    """The strategy that the config asks for; in a world of one all are the same."""
    if work.config.strategy in PIPELINES and work.world.size > 1:
        pipeline = PublishedPipeline if work.config.model == "huggingface" else Pipelined
        return pipeline(work, attention=setting.attention)
    if work.config.strategy == "fsdp" and work.world.size > 1:
        with torch.device("meta"):
            empty = make_model(work.config, work.labels, setting.attention)
        return Sharded(empty, work)
    model = make_model(work.config, work.labels, setting.attention).to(work.world.device)
    engine = None
    if setting.kernels == "native":
        assert isinstance(model, GPT), "a kernel of our own trains a GPT"
        engine = Engine(model, batch=setting.micro_batch_size, threads=setting.threads, dtype=setting.dtype)
    return Replicated(
        model, work, callee=compiling.compiled(model, setting.compile, backend), fused=setting.compile != "step",
        engine=engine,
    )  # fmt: skip
