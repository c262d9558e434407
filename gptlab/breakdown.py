"""Where the time of a training step goes: the step that trains, timed, taken apart, and laid beside its prediction.

    >>> from gptlab.breakdown import measure
    >>> step = measure(preset("1m"))
    >>> step.seconds, step.parts["products"], step.predicted["products"]

Each measurement is a process of its own: none inherits another's memory, threads or compiled code, and a notebook's
kernel stays free of torch. The step is timed without a profiler; then torch's profiler names the operations of a few
more, whose shares are laid over the timed seconds, since profiling slows small operations most. On a CPU the
operations' own seconds on the training thread are counted, so that parts add up to the step; on CUDA the kernels'.

Left out on purpose: choosing the fastest setting (`tuning.py`), the cost model (`costs.py`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from gptlab import costs, hardware
from gptlab.config import ConfigError, TrainConfig

PARTS = ("products", "attention", "between", "update", "rest")
"""Matrix products; attention; norms, activations, sums, casts and loss between them; gradient norm, clipping and
optimizer; and what no operation accounts for: Python, starting operations, the batch."""
_KINDS = (
    ("update", r"adam|foreach|linalg_vector_norm|norm\b.*stack|Optimizer|clip|lerp"),
    (
        "attention",
        r"scaled_dot_product|flash_attention|efficient_attention|cudnn_attention|softmax.*attn|flex_attention",
    ),
    ("products", r"(^|::)(add)?mm(_out)?$|::bmm|baddbmm|mkldnn|linear|gemm|cutlass|cublas|::matmul|sm\d+_xmma|nvjet"),
    ("compiled", r"Compiled|triton|graph_\d|inductor|CallBackward"),
)
TIMED_S = 1.0
"""Seconds of timed steps, five steps at least."""
LIMIT_S = 240.0
"""A measurement that takes longer, compiling included, is ended."""


@dataclass(frozen=True)
class Step:
    """A measured step and what was predicted of it."""

    setting: dict[str, Any]
    """What each `auto` became: device, dtype, attention, micro_batch_size, threads, kernels, compile."""
    seconds: float
    """Median seconds of an optimizer step, compiling left out."""
    tokens: int
    """Tokens of a step."""
    parts: dict[str, float]
    """Seconds by part, which sum to `seconds`; `compiled` and `native` hold what fused kernels do not tell apart."""
    predicted: dict[str, float] | None
    """Seconds by part from the cost model; None where this device's rates are not known."""
    flops: dict[str, float]
    """FLOPs of products and attention in a step, by the model's count."""
    bytes: dict[str, float]
    """Bytes that the parts between and update move in a step, by the model's count."""
    peak_flops: float | None
    compile_s: float
    peak_bytes: int | None

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over what the device could do, 0..1."""
        return sum(self.flops.values()) / self.seconds / self.peak_flops if self.peak_flops else None

    @property
    def predicted_s(self) -> float | None:
        """Predicted seconds of the whole step."""
        return sum(self.predicted.values()) if self.predicted else None


def measure(config: TrainConfig, *, seconds: float = TIMED_S, limit_s: float = LIMIT_S) -> Step:
    """Takes real steps of a config in a process of its own.

    Args:
        seconds: to time for.
        limit_s: after which the process is ended.

    Raises:
        ConfigError: the config cannot be run here, or took too long.
    """
    if not config.vocab_size:
        raise ConfigError("vocab_size is not known yet: give one, or open the corpus whose tokenizer has it.")
    process = subprocess.Popen(
        [sys.executable, "-m", "gptlab.breakdown"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, problem = process.communicate(json.dumps({"config": config.to_dict(), "seconds": seconds}), limit_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)  # compilers too
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise ConfigError(f"A step was not measured within {limit_s:.0f} s: raise limit_s.") from None
        raise
    if process.returncode:
        raise ConfigError(f"A step could not be measured: {(problem.strip().splitlines() or ['it failed'])[-1][-300:]}")
    return Step(**json.loads(out.splitlines()[-1]))


def kind_of(operation: str) -> str:
    """The part that an operation belongs to, by its name in torch's profiler."""
    return next((kind for kind, pattern in _KINDS if re.search(pattern, operation)), "between")


