"""What a config asks for: parameters, FLOPs, bytes and time. Arithmetic alone: a notebook can ask while a slider moves.

    >>> from gptlab.presets import preset
    >>> from gptlab.costs import parameters
    >>> parameters(preset("gpt2")).total
    124439808

Parameters and FLOPs are counted in `counts.py` and handed out here too. Left out on purpose: what the machine offers
(`hardware.py`), communication between processes, and the time of starting small operations: a prediction for a model
below some million parameters is a floor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from gptlab.presets import PRESETS, preset

if TYPE_CHECKING:
    from gptlab.peaks import Rates

__all__ = [
    "Parameters", "activation_bytes", "attention_flops_per_token", "check_fits", "choose_micro_batch", "cost",
    "flops_per_token", "matmul_parameters", "mfu", "parameters", "peak_bytes", "state_bytes", "step_seconds",
    "traffic_bytes_per_token", "update_bytes",
]  # fmt: skip

USABLE_MEMORY = 0.9
"""Share of a memory that a run may plan with; the rest is the system's, the interpreter's and the allocator's gaps."""
ACTIVATION_SHARE = 0.5
"""Share of what the training state leaves free that a chosen micro-batch may fill: several runs share a machine."""
MICRO_BATCH_TOKENS = 8192
"""Most tokens of a micro-batch that is chosen here. More only costs memory: a step of 6/6/384 over 64 sequences of 256
took 2.42, 2.52 and 2.36 s (bfloat16, 2 cores) in micro-batches of 2,048, 8,192 and 16,384 tokens."""
MICRO_BATCH_RULE = (
    "the largest that divides a process's share of the global batch evenly, with at most "
    f"{MICRO_BATCH_TOKENS} tokens and {ACTIVATION_SHARE:.0%} of the memory that the training state leaves"
)
"""How `choose_micro_batch` chooses, in words for run.json."""


def state_bytes(config: GPTConfig) -> int:
    """Training state of one process: 16 bytes a number (weight, gradient, two moments), 12 where Muon has one."""
    muon = 12 * config.n_layer * config.n_embd**2 if getattr(config, "optimizer", "") == "muon" else 0
    return 16 * parameters(config).allocated - 4 * muon


def activation_bytes(
    config: GPTConfig, micro_batch_size: int, dtype: str = "float32", *, attention: str = "sdpa", device: str = "cpu"
) -> int:
    """What autograd keeps between the forward and the backward pass of one micro-batch, in bytes.

    With s bytes a number (4, or 2 under half-precision autocast), of each block and token:

    | kept for the backward of | bytes                                                              |
    |--------------------------|--------------------------------------------------------------------|
    | both norms               | their inputs, float32: 2 x 4 C, and mean and deviation, 4 x 4      |
    | ... RMSNorm on a CPU     | no mean, but what the gains multiply: 2 x 4 C                      |
    | c_attn, c_fc             | their inputs: 2 x s C                                              |
    | attention                | its output, which c_proj keeps too: s C; the rest is below         |
    | GELU, second c_proj      | their inputs: 2 x s F, with F = 4 C; ReLU squared alike            |
    | SwiGLU, second c_proj    | c_fc's output, the gate's SiLU, the product: 4 x s F               |
    | dropout, when on         | masks: 2 s C on a CPU, a byte instead of s elsewhere               |

    then the last norm's input and output, the log-softmax of the logits, 4 V, their tanh under a soft cap, 4 V, and a
    mask by documents, s T; where the loss goes in chunks (`loss.py`), in place of output and logits the output's
    gradient, 4 C. Under autocast the cast weights are kept as well, once a micro-batch; the head's not with chunks.
    """
    L, C, T, V, F = config.n_layer, config.n_embd, config.block_size, logit_columns(config), config.mlp_width
    s = _width(dtype)
    mask = 0 if not config.dropout else s if device == "cpu" else 1
    norm = 4 * C + 8
    if config.rmsnorm:
        norm = 4 * C + 4 + (4 * C if device == "cpu" else 0)
    block = 2 * norm + 2 * s * C + s * C + s * F * (4 if config.mlp == "swiglu" else 2) + 2 * mask * C
    block += _attention_bytes(config, s, attention, device)
    embedding_mask = 0 if not config.dropout else 4 * C if device == "cpu" else C
    token = L * block + norm + embedding_mask
    chunks = loss_in_chunks(config, micro_batch_size * T)
    token += 4 * C if chunks else s * C + (8 if config.logit_softcap else 4) * V
    head = config.padded_vocab_size * C if chunks else 0
    casts = 2 * (matmul_parameters(config) - head) if s == 2 else 0
    once = 0
    if attention not in ("math", "flex") and not (
        config.dropout and device == "cpu"
    ):  # a mask of numbers, for all layers
        if config.mask_documents:
            token += s * T
        elif 0 < config.sliding_window < T:
            once = s * T * T
    return micro_batch_size * T * token + casts + once


