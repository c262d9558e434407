"""How fast the kernel of our own is on this machine: measured by running it, in a second, and kept.

    >>> from gptlab.native.rates import measured
    >>> measured("bfloat16", threads=2).product_flops    # FLOP/s

Three small models, each of which spends its time on something else (products, attention, and what lies between them),
give three rates. Predictions are made of them (`costs.py`), which reads what is kept here through `kernels.py`.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import asdict

import torch

from gptlab import kernels
from gptlab.config import ConfigError, GPTConfig
from gptlab.counts import attention_flops_per_token, matmul_parameters
from gptlab.kernels import KernelRates
from gptlab.model import GPT
from gptlab.native.engine import Engine
from gptlab.runs import read_json, write_json

SHAPES = (
    (GPTConfig(n_layer=1, n_head=12, n_embd=768, block_size=64, vocab_size=64), 32),  # products
    (GPTConfig(n_layer=1, n_head=4, n_embd=128, block_size=1024, vocab_size=64), 4),  # attention
    (GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=64), 32),  # what lies between
)
"""Models, and the sequences that each takes."""
TIMES = 5


def measured(dtype: str, threads: int) -> KernelRates:
    """The rates that are kept, or else measured now and kept. Where the cache cannot be written, measured again."""
    found = kernels.cached_rates(dtype, threads)
    if found is None:
        found = measure(dtype, threads)
        with contextlib.suppress(OSError, ConfigError):
            path = kernels.rates_file()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, (read_json(path) or {}) | {kernels.rates_key(dtype, threads): asdict(found)})
    return found


def measure(dtype: str, threads: int) -> KernelRates:
    """Runs the kernel on each of SHAPES; medians."""
    seconds = [_seconds(config, batch, dtype, threads) for config, batch in SHAPES]
    work = []
    for config, batch in SHAPES:
        tokens = batch * config.block_size
        products, attention = 6 * matmul_parameters(config), attention_flops_per_token(config)
        work.append([tokens * products, tokens * attention, tokens * config.n_layer * config.n_embd])
    shares = torch.linalg.solve(
        torch.tensor(work, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)
    )  # seconds a FLOP of products and of attention, and a number
    # Noise can leave nothing for one of them: then it has at most the whole time of the shape that it leads.
    limits = [seconds[i] / work[i][i] for i in range(3)]
    a_product, an_attention, a_number = (
        float(share) if share > 0.05 * limit else limit for share, limit in zip(shares, limits, strict=True)
    )
    return KernelRates(1 / a_product, 1 / an_attention, 1 / a_number)


def _seconds(config: GPTConfig, batch: int, dtype: str, threads: int) -> float:
    """Of a forward and backward pass, the weights' packing left out."""
    model = GPT(config)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    engine = Engine(model, batch=batch, threads=threads, dtype=dtype)
    engine.begin()
    ids = torch.zeros(batch, config.block_size, dtype=torch.long)
    taken = []
    for _ in range(TIMES + 1):
        began = time.perf_counter()
        engine(ids, ids, 1e-3)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])
