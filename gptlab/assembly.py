"""From a config and what its `auto` became to a strategy and a step that are ready to go.

    parts = assemble(config, setting, tokens, world)
    parts.step(0).loss

Training, benchmarks and tuning all take their step from here, so what is measured is what trains.

Left out on purpose: choosing the setting (`worker.py`), the loop (`training.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gptlab import compiling, huggingface
from gptlab.attention import Attention
from gptlab.batches import Batches, Feed, Tokens
from gptlab.config import TrainConfig
from gptlab.documents import DocumentBatches, Documents
from gptlab.heads import Labels, SequenceClassifier, initial_score
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


def labels_of(data: Tokens | Documents) -> Labels | None:
    """What a classifier of these documents has; None of plain text."""
    return Labels(len(data.names), data.pad) if isinstance(data, Documents) else None


def make_model(config: TrainConfig, labels: Labels | None, attention: Attention = "sdpa") -> nn.Module:
    """The whole model that a config asks for, with the weights that its seed decides: a GPT or a classifier, of ours
    or of Hugging Face's."""
    if config.model == "huggingface":
        return huggingface.make(config, labels, seed=config.seed, attention=attention)
    if labels is not None:
        return SequenceClassifier(config, labels.count, pad_id=labels.pad_id, attention=attention, seed=config.seed)
    return GPT(config, attention=attention, seed=config.seed)


def adapt(config: TrainConfig, labels: Labels | None, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of `make_model`'s model that begins with those of a GPT; a classifier's score begins anew."""
    if labels is not None:
        weights.pop("lm_head.weight", None)  # of weights whose head is not tied
    score = {} if labels is None else {"score.weight": initial_score(config, labels.count, config.seed)}
    if config.model == "huggingface":
        return dict(huggingface.publish(name, value, config) for name, value in weights.items()) | score
    return {f"transformer.{name}" if score else name: value for name, value in weights.items()} | score


def make_batches(config: TrainConfig, data: Tokens | Documents) -> Feed:
    """The global batches of a run on a split."""
    values: dict[str, Any] = {
        "block_size": config.block_size, "global_batch_size": config.global_batch_size, "order": config.data_order,
        "seed": config.seed,
    }  # fmt: skip
    return DocumentBatches(data, **values) if isinstance(data, Documents) else Batches(data, **values)


def assemble(config: TrainConfig, setting: Setting, data: Tokens | Documents, world: World) -> Parts:
    """Builds the parts on this process's device.

    Args:
        data: the training split.
    """
    allow_tfloat32(setting.dtype)
    work = Work(config, make_batches(config, data), world, setting.micro_batch_size, setting.dtype)
    model = make_model(config, labels_of(data), setting.attention).to(world.device)
    whole = setting.compile == "step"
    engine = None
    if setting.kernels == "native":
        assert isinstance(model, GPT), "a kernel of our own trains a GPT"
        engine = Engine(model, batch=setting.micro_batch_size, threads=setting.threads)
    strategy = Replicated(
        model, work, callee=compiling.compiled(model, setting.compile), fused=not whole,
        engine=engine,
    )  # fmt: skip
    update = compiling.CompiledUpdate(strategy.optimizer, lambda: strategy.gradients) if whole else None
    return Parts(strategy, TrainStep(strategy, work, compiled_update=update))
