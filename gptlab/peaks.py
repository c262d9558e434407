"""How fast a device is at best: from NVIDIA's data sheets, or measured here and kept.

    >>> from gptlab.peaks import known_peak
    >>> known_peak("NVIDIA H200", "bfloat16").flops
    989500000000000.0

A peak is what MFU divides by. The table knows device *and* precision; what is not in it is measured, never guessed from
another chip. Measured rates stand in `rates.json` in the user's cache, by device, precision, threads
and version of torch.

Left out on purpose: which devices this machine has (`hardware.py`).
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

from gptlab.config import ConfigError
from gptlab.runs import read_json, write_json
from gptlab.userfolder import cache_folder

# Dense peaks in TFLOP/s by device name and precision. float32 is the rate outside tensor cores, which torch uses unless
# tf32 is allowed; tensor-core rates are those with float32 accumulation, without sparsity (data sheets that print the
# sparse figure are halved). Names match as a whole: a MIG slice, a laptop's chip or a cut-down variant is another one.
# Sources, all NVIDIA's: data sheets of A100 (2021), H100 (2022), H200 (2024), L4 and L40S (2023), L40 (2022), A10
# (2021), A10G (for AWS, 2021), V100 (2020) and T4 (2018); DGX B200 (2024); GH200 (2023); whitepapers of GA102
# (v2, appendix A: RTX 3090), Ada (v2, appendix A: RTX 4090) and RTX Blackwell (v1, appendix A: RTX 5090).
_PEAKS: tuple[tuple[str, str, dict[str, float]], ...] = (
    ("A100", r"A100[- ].*|A100", {"float32": 19.5, "tfloat32": 156, "bfloat16": 312, "float16": 312}),
    ("H100 SXM", r"H100 80GB HBM3", {"float32": 67, "tfloat32": 494.5, "bfloat16": 989.5, "float16": 989.5}),
    ("H100 PCIe", r"H100 PCIe", {"float32": 51, "tfloat32": 378, "bfloat16": 756.5, "float16": 756.5}),
    ("H100 NVL", r"H100 NVL", {"float32": 60, "tfloat32": 417.5, "bfloat16": 835.5, "float16": 835.5}),
    ("H200", r"H200", {"float32": 67, "tfloat32": 494.5, "bfloat16": 989.5, "float16": 989.5}),
    ("H200 NVL", r"H200 NVL", {"float32": 60, "tfloat32": 417.5, "bfloat16": 835.5, "float16": 835.5}),
    ("GH200", r"GH200 \d+GB", {"float32": 67, "tfloat32": 494.5, "bfloat16": 989.5, "float16": 989.5}),
    ("B200", r"B200", {"float32": 75, "tfloat32": 1125, "bfloat16": 2250, "float16": 2250}),
    ("L4", r"L4", {"float32": 30.3, "tfloat32": 60, "bfloat16": 121, "float16": 121}),
    ("L40", r"L40", {"float32": 90.5, "tfloat32": 90.5, "bfloat16": 181.05, "float16": 181.05}),
    ("L40S", r"L40S", {"float32": 91.6, "tfloat32": 183, "bfloat16": 362.05, "float16": 362.05}),
    ("A10", r"A10", {"float32": 31.2, "tfloat32": 62.5, "bfloat16": 125, "float16": 125}),
    ("A10G", r"A10G", {"float32": 31.5, "tfloat32": 35, "bfloat16": 70, "float16": 70}),
    ("V100 SXM2", r"V100-SXM[23]-\d+GB", {"float32": 15.7, "float16": 125}),
    ("V100 PCIe", r"V100-PCIE-\d+GB", {"float32": 14, "float16": 112}),
    ("V100S", r"V100S-PCIE-\d+GB", {"float32": 16.4, "float16": 130}),
    ("T4", r"T4", {"float32": 8.1, "float16": 65}),
    ("RTX 3090", r"GeForce RTX 3090", {"float32": 35.6, "tfloat32": 35.6, "bfloat16": 71, "float16": 71}),
    ("RTX 4090", r"GeForce RTX 4090", {"float32": 82.6, "tfloat32": 82.6, "bfloat16": 165.2, "float16": 165.2}),
    ("RTX 5090", r"GeForce RTX 5090", {"float32": 104.8, "tfloat32": 104.8, "bfloat16": 209.5, "float16": 209.5}),
)  # fmt: skip

BUSY_SHARE = 0.85
"""Least share of its threads' time that a measurement must get on a CPU; threads that wait for each other spin, so less
means that others used the cores. A machine left alone gave 0.91 to 0.99."""

BUSY_FOR_S = 600.0
"""Seconds for which rates that were measured on a busy machine serve, before a run spends the time to try again."""


@dataclass(frozen=True)
class Peak:
    """The best rate of matrix products of one device in one precision."""

    flops: float
    """FLOP/s."""
    source: str
    """`NVIDIA's data sheet (A100), dense` or `measured (...)`."""


@dataclass(frozen=True)
class Rates:
    """Measured rates of one device in one precision: what predictions of time are made of."""

    peak_flops: float
    """FLOP/s of a forward product 2048 x 768 x 3072: median of 20."""
    matmul_flops: float
    """FLOP/s of the same layer's three products, forward and both gradients."""
    attention_flops: float
    """FLOP/s of causal fused attention, forward and backward, counted over the whole T x T square."""
    elementwise_bytes_per_s: float
    """Bytes a second that GELU reads and writes, forward and backward, on the same layer's 2048 x 3072 numbers in
    float32: into new memory each time, as training does between its products."""
    copy_bytes_per_s: float
    """Bytes a second that a copy of 64 MB reads and writes, into memory that is there, as updates in place do."""
    busy: bool = False
    """Whether others were using the cores meanwhile, so that the figures are too low."""
    time: float = 0.0
    """When they were measured, in seconds since 1970."""

    @property
    def is_provisional(self) -> bool:
        """Whether it is time to try again: a busy machine's figures, and not of this moment."""
        return self.busy and time.time() - self.time > BUSY_FOR_S


