"""What a run's task and its model's origin leave possible: told from the config alone, before anything starts.

    >>> from gptlab.config import TrainConfig
    >>> check(TrainConfig(task="classify"))

Left out on purpose: what the tasks are (`heads.py`, `documents.py`) and the published model
(`huggingface.py`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gptlab.fields import ConfigError, did_you_mean

if TYPE_CHECKING:
    from gptlab.config import TrainConfig

PUBLISHED = {
    "bias": True, "rope": False, "rmsnorm": False, "qk_norm": False, "mlp": "gelu", "n_kv_head": 0, "tie_head": True,
    "logit_softcap": 0.0, "sliding_window": 0, "mask_documents": False, "kernels": ("auto", "torch"),
    "attention": ("auto", "sdpa", "math"), "compile": "off",
}  # fmt: skip
"""What a config says of GPT-2 as transformers has it, and how that is trained here."""


TRACED = ("gpipe", "1f1b")
"""Schedules for stages that torch's tracer cut."""


def check_installed(config: TrainConfig) -> None:
    """Refuses a model whose package is not installed. Imports nothing of it."""
    if config.model == "huggingface" and importlib.util.find_spec("transformers") is None:
        raise ConfigError("model huggingface needs transformers: install it (pip install 'gptlab[huggingface]').")


def check_measured(config: TrainConfig, done: str, mend: str) -> None:
    """Refuses what tuning and benching, which train on noise, do not measure.

    Args:
        done, mend: what is not done with it, and what helps, in words.
    """
    for name, legal in (("task", "lm"), ("model", "gptlab")):
        if getattr(config, name) != legal:
            raise ConfigError(f"{name} {getattr(config, name)} is not {done}, {name} {legal} is: {mend}.")


def published_cuts(points: Mapping[str, str], config: TrainConfig) -> dict[str, str]:
    """Split points of the published module, in the order of its forward pass, by its own names: `transformer.h.4`, or
    `h.4` for short. Each cut comes back as the beginning of what follows it.

    Raises:
        ConfigError: no submodule of that name, or two names of one place.
    """
    places = _published_places(config)
    found: dict[int, str] = {}
    for given, side in points.items():
        name = given if given in places else f"transformer.{given}"
        if name not in places:
            raise ConfigError(
                f"split {given!r} is no submodule of this GPT-2{did_you_mean(given, places)}: choose from "
                f"transformer.h.0 to transformer.h.{config.n_layer - 1}, transformer.ln_f and {_head(config)}, each at "
                "its beginning or its end."
            )
        place = places[name][side == "end"]
        if place in found:
            raise ConfigError(f"split cuts at {found[place]} and at {given}={side}, the same place: leave one out.")
        found[place] = f"{given}={side}"
    if places[_head(config)][1] in found:
        raise ConfigError(f"split cuts behind {_head(config)}, where nothing is left: leave that point out.")
    return {name: "beginning" for name, (begins, _) in places.items() if begins in found}


def _head(config: TrainConfig) -> str:
    return "score" if config.task == "classify" else "lm_head"


def _published_places(config: TrainConfig) -> dict[str, tuple[int, int]]:
    """Where submodules begin and end, in the order of the forward pass. Inside a block a cut would send the residual
    past the stage behind it, and torch has no backward pass for that."""
    names = [f"transformer.h.{layer}" for layer in range(config.n_layer)] + ["transformer.ln_f", _head(config)]
    return {name: (at, at + 1) for at, name in enumerate(names)}


def check(config: TrainConfig) -> None:
    """Refuses what cannot be.

    Raises:
        ConfigError: with the value and the mend.
    """
    if config.task == "classify" and not config.tie_head:
        raise ConfigError("tie_head False gives a head over the vocabulary, which task classify has not: leave it out.")
    if config.model == "huggingface":
        for name, legal in PUBLISHED.items():
            value = getattr(config, name)
            if value != legal and not (isinstance(legal, tuple) and value in legal):
                known = " or ".join(map(str, legal)) if isinstance(legal, tuple) else legal
                raise ConfigError(
                    f"{name} {value} is not what model huggingface has: use {known}, or train our own with "
                    "model gptlab."
                )
        if config.strategy in ("fsdp", "pp+fsdp"):
            raise ConfigError(
                f"strategy {config.strategy} spreads the rows of our own model alone: use ddp, pp or pp+ddp with model "
                "huggingface."
            )
        if config.strategy == "ddp":
            return
        if config.pipeline_schedule not in TRACED:
            raise ConfigError(
                f"pipeline_schedule {config.pipeline_schedule} sends between neighbours alone, and stages that torch's "
                f"tracer cuts from model huggingface hand their mask past them: use {' or '.join(TRACED)}."
            )
        if config.dropout:
            raise ConfigError(
                f"dropout {config.dropout:g} depends on where model huggingface is cut: use 0 in a pipeline."
            )
