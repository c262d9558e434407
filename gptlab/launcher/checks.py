"""Whether this machine's devices can hold a run.

    >>> from gptlab.launcher.checks import check_devices
    >>> from gptlab.presets import preset
    >>> check_devices(preset("tiny"))

Left out on purpose: what a config asks for (`costs.py`), what the machine has (`hardware.py`).
"""

from __future__ import annotations

from gptlab.config import ConfigError, TrainConfig


def check_devices(config: TrainConfig) -> None:
    """Refuses more processes than GPUs, and more memory than there is.

    Raises:
        ConfigError: with the figure.
    """
    from gptlab import costs, hardware, spread

    device = hardware.likely_device(config.device)
    spread.check_device(config, device)
    own = hardware.distinct_devices(device, config.nproc)
    if device == "cuda" and own < config.nproc and not config.share_gpu:
        raise ConfigError(
            f"nproc {config.nproc} is more than the {own} GPU{'s' if own > 1 else ''} of this machine: "
            f"use at most {own}, or share_gpu."
        )
    dtype, _ = hardware.resolve_dtype(config.dtype, device, config)
    costs.check_fits(config, hardware.device_memory(device), dtype, -(-config.nproc // own), device)