def _attention_bytes(config: GPTConfig, s: int, attention: str, device: str) -> int:
    """What a block's attention keeps of a token, but for its output.

    With K = G D features of keys: fused, c_attn's output, s (C + 2 K), and the log-sum of the scores, 4 H; q and k once
    more, s (C + K), where they were turned or normed. Written out, q, k and v of every head, 3 s C, and the weights,
    s H T; with dropout also the mask and the result; by documents a mask of a byte a key. With dropout torch's `sdpa`
    on a CPU is written out too, in float32. Norms of q and k keep their input and, on a CPU, what their gains multiply.
    """
    C, H, T, D = config.n_embd, config.n_head, config.block_size, config.head_dim
    K = config.kv_heads * D
    output = s * (C + 2 * K)
    if attention == "math" or (config.dropout and device == "cpu"):
        a = s if attention == "math" else 4
        kept = 3 * a * C + a * H * T * (3 if config.dropout else 1)
        if config.mask_documents and attention == "math":
            kept += T
        held = 0
    else:
        kept = output + 4 * H + (s * (C + K) if config.rope or config.qk_norm else 0)
        held = output
    if config.qk_norm:
        kept += 4 * (H + config.kv_heads)
        if device == "cpu":
            kept += 4 * (C + K)
        # The norm's input: a view of c_attn's output, or a float32 copy.
        kept += 4 * (C + K) if s == 2 and device == "cpu" else output - held
    return kept


def peak_bytes(
    config: GPTConfig, micro_batch_size: int, dtype: str = "float32", nproc: int = 1, *, attention: str = "sdpa",
    device: str = "cpu",
) -> int:  # fmt: skip
    """Most bytes that one process holds at once: at the start of the backward pass, beside the interpreter itself.

    State, activations, and what the backward pass works with at its start: two more float32 copies of the logits (the
    gradients of the loss and of the log-softmax, which live together for a moment), or in the last MLP the gradients of
    the residual and of both sides of its activation, whichever is more. With a loss in chunks, the head's gradient is
    there already, beside a chunk's two float32 tensors of logits (under autocast narrow ones too, and the cast head) or
    that MLP's; with a large embedding the end of the backward pass has more, where its gradient joins the head's.
    Several processes hold gradients twice, in DDP's buckets.
    """
    C, F, V, s = config.n_embd, config.mlp_width, config.padded_vocab_size, _width(dtype)
    activation = s * F * (3 if config.mlp == "swiglu" else 2)
    tokens = micro_batch_size * config.block_size
    kept = activation_bytes(config, micro_batch_size, dtype, attention=attention, device=device)
    work, head = tokens * (4 * C + activation), 4 * V * C
    if loss_in_chunks(config, tokens):
        chunk = logit_rows(tokens, V) * V * (8 if s == 4 else 10) + (2 * V * C if s == 2 else 0)
        most = max(kept + head + max(chunk, work), head + head * config.tie_head)
    else:
        most = kept + max(tokens * 8 * logit_columns(config), work)
    buckets = 4 * parameters(config).allocated if nproc > 1 else 0
    return state_bytes(config) + most + buckets


def _width(dtype: str) -> int:
    """Bytes of a number that a product takes."""
    return 2 if dtype in ("bfloat16", "float16") else 4


def _peak(config: TrainConfig, size: int, dtype: str, device: str) -> int:
    """`peak_bytes` with the attention that the config asks for."""
    return peak_bytes(config, size, dtype, config.nproc, attention=config.attention, device=device)


