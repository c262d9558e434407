"""The weights that a run begins with, where `init_from` names some: found, held against the config, loaded.

    >>> from gptlab import preset
    >>> from gptlab.initial import shape_of
    >>> preset("tiny", init_from="models/gpt2", **shape_of("models/gpt2"))

The architecture is that of the weights; context, dropout, sliding window, soft cap and document masking may be others.
Left out on purpose: the files (`weights.py`), a run that goes on (`checkpoint.py`). torch is imported when tensors are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlab import weights
from gptlab.config import ConfigError, GPTConfig, TrainConfig
from gptlab.runs import Run

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURE = ("n_layer", "n_head", "n_kv_head", "n_embd", "bias", "rope", "rmsnorm", "qk_norm", "mlp", "tie_head")
"""Fields that cannot be others than the weights have."""


def shape_of(source: str | Path) -> dict[str, Any]:
    """The fields of the GPT that the weights are of: what a config that begins with them says, unless it knows better.
    The vocabulary is the tokenizer's, and dropout the run's own.

    Raises:
        ConfigError: there are no weights that can be read.
    """
    found = _config(Path(source).expanduser())
    if found is None:
        found, _ = weights.read(source)
    return {name: value for name, value in found.shape().to_dict().items() if name not in ("vocab_size", "dropout")}


def check(config: TrainConfig, cwd: Path) -> None:
    """Refuses weights that a run cannot begin with, as far as is known without torch.

    Raises:
        ConfigError: nothing there, or another architecture.
    """
    if config.init_from is not None:
        source = cwd / Path(config.init_from).expanduser()
        if found := _config(source):
            _hold(config, found, source)


def read(config: TrainConfig, say: Callable[[str], None]) -> dict[str, Tensor] | None:
    """The weights that a config names, as its own model has them; None where it names none.

    Args:
        say: is told what they are.
    """
    if config.init_from is None:
        return None
    source = Path(config.init_from).expanduser()
    if (source / "run.json").is_file():
        from gptlab import checkpoint
        from gptlab.heads import SequenceClassifier

        newest = checkpoint.newest_of(Run(source), say)
        model, _ = checkpoint.load_any(newest)
        other = model.transformer if isinstance(model, SequenceClassifier) else model
        found, tensors = other.config, other.state_dict()
    else:
        found, tensors = weights.read(source)
    _hold(config, found, source)
    for name in ("wte.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name][config.vocab_size :] = 0.0  # nanoGPT pads a vocabulary by ids that no text has
    if "wpe.weight" in tensors:
        tensors["wpe.weight"] = tensors["wpe.weight"][: config.block_size]
    say(f"begins with the weights of {source}")
    return tensors


def _config(source: Path) -> GPTConfig | None:
    """The shape that weights have; None where only torch can tell."""
    if (source / "run.json").is_file():
        return Run(source).config.shape()
    return weights.read_config(source)


def _hold(config: TrainConfig, found: GPTConfig, source: Path) -> None:
    """Refuses a config that these weights don't fit."""
    for name in ARCHITECTURE:
        ours, theirs = getattr(config, name), getattr(found, name)
        if name == "tie_head" and config.task == "classify":
            continue  # a classifier leaves such a head
        if name == "n_kv_head":
            ours, theirs = config.kv_heads, found.kv_heads
        if ours != theirs:
            raise ConfigError(f"{name} {ours} is not that of the weights in {source}, {theirs}: use {theirs}.")
    if config.block_size > found.block_size and not config.rope:
        raise ConfigError(
            f"block_size {config.block_size} is more than the {found.block_size} positions of the weights in {source}: "
            f"use at most {found.block_size}."
        )
    if config.vocab_size and found.vocab_size not in (config.vocab_size, config.padded_vocab_size):
        raise ConfigError(
            f"The tokenizer's vocabulary of {config.vocab_size} is not that of the weights in {source}, "
            f"{found.vocab_size}: choose the tokenizer that they were trained with."
        )
