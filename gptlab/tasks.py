"""What a run's task and its model's origin leave possible: told from the config alone, before anything starts.

    >>> from gptlab.config import TrainConfig
    >>> check(TrainConfig(task="classify"))

Left out on purpose: what the tasks are (`heads.py`, `documents.py`) and the published model
(`huggingface.py`).
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from gptlab.fields import ConfigError

if TYPE_CHECKING:
    from gptlab.config import TrainConfig

PUBLISHED = {
    "bias": True, "rope": False, "rmsnorm": False, "qk_norm": False, "mlp": "gelu", "n_kv_head": 0, "tie_head": True,
    "logit_softcap": 0.0, "sliding_window": 0, "mask_documents": False, "kernels": ("auto", "torch"),
    "attention": ("auto", "sdpa", "math"), "compile": "off",
}  # fmt: skip
"""What a config says of GPT-2 as transformers has it, and how that is trained here."""


def check_installed(config: TrainConfig) -> None:
    """Refuses a model whose package is not installed. Imports nothing of it."""
    if config.model == "huggingface" and importlib.util.find_spec("transformers") is None:
        raise ConfigError("model huggingface needs transformers: install it (pip install 'gptlab[huggingface]').")


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