def main() -> None:
    """Reads a config, takes steps, prints what they were like: the other side of `measure`."""
    import statistics

    import numpy as np
    import torch

    from gptlab import compiling, joining, memory
    from gptlab.assembly import assemble
    from gptlab.native.rates import measured
    from gptlab.parallel.world import World
    from gptlab.worker import settle

    joining.keep_leash()
    asked = json.load(sys.stdin)
    config = TrainConfig.from_dict(asked["config"]).alone()
    setting, _ = settle(config, {}, 1, 1)
    torch.set_num_threads(setting.threads)
    rates = hardware.rates(setting.device, setting.dtype, measure=True)
    peak = hardware.total_peak(setting.device, setting.dtype, 1, measure=True)
    kernel = measured(setting.dtype, hardware.cores()) if setting.kernels == "native" else None
    ids = np.random.default_rng(0).integers(0, config.vocab_size, 4 * (config.block_size + 1) + 65536).astype(np.uint32)
    wait = torch.cuda.synchronize if setting.device == "cuda" else lambda: None
    memory.reset_peak(setting.device)
    parts = assemble(config, setting, ids, World(0, 1, torch.device(setting.device)))
    parts.strategy.part.train()
    for step in range(3):
        parts.step(step)  # buffers, the optimizer's state, and compilers
    times: list[float] = []
    while len(times) < 5 or sum(times) < asked["seconds"]:
        wait()
        began = time.perf_counter()
        parts.step(3 + len(times))
        wait()
        times.append(time.perf_counter() - began)
    seconds = statistics.median(times)
    tokens = config.global_batch_size * config.block_size
    size = setting.micro_batch_size
    bytes_between = tokens * costs.traffic_bytes_per_token(config, setting.dtype, size)
    found = Step(
        setting=asdict(setting), seconds=seconds, tokens=tokens,
        parts=_taken_apart(
            parts.step, 3 + len(times), seconds, setting.device, wait, native=setting.kernels == "native"
        ),
        predicted=costs.step_parts(config, rates, micro_batch_size=size, dtype=setting.dtype, kernel=kernel)
        if rates
        else None,
        flops={
            "products": float(tokens * 6 * costs.matmul_parameters(config)),
            "attention": float(tokens * costs.attention_flops_per_token(config)),
        },
        bytes={"between": float(bytes_between), "update": float(costs.update_bytes(config))},
        peak_flops=peak.flops if peak else None, compile_s=compiling.seconds(),
        peak_bytes=memory.peak_bytes(setting.device),
    )  # fmt: skip
    print(json.dumps(asdict(found)))


def _taken_apart(step: Any, number: int, seconds: float, device: str, wait: Any, *, native: bool) -> dict[str, float]:
    """Seconds by part: the profiler's shares of some steps, laid over the seconds of an unprofiled one."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    count = max(1, min(10, round(0.3 / seconds)))
    step(number)
    with profile(activities=activities) as seen:
        wait()
        began = time.perf_counter()
        for more in range(1, 1 + count):
            step(number + more)
        wait()
        whole = time.perf_counter() - began
    found = dict.fromkeys(PARTS, 0.0)
    for event in seen.key_averages():
        own = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        kind = kind_of(event.key)
        found[kind] = found.get(kind, 0.0) + own * 1e-6
    left = max(0.0, whole - sum(found.values()))  # our own kernel is no operation that torch knows
    found["native" if native else "rest"] = left
    total = sum(found.values())
    return {kind: own / total * seconds for kind, own in found.items() if own or kind in PARTS}


if __name__ == "__main__":
    main()