def known_peak(device_name: str, dtype: str) -> Peak | None:
    """A device's dense peak from NVIDIA's data sheets, or None where name and precision are not listed together."""
    name = re.sub(r"^(NVIDIA|Tesla)\s+", "", device_name.strip())
    if "MIG" in name:
        return None
    for label, pattern, peaks in _PEAKS:
        if re.fullmatch(pattern, name) and dtype in peaks:
            return Peak(peaks[dtype] * 1e12, f"NVIDIA's data sheet ({label}), dense")
    return None


def cache_file() -> Path:
    """Where measured rates are kept: the user's cache, XDG_CACHE_HOME where that is set."""
    return cache_folder() / "rates.json"


def cache_key(name: str, dtype: str, threads: int) -> str:
    """What a measured rate depends on, as it stands in the cache."""
    return f"{name}, {dtype}, {threads} threads, torch {version('torch')}"


def cached(name: str, dtype: str, threads: int) -> Rates | None:
    """Rates that were measured before, or None."""
    return all_cached().get(cache_key(name, dtype, threads))


def all_cached() -> dict[str, Rates]:
    """Every entry of the cache that reads as rates; a file that somebody spoilt counts as empty."""
    try:
        entries = (read_json(cache_file()) or {}).items()
    except ConfigError:  # no home, and so nothing kept
        return {}
    names = ("peak_flops", "matmul_flops", "attention_flops", "elementwise_bytes_per_s", "copy_bytes_per_s")
    found = {}
    for key, entry in entries:
        values = [entry.get(name) if isinstance(entry, dict) else None for name in names]
        rates = [float(value) for value in values if isinstance(value, (int, float)) and 0 < value < math.inf]
        if len(rates) == len(names):
            busy, when = entry.get("busy") is True, entry.get("time")
            found[key] = Rates(
                rates[0], rates[1], rates[2], rates[3], rates[4], busy, when if isinstance(when, float) else 0.0
            )
    return found


