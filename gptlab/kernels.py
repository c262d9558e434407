"""Whether the training kernel of our own (`native/`) serves a config on this machine.

Compiles nothing and imports no torch.

    >>> from gptlab.kernels import refusal
    >>> from gptlab.presets import preset
    >>> refusal(preset("10m"), "cpu", "float16")
    'kernels of our own compute in bfloat16 and float32'

Costs, the choice of a precision and tuning ask here too, so that what is predicted is what will train. Left out on
purpose: compiling the kernel, which can still fail (`native/build.py`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from gptlab.config import GPTConfig
from gptlab.counts import classifies, published
from gptlab.cpu import cpu_flags, cpu_name
from gptlab.runs import read_json
from gptlab.userfolder import cache_folder

LANES = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
"""Instruction sets of the kernel in float32, as Linux names them."""
TILES = ("amx_tile", "amx_bf16", "avx512_bf16")
"""What bfloat16 asks for beside them."""


@dataclass(frozen=True)
class KernelRates:
    """What predictions of the kernel's time are made of, all threads at work (`native/rates.py` measures them)."""

    product_flops: float
    """FLOP/s of matrix products."""
    attention_flops: float
    """FLOP/s of attention, forward and backward, counted over the whole T x T square."""
    numbers_per_s: float
    """Numbers of width, layers x tokens x n_embd of them in a step, that it takes through all else: norms, activations,
    sums, and packing operands."""


def rates_file() -> Path:
    """Where measured rates are kept."""
    return cache_folder() / "kernel-rates.json"


def rates_key(dtype: str, threads: int) -> str:
    """What rates depend on, as it stands in the file."""
    return f"{cpu_name()}, {dtype}, {threads} threads"


def cached_rates(dtype: str, threads: int) -> KernelRates | None:
    """Rates that were measured before, or None."""
    try:
        entry = (read_json(rates_file()) or {}).get(rates_key(dtype, threads))
        values = [float(entry[field.name]) for field in dataclasses.fields(KernelRates)] if entry else []
    except (OSError, TypeError, ValueError, KeyError):
        return None
    return KernelRates(*values) if values and all(0 < value < math.inf for value in values) else None


def refusal(config: GPTConfig, device: str, dtype: str) -> str | None:
    """Why the kernel cannot train this config here, or None where it can."""
    if device != "cpu":
        return "kernels of our own are for CPUs"
    if (strategy := getattr(config, "strategy", "ddp")) != "ddp":
        return f"kernels of our own train whole models, and strategy is {strategy}"
    if dtype not in ("float32", "bfloat16"):
        return "kernels of our own compute in bfloat16 and float32"
    if classifies(config) or published(config):
        return "kernels of our own train our own GPT on language"
    plain = GPTConfig(
        n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd, block_size=config.block_size,
        vocab_size=config.vocab_size, bias=config.bias,
    )  # fmt: skip
    asked = config.shape().to_dict()
    different = [name for name, value in plain.to_dict().items() if asked[name] != value]
    if different:
        return f"kernels of our own know GPT-2 without {different[0]}"
    for name, value in (("block_size", config.block_size), ("n_embd / n_head", config.head_dim)):
        if value % 32:
            return f"kernels of our own take multiples of 32, and {name} is {value}"
    missing = _missing_instructions(TILES) if dtype == "bfloat16" else None
    return f"this CPU lacks {missing}" if missing else lanes_refusal()


def lanes_refusal() -> str | None:
    """Why nothing of our own can be compiled for this CPU, in whatever precision, or None where it can."""
    missing = _missing_instructions(LANES)
    if missing:
        return f"this CPU lacks {missing}"
    return None if compiler() else "no C++ compiler was found: install g++, or set CXX"


def serves(config: GPTConfig, device: str, dtype: str) -> bool:
    """Whether `kernels auto` will take the kernel, as far as can be told without compiling it."""
    fixed = {"kernels": ("auto", "native"), "attention": ("auto", "sdpa"), "compile": ("off",)}
    if any(getattr(config, name, legal[0]) not in legal for name, legal in fixed.items()):
        return False
    return refusal(config, device, dtype) is None


def _missing_instructions(needed: tuple[str, ...]) -> str | None:
    """The first instruction set that this CPU does not have."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "AVX-512 under Linux"
    return next((name for name in needed if name not in cpu_flags()), None)


def compiler() -> str | None:
    """The C++ compiler: what CXX names, or else g++ or clang++."""
    if "CXX" in os.environ:
        return shutil.which(os.environ["CXX"])
    return shutil.which("g++") or shutil.which("clang++")
