"""Compiling the kernel, or else saying why torch serves.

    >>> from gptlab.native.build import library
    >>> library("float32").gptlab_ready()    # on a CPU with AVX-512 and with a compiler
    1

Left out on purpose: what the kernel computes (`gpt.cpp`) and who owns its memory (`engine.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import subprocess
import tempfile
from pathlib import Path

from gptlab.config import ConfigError, GPTConfig
from gptlab.kernels import LANES, compiler, refusal
from gptlab.userfolder import cache_folder

_HERE = Path(__file__).parent
_SOURCES = (
    "gpt.cpp", "state.h", "forward.h", "loss.h", "backward.h", "attention.h", "rows.h", "products.h", "thin.h",
    "tiles.h", "lanes.h", "numbers.h", "pool.h",
)  # fmt: skip
_FLAGS = ("-std=c++20", "-O3", "-shared", "-fPIC", "-pthread", "-mfma", *(f"-m{name}" for name in LANES))
_OWN_FLAGS = {"float32": ("-DGPTLAB_FLOAT32",), "bfloat16": ("-mavx512bf16", "-mamx-tile", "-mamx-bf16")}


class BuildError(RuntimeError):
    """The compiler is there and failed; the message ends with its last words."""


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
            library(dtype)
        except (BuildError, ConfigError, OSError) as error:
            why = str(error)
    if why is None:
        return "native", "as asked" if asked == "native" else "auto: a kernel of our own serves this config here"
    return "torch", f"auto: {why}" if asked == "auto" else f"NOT AS ASKED: {why}"


def compiled(dtype: str) -> Path:
    """The kernel's file, compiled if this source was not yet (some ten seconds).

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    command = compiler()
    if command is None:
        raise BuildError("no C++ compiler was found: install g++, or set CXX")
    flags = (*_FLAGS, *_OWN_FLAGS[dtype])
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout
    text = "".join((_HERE / name).read_text() for name in _SOURCES) + " ".join(flags) + version
    path = cache_folder() / "native" / f"gpt-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / "gpt.so"
            call = [command, *flags, str(_HERE / "gpt.cpp"), "-o", str(made)]
            done = subprocess.run(call, capture_output=True, text=True, check=False)
            if done.returncode:
                raise BuildError(f"{command} could not compile the kernel: {done.stderr[-400:].strip()}")
            made.replace(path)  # whoever else compiles it puts the same in its place
    return path


@functools.cache
def library(dtype: str) -> ctypes.CDLL:
    """The kernel of a precision, compiled where it must be.

    Raises:
        BuildError: there is no compiler, it failed, or the system does not hand out tiles.
    """
    library = ctypes.CDLL(str(compiled(dtype)))
    library.gptlab_pool.restype = ctypes.c_void_p
    library.gptlab_run.restype = ctypes.c_double
    if not library.gptlab_ready():
        raise BuildError("the system does not let this process use AMX tiles")
    return library


def compile_ahead() -> None:
    """Compiles what this machine can use, so that no run has to; what fails is said when a run asks for it."""
    for dtype in _OWN_FLAGS:
        if refusal(GPTConfig(), "cpu", dtype) is None:
            with contextlib.suppress(BuildError, ConfigError, OSError):
                compiled(dtype)