def measure_and_keep(device: str, name: str, dtype: str, threads: int) -> Rates:
    """Measures, and writes the result to the user's cache.

    One process measures at a time; one that waited takes what the other found. A busy CPU's figures are marked, the
    faster of an old and a new one is kept, and after BUSY_FOR_S a run tries again. Where the cache cannot be written,
    the next run measures again.
    """
    with _lock():
        before = cached(name, dtype, threads)
        if before and not before.is_provisional:
            return before
        found = measure(device, dtype, threads)
        if before and found.busy and before.peak_flops > found.peak_flops:
            found = replace(before, time=found.time)
        kept = {key: asdict(entry) for key, entry in all_cached().items()}
        kept[cache_key(name, dtype, threads)] = asdict(found)
        with contextlib.suppress(OSError, ConfigError):
            write_json(cache_file(), kept)
        return found


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """Held by the one process that measures. Where no lock can be made, everyone measures."""
    import fcntl

    try:
        cache_file().parent.mkdir(parents=True, exist_ok=True)
        file = open(cache_file().with_suffix(".lock"), "w")  # noqa: SIM115 - closed by `with` below
    except (OSError, ConfigError):
        yield
        return
    with file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measure(device: str, dtype: str, threads: int) -> Rates:
    """Measures the rates of a device, in some 2 s. torch's threads are as before afterwards.

    Medians of 20 (5 for the slower ones) after warm-up, on tensors of ones and noise, with the device synchronised.
    """
    import torch
    import torch.nn.functional as F

    kind = getattr(torch, "float32" if dtype == "tfloat32" else dtype)
    before, tf32 = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
    wait: Callable[[], None] = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device, lambda: None)
    if device == "cpu":
        torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tfloat32"

    def seconds(work: Callable[[], object], times: int) -> float:
        for _ in range(3):
            work()
        wait()
        taken = []
        for _ in range(times):
            start = time.perf_counter()
            work()
            wait()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    try:
        # A generator of its own: measuring must not move the stream that training draws from.
        noise = torch.Generator().manual_seed(0)
        M, K, N = 2048, 768, 3072
        x = torch.randn(M, K, generator=noise).to(device, kind)
        w = torch.randn(K, N, generator=noise).to(device, kind)
        g = torch.ones(M, N, device=device, dtype=kind)
        B, H, T, D = 4, 12, 512, 64  # GPT-2's heads
        qkv = torch.randn(3, B, H, T, D, generator=noise).to(device, kind).requires_grad_()
        y = torch.ones(B, H, T, D, device=device, dtype=kind)

        def attend() -> None:
            qkv.grad = None  # else it would be added to
            F.scaled_dot_product_attention(*qkv, is_causal=True).backward(y)  # type: ignore[misc]

        wide = torch.randn(M, N, generator=noise).to(device).requires_grad_()
        ones = torch.ones(M, N, device=device)

        def activate() -> None:
            wide.grad = None
            F.gelu(wide, approximate="tanh").backward(ones)

        source, target = torch.ones(2, 16 * 2**20, device=device)  # 64 MB each, float32

        wall, cpu = time.perf_counter(), time.process_time()
        forward = seconds(lambda: x @ w, 20)
        share = (time.process_time() - cpu) / (time.perf_counter() - wall) / threads
        backward = seconds(lambda: (g @ w.T, x.T @ g), 10)
        attention = seconds(attend, 5)
        gelu = seconds(activate, 5)
        copy = seconds(lambda: target.copy_(source), 5)
    finally:
        torch.set_num_threads(before)
        torch.backends.cuda.matmul.allow_tf32 = tf32
    product = 2 * M * K * N
    return Rates(
        peak_flops=product / forward,
        matmul_flops=3 * product / (forward + backward),
        attention_flops=12 * B * T * T * H * D / attention,
        elementwise_bytes_per_s=5 * wide.numel() * 4 / gelu,  # reads 1, writes 1; reads 2, writes 1
        copy_bytes_per_s=2 * source.numel() * source.element_size() / copy,
        busy=device == "cpu" and share < BUSY_SHARE,
        time=time.time(),
    )
