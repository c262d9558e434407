"""What a config asks for: parameters, FLOPs, bytes and time. Arithmetic alone: a notebook can ask while a slider moves.

    >>> from gptlab.presets import preset
    >>> from gptlab.costs import parameters
    >>> parameters(preset("gpt2")).total
    124439808

Parameters and FLOPs are counted in `counts.py`, memory in `footprint.py`, and handed out here too. Left out on purpose:
what the machine offers (`hardware.py`), communication between processes, and the time of starting small operations: a
prediction for a model below some million parameters is a floor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gptlab import kernels, spread
from gptlab.config import ConfigError, GPTConfig, TrainConfig
from gptlab.counts import (
    Parameters,
    attention_flops_per_token,
    flops_per_token,
    logit_columns,
    logit_rows,
    loss_in_chunks,
    matmul_parameters,
    mfu,
    parameters,
)
from gptlab.footprint import (
    MICRO_BATCH_RULE,
    activation_bytes,
    check_fits,
    choose_micro_batch,
    number_bytes,
    peak_bytes,
    predicted_peak_bytes,
    share_bytes,
    state_bytes,
)

if TYPE_CHECKING:
    from gptlab.kernels import KernelRates
    from gptlab.peaks import Rates

__all__ = [
    "MICRO_BATCH_RULE", "Parameters", "activation_bytes", "attention_flops_per_token", "check_fits",
    "choose_micro_batch", "cost", "flops_per_token", "matmul_parameters", "mfu", "micro_batch", "parameters",
    "peak_bytes", "state_bytes", "step_parts", "step_seconds", "traffic_bytes_per_token", "update_bytes",
]  # fmt: skip


def traffic_bytes_per_token(config: GPTConfig, dtype: str = "float32", micro_batch_size: int = 1) -> int:
    """Bytes that the operations between the matrix products read and write, forward and backward, a token.

    Each operation counts once for every tensor it reads or writes; what products and attention move is part of their
    measured rates. In units of C numbers, forward then backward:

    - LayerNorm: reads 1, writes 1; reads gradient and input, writes 1 (twice a block, once at the end); float32
    - residual sum: reads 2, writes 1; the two gradients are added: reads 2, writes 1 (twice a block); float32
    - GELU: reads 4, writes 4; reads gradient and input, 8, writes 4. ReLU squared is two such operations; SwiGLU a SiLU
      and a product, their backwards, and two gradients laid side by side: 18 times its width
    - bias gradients: read 9; the gradients of q, k and v are laid side by side: reads 3, writes 3
    - under autocast, casts of what a product takes from float32 and back: 3 x (4 + 2) bytes forward, as much backward
    - loss: log-softmax reads V, writes V; its gradient writes V (of the targets), reads 2 V, writes V; float32.
      The crop to V is undone by a copy: reads V, writes V. In chunks: after log-softmax its exponential, in place,
      reads and writes V; under autocast casts of the logits and of their gradient, 2 x (4 + 2) V; each chunk reads and
      writes the head's gradient

    Not counted: turning queries and keys, their norms, a soft cap.
    """
    C, V, s = config.n_embd, config.padded_vocab_size, number_bytes(dtype)
    activation = {"gelu": 5, "relu2": 10, "swiglu": 18}[config.mlp] * config.mlp_width
    block = 4 * C * (2 * (2 + 3) + 2 * (3 + 3)) + s * (activation + C * (9 + 6))
    if s == 2:
        block += 2 * 3 * (4 + 2) * C
    tokens, loss = micro_batch_size * config.block_size, 4 * logit_columns(config) * 8
    if loss_in_chunks(config, tokens):
        loss = V * (4 * 4 + (12 if s == 2 else 0)) + 8 * V * C // logit_rows(tokens, V)
    return config.n_layer * block + 4 * C * (2 + 3) + loss


def update_bytes(config: GPTConfig) -> int:
    """Bytes that the end of a step moves: AdamW reads weight, gradient and two moments and writes three of them (28
    bytes a number), the norm reads the gradient (4), clipping reads and writes it (8)."""
    return 40 * parameters(config).allocated


def step_seconds(
    config: TrainConfig, rates: Rates, *, micro_batch_size: int, dtype: str = "float32", devices: int = 1,
    kernel: KernelRates | None = None,
) -> float:  # fmt: skip
    """Predicted seconds of an optimizer step: the sum of `step_parts`."""
    parts = step_parts(config, rates, micro_batch_size=micro_batch_size, dtype=dtype, devices=devices, kernel=kernel)
    return sum(parts.values())


def step_parts(
    config: TrainConfig, rates: Rates, *, micro_batch_size: int, dtype: str = "float32", devices: int = 1,
    kernel: KernelRates | None = None,
) -> dict[str, float]:  # fmt: skip
    """Predicted seconds of a step's parts: a roofline without overlap (Williams et al. 2009).

    Products, attention, what lies between them, and the update of the weights, each at its own measured rate. Nothing
    is counted for communication or for starting an operation, so it is a floor, close where operations are long.

    Args:
        rates: measured rates of one device.
        micro_batch_size: weights are cast and gradients added to once for each.
        devices: distinct devices that share the global batch.
        kernel: rates of the kernel of our own, where it computes the gradients.
    """
    tokens = config.global_batch_size * config.block_size / devices
    micro_batches = -(-config.global_batch_size // (micro_batch_size * devices))
    if kernel is not None:  # it adds to every gradient, and packs every weight twice: two reads, a write and the copies
        added = update_bytes(config) + micro_batches * (8 + 4 + 2 * number_bytes(dtype)) * parameters(config).allocated
        return {
            "products": tokens * 6 * matmul_parameters(config) / kernel.product_flops,
            "attention": tokens * attention_flops_per_token(config) / kernel.attention_flops,
            "between": tokens * config.n_layer * config.n_embd / kernel.numbers_per_s,
            "update": added / rates.copy_bytes_per_s,
        }
    # Casts read 4 and write 2, and the gradients' casts back read 2 and write 4.
    casts = micro_batches * 12 * matmul_parameters(config) if number_bytes(dtype) == 2 else 0
    # From the second micro-batch on, gradients are added: two reads and a write.
    in_place = update_bytes(config) + (micro_batches - 1) * 12 * parameters(config).allocated
    between = tokens * traffic_bytes_per_token(config, dtype, micro_batch_size) + casts
    return {
        "products": tokens * 6 * matmul_parameters(config) / rates.matmul_flops,
        "attention": tokens * attention_flops_per_token(config) / rates.attention_flops,
        "between": between / rates.elementwise_bytes_per_s,
        "update": in_place / rates.copy_bytes_per_s,
    }


def micro_batch(
    config: TrainConfig, available_bytes: int, dtype: str, sharing: int, device: str, world_size: int
) -> tuple[int, str]:
    """Sequences of a forward pass in each process of a run, and why so many.

    Args:
        available_bytes, dtype, sharing, device: as for `choose_micro_batch`.
        world_size: processes of the run, on all of its machines (`config.nproc` is those of one).
    """
    if config.micro_batch_size:
        return config.micro_batch_size, "as asked"
    shared = config.alone() if world_size == 1 else config.replace(nproc=world_size)
    size = choose_micro_batch(shared, available_bytes, dtype, sharing, device)
    if shared.strategy in spread.PIPELINES:
        place = spread.layout(shared, world_size)
        return spread.pipeline_micro_batch(shared, size, place), f"auto: {spread.MICRO_BATCH_RULE}"
    return size, f"auto: {MICRO_BATCH_RULE}"


def cost(config: TrainConfig) -> dict[str, Any]:
    """Everything that `gptlab cost` prints, as plain values. Looks at the machine, measures nothing, imports no torch.

    What is not known here is None: the peak and the predicted time until they were measured once (`hardware.rates`).
    """
    from gptlab import hardware

    count = parameters(config)
    kind = hardware.likely_device(config.device)
    dtype, dtype_reason = hardware.resolve_dtype(config.dtype, kind, config)
    devices = hardware.distinct_devices(kind, config.nproc)
    sharing = -(-config.nproc // devices)
    memory = hardware.device_memory(kind)
    size, _ = micro_batch(config, memory, dtype, sharing, kind, config.nproc)
    refusal = None
    try:
        check_fits(config, memory, dtype, sharing, kind)
    except ConfigError as error:
        refusal = str(error)
    peak = hardware.peak(kind, dtype, measure=False)
    rates = hardware.rates(kind, dtype, measure=False)
    tokens = config.global_batch_size * config.block_size
    flops = flops_per_token(config)
    native = kernels.serves(config, kind, dtype)
    kernel = kernels.cached_rates(dtype, hardware.cores()) if native else None
    seconds = None
    if rates and (kernel or not native):
        seconds = step_seconds(config, rates, micro_batch_size=size, dtype=dtype, devices=devices, kernel=kernel)
    return {
        "parameters": count.total,
        "non_embedding_parameters": count.non_embedding,
        "parameter_groups": count.groups,
        "padding_parameters": count.padding,
        "vocab_size": config.vocab_size or None,
        "flops_per_token": flops,
        "flops_per_token_kaplan": 6 * count.non_embedding,  # 6 N without embeddings: Kaplan et al. 2020
        "flops_per_token_chinchilla": 6 * count.total,  # 6 N with all parameters: Hoffmann et al. 2022, section 3.3
        "tokens_per_step": tokens,
        "flops_per_step": tokens * flops,
        "tokens": tokens * config.max_iters,
        "flops": tokens * flops * config.max_iters,
        "device": kind,
        "devices": devices,
        "dtype": dtype,
        "dtype_reason": dtype_reason,
        "micro_batch_size": size,
        "state_bytes": share_bytes(config),
        "peak_bytes": predicted_peak_bytes(config, size, memory / sharing, dtype, kind),
        "memory_bytes": memory,
        "fits": refusal is None,
        "refusal": refusal,
        "peak_flops": peak.flops * devices if peak else None,
        "peak_source": peak.source if peak else None,
        "predicted_step_s": seconds,
        "predicted_s": seconds * config.max_iters if seconds else None,
        "predicted_mfu": mfu(config, tokens / seconds, peak.flops * devices) if seconds and peak else None,
    }