def choose_micro_batch(
    config: TrainConfig, available_bytes: int, dtype: str = "float32", sharing: int = 1, device: str = "cpu"
) -> int:
    """The micro-batch size that `micro_batch_size 0` becomes; a size that the user gave is returned as it is.

    `MICRO_BATCH_RULE` in words. Where a share has no good divisor (a prime, say), it is cut into as few near-equal
    micro-batches as fit. At least 1: whether that fits is `check_fits`' question.

    Args:
        available_bytes: memory of the device, or of the machine for CPUs.
        sharing: processes that share this memory.
    """
    if config.micro_batch_size:
        return config.micro_batch_size
    share = -(-config.global_batch_size // config.nproc)
    fixed = _peak(config, 0, dtype, device)
    sequence = _peak(config, 1, dtype, device) - fixed
    free = (USABLE_MEMORY * available_bytes / sharing - fixed) * ACTIVATION_SHARE
    most = max(1, min(share, int(free // sequence), MICRO_BATCH_TOKENS // config.block_size))
    divisor = max(size for size in range(1, most + 1) if share % size == 0)
    if 2 * divisor > most:
        return divisor
    return -(-share // -(-share // most))  # a share of the number of pieces


def check_fits(
    config: TrainConfig, available_bytes: int, dtype: str = "float32", sharing: int = 1, device: str = "cpu"
) -> None:
    """Refuses what the memory cannot hold; arguments as for `choose_micro_batch`.

    Raises:
        ConfigError: with the figures, and the largest preset that would fit.
    """
    usable = USABLE_MEMORY * available_bytes
    size = max(1, config.micro_batch_size)
    wanted = sharing * _peak(config, size, dtype, device)
    if wanted <= usable:
        return
    state = sharing * state_bytes(config)
    processes = f" in {sharing} processes" if sharing > 1 else ""
    mend = "choose a smaller n_layer or n_embd"
    if size > 1 and sharing * _peak(config, 1, dtype, device) <= usable:
        mend = "choose a smaller micro_batch_size"
    else:
        fitting = [name for name in PRESETS if sharing * _peak(preset(name), 1, dtype, device) <= usable]
        if fitting and parameters(preset(fitting[-1])).total < parameters(config).total:
            mend = f"choose a smaller preset, {fitting[-1]} at most"
    shape = f"{config.n_layer} layers of width {config.n_embd}, {parameters(config).total / 1e6:,.1f}M parameters"
    many = f"{size} sequence{'s' if size > 1 else ''} at a time"
    raise ConfigError(
        f"This GPT ({shape}) wants {state / 1e9:.1f} GB of training state{processes} and {(wanted - state) / 1e9:.1f} "
        f"GB to work on {many}; {usable / 1e9:.1f} of this machine's {available_bytes / 1e9:.1f} GB are usable: {mend}."
    )


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
    C, V, s = config.n_embd, config.padded_vocab_size, _width(dtype)
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
    config: TrainConfig, rates: Rates, *, micro_batch_size: int, dtype: str = "float32", devices: int = 1
) -> float:
    """Predicted seconds of an optimizer step: a roofline without overlap (Williams et al. 2009).

    Products, attention, what lies between them, and the update of the weights, each at its own measured rate. Nothing
    is counted for communication or for starting an operation, so it is a floor, close where operations are long.

    Args:
        rates: measured rates of one device.
        micro_batch_size: weights are cast and gradients added to once for each.
        devices: distinct devices that share the global batch.
    """
    tokens = config.global_batch_size * config.block_size / devices
    micro_batches = -(-config.global_batch_size // (micro_batch_size * devices))
    # Casts read 4 and write 2, and the gradients' casts back read 2 and write 4.
    casts = micro_batches * 12 * matmul_parameters(config) if _width(dtype) == 2 else 0
    # From the second micro-batch on, gradients are added: two reads and a write.
    in_place = update_bytes(config) + (micro_batches - 1) * 12 * parameters(config).allocated
    return (
        tokens * 6 * matmul_parameters(config) / rates.matmul_flops
        + tokens * attention_flops_per_token(config) / rates.attention_flops
        + (tokens * traffic_bytes_per_token(config, dtype, micro_batch_size) + casts) / rates.elementwise_bytes_per_s
        + in_place / rates.copy_bytes_per_s
    )


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
    size = choose_micro_batch(config, memory, dtype, sharing, kind)
    refusal = None
    try:
        check_fits(config, memory, dtype, sharing, kind)
    except ConfigError as error:
        refusal = str(error)
    peak = hardware.peak(kind, dtype, measure=False)
    rates = hardware.rates(kind, dtype, measure=False)
    tokens = config.global_batch_size * config.block_size
    flops = flops_per_token(config)
    seconds = step_seconds(config, rates, micro_batch_size=size, dtype=dtype, devices=devices) if rates else None
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
        "state_bytes": state_bytes(config),
        "peak_bytes": _peak(config, size, dtype, kind),
        "memory_bytes": memory,
        "fits": refusal is None,
        "refusal": refusal,
        "peak_flops": peak.flops * devices if peak else None,
        "peak_source": peak.source if peak else None,
        "predicted_step_s": seconds,
        "predicted_s": seconds * config.max_iters if seconds else None,
        "predicted_mfu": mfu(config, tokens / seconds, peak.flops * devices) if seconds and peak else None,
    }
