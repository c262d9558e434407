"""Compiling the kernel, and saying why it cannot serve.

    >>> from gptlab.native.build import library
    >>> library().gptlab_ready()    # on a CPU with AMX and with a compiler
    1

Left out on purpose: what the kernel computes (`gpt.cpp`) and who owns its memory (`engine.py`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from gptlab.config import GPTConfig
from gptlab.counts import classifies

_HERE = Path(__file__).parent
_SOURCES = (
    "gpt.cpp", "state.h", "forward.h", "loss.h", "backward.h", "attention.h", "rows.h", "tiles.h", "pool.h",
)  # fmt: skip
_NEEDED = ("amx_tile", "amx_bf16", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16")
_FLAGS = (
    "-std=c++20", "-O3", "-shared", "-fPIC", "-pthread", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl",
    "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mfma",
)  # fmt: skip


class BuildError(RuntimeError):
    """The compiler is there and failed; the message ends with its last words."""


def refusal(config: GPTConfig, device: str, dtype: str) -> str | None:
    """Why the kernel cannot train this config here, or None where it can. Compiles nothing."""
    if device != "cpu":
        return "kernels of our own are for CPUs"
    if dtype != "bfloat16":
        return "kernels of our own compute in bfloat16"
    if classifies(config):
        return "kernels of our own model language"
    plain = GPTConfig(
        n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd, block_size=config.block_size,
        vocab_size=config.vocab_size, bias=config.bias,
    )  # fmt: skip
    different = [name for name, value in plain.to_dict().items() if config.shape().to_dict()[name] != value]
    if different:
        return f"kernels of our own know GPT-2 without {different[0]}"
    for name, value in (("block_size", config.block_size), ("n_embd / n_head", config.head_dim)):
        if value % 32:
            return f"kernels of our own take multiples of 32, and {name} is {value}"
    missing = _missing_instructions()
    if missing:
        return f"this CPU lacks {missing}"
    return None if _compiler() else "no C++ compiler was found: install g++, or set CXX"


def choose(asked: str, config: GPTConfig, device: str, dtype: str, attention: str) -> tuple[str, str]:
    """`torch` or `native`, and why. Compiles the kernel where it is chosen; where that fails torch serves, and the
    reason says so.

    Args:
        asked: auto, torch or native.
        attention: the kernel of attention that was chosen; ours stands in for `sdpa` alone.
    """
    if asked == "torch":
        return "torch", "as asked"
    why = refusal(config, device, dtype)
    if why is None and attention != "sdpa":
        why = f"kernels of our own have no attention {attention}"
    if why is None:
        try:
            library()
        except (BuildError, OSError) as error:
            why = str(error)
    if why is None:
        return "native", "as asked" if asked == "native" else "auto: a kernel of our own serves this config here"
    return "torch", f"auto: {why}" if asked == "auto" else f"NOT AS ASKED: {why}"


@functools.cache
def _missing_instructions() -> str | None:
    """The first instruction set that this CPU does not have."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "AMX under Linux"
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    have = next((line.split() for line in lines if line.startswith("flags")), [])
    return next((name for name in _NEEDED if name not in have), None)


def _compiler() -> str | None:
    """The C++ compiler: what CXX names, or else g++ or clang++."""
    if "CXX" in os.environ:
        return shutil.which(os.environ["CXX"])
    return shutil.which("g++") or shutil.which("clang++")


@functools.cache
def library() -> ctypes.CDLL:
    """The kernel, compiled if this source was not yet (some ten seconds).

    Raises:
        BuildError: there is no compiler, it failed, or the system does not hand out tiles.
    """
    import platformdirs

    compiler = _compiler()
    if compiler is None:
        raise BuildError("no C++ compiler was found: install g++, or set CXX")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    text = "".join((_HERE / name).read_text() for name in _SOURCES) + " ".join(_FLAGS) + version
    path = (
        platformdirs.user_cache_path("gptlab") / "native" / f"gpt-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    )
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / "gpt.so"
            command = [compiler, *_FLAGS, str(_HERE / "gpt.cpp"), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise BuildError(f"{compiler} could not compile the kernel: {done.stderr[-400:].strip()}")
            made.replace(path)  # whoever else compiles it puts the same in its place
    library = ctypes.CDLL(str(path))
    library.gptlab_pool.restype = ctypes.c_void_p
    library.gptlab_run.restype = ctypes.c_double
    if not library.gptlab_ready():
        raise BuildError("the system does not let this process use AMX tiles")
    return library
