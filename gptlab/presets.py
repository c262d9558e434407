"""Configs by size, from tiny to GPT-2 XL.

    >>> from gptlab.presets import preset
    >>> preset("10m", max_iters=500).n_embd
    384

Left out on purpose: what the fields mean and what is legal (`config.py`).
"""

from __future__ import annotations

from typing import Any

from gptlab.config import ConfigError, TrainConfig, did_you_mean

# The small ones are named by L x 12 C^2 parameters (a block: attention 4 C^2, MLP 8 C^2; Kaplan et al. 2020, table 1).
_SMALL = {
    "tiny": (2, 2, 64),
    "1m": (5, 4, 128),
    "3m": (4, 4, 256),
    "6m": (5, 5, 320),
    "10m": (6, 6, 384),
    "25m": (8, 8, 512),
    "50m": (10, 10, 640),
}
# Layers, heads, width: Radford et al. 2019, table 2 (heads: 64 features each). Learning rates: Brown et al. 2020,
# table 2.1.
_GPT2 = {
    "gpt2": (12, 12, 768, 6e-4),
    "gpt2-medium": (24, 16, 1024, 3e-4),
    "gpt2-large": (36, 20, 1280, 2.5e-4),
    "gpt2-xl": (48, 25, 1600, 2e-4),
}
PRESETS: tuple[str, ...] = (*_SMALL, *_GPT2)
"""Names that `preset` knows, from small to large."""


def preset(name: str, **changes: Any) -> TrainConfig:
    """A config by its size, with fields changed.

    The small ones are named by their parameters without embeddings. The gpt2 family has GPT-2's context and
    vocabulary, the learning rates of Brown et al. (2020), and nanoGPT's batch (480 sequences), warm-up and beta2.

    Raises:
        ConfigError: an unknown name or field, or a value out of its limits.
    """
    if name in _SMALL:
        n_layer, n_head, n_embd = _SMALL[name]
        values: dict[str, Any] = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
        if name == "tiny":
            values["block_size"] = 64
    elif name in _GPT2:
        n_layer, n_head, n_embd, learning_rate = _GPT2[name]
        values = {
            "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "learning_rate": learning_rate,
            "block_size": 1024, "tokenizer": "gpt2", "global_batch_size": 480, "warmup_iters": 2000, "beta2": 0.95,
        }  # fmt: skip
    else:
        raise ConfigError(
            f"There is no preset {name!r}{did_you_mean(name, PRESETS)}: choose one of {', '.join(PRESETS)}."
        )
    return TrainConfig.from_dict(values | changes)
