"""Whether this machine's devices can hold a run, and go on with one that began elsewhere.

    >>> from gptlab.launcher.checks import check_devices
    >>> from gptlab.presets import preset
    >>> check_devices(preset("tiny"))

Left out on purpose: what a config asks for (`costs.py`), what the machine has (`hardware.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gptlab.config import ConfigError, TrainConfig


def check_devices(config: TrainConfig) -> None:
    """Refuses a device that is not here, more processes than GPUs, and more memory than there is.

    Raises:
        ConfigError: with the figure.
    """
    from gptlab import costs, hardware, spread

    device = hardware.likely_device(config.device)
    if not hardware.can_use(device):
        raise ConfigError(f"device {device} cannot be used on this machine: give auto or cpu.")
    spread.check_device(device, config.nproc)
    own = hardware.distinct_devices(device, config.nproc)
    if device == "cuda" and own < config.nproc and not config.share_gpu:
        raise ConfigError(
            f"nproc {config.nproc} is more than the {own} GPU{'s' if own > 1 else ''} of this machine: "
            f"use at most {own}, or share_gpu."
        )
    dtype, _ = hardware.resolve_dtype(config.dtype, device, config)
    costs.check_fits(config, hardware.device_memory(device), dtype, -(-config.nproc // own), device)


def check_kept(config: TrainConfig, kept: Mapping[str, Any], *, there: bool | None = None) -> None:
    """Refuses to go on with choices of an earlier attempt, or of another node, that this machine cannot carry out.

    Args:
        kept: the `setting` of run.json; empty before the first attempt.
        there: whether torch can use its device here; None looks.

    Raises:
        ConfigError: with what is lacking.
    """
    from gptlab import hardware, kernels

    device = kept.get("device", "cpu")
    if not (hardware.can_use(device) if there is None else there):
        raise ConfigError(f"The run began on {device}, which this machine lacks: resume it where there is one.")
    if kept.get("kernels") == "native" and (why := kernels.refusal(config, device, kept.get("dtype", ""))):
        raise ConfigError(
            f"The run began with the kernel of our own, and here {why}: use a machine like its first, or start a run "
            "with kernels torch."
        )
