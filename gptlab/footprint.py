"""The memory that a config asks for, what a micro-batch may therefore be, and what cannot fit.

    >>> from gptlab.footprint import peak_bytes
    >>> from gptlab.presets import preset
    >>> round(peak_bytes(preset("gpt2"), 1) / 1e9, 1)    # GB
    3.6

Left out on purpose: what the machine has (`hardware.py`), and what was really held (`memory.py`).
"""

from __future__ import annotations

import dataclasses

from gptlab import kernels, shares
from gptlab.config import ConfigError, GPTConfig, TrainConfig
from gptlab.counts import logit_columns, logit_rows, loss_in_chunks, matmul_parameters, parameters
from gptlab.presets import PRESETS, preset
from gptlab.shares import Work

USABLE_MEMORY = 0.9
"""Share of a memory that a run may plan with; the rest is the system's, the interpreter's and the allocator's gaps."""
ACTIVATION_SHARE = 0.5
"""Share of what the training state leaves free that a chosen micro-batch may fill: several runs share a machine."""
RUNTIME_BYTES = 25_000_000
"""What a CPU's process takes after its start beside all tensors: code first used, threads' stacks and scratch."""
ALLOCATOR_GAPS = 0.2
"""Share of the working set that the C library's allocator leaves between tensors of many sizes: 17 to 21 % under three
configs (`python -m gptlab.benchmark.predictions` has one of them). A GPU's allocator counts its tensors alone."""
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


def share_bytes(config: TrainConfig) -> int:
    """Training state of the process that holds most of it: `state_bytes`, or its part."""
    return 16 * shares.held_parameters(config) if shares.parted(config) else state_bytes(config)


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
    s = number_bytes(dtype)
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


def native_bytes(config: GPTConfig, micro_batch_size: int, dtype: str) -> int:
    """What the kernel of our own holds beside parameters and gradients (`native/state.h`, in its order), in bytes.

    Weights as both of their products want them; with s bytes a number, M rows and width C, 10 s C and some float32
    numbers of each row and layer; the residual stream; transposed operands of the weights' gradients; and the logits of
    a stretch of rows, or where that is more the gradients of a layer's activations.
    """
    L, C, H, V, s = config.n_layer, config.n_embd, config.n_head, config.padded_vocab_size, number_bytes(dtype)
    M = micro_batch_size * config.block_size
    rows = min(M, 4096 // s)  # whose logits exist at once
    packed = 2 * s * (12 * L * C * C + V * C)
    layers = L * M * (10 * s * C + 8 + 4 * H)
    at_once = 256 if M >= 4096 else 128 if M >= 1024 else 32
    stream = M * C * 4 + M * (s * C + 4) + 4 * 4 * C * -(-M // at_once) + 4 * s * M * C + 12 * M
    stream += 2 * 4 * -(-V // 256) * rows
    return packed + layers + stream + max(s * (M * C + rows * V), 8 * s * M * C)


def peak_bytes(
    config: GPTConfig, micro_batch_size: int, dtype: str = "float32", *, attention: str = "sdpa",
    device: str = "cpu", native: bool = False, saving: bool = False,
) -> int:  # fmt: skip
    """Most bytes that one process holds at once: at the start of the backward pass, beside the interpreter itself.

    State, activations, and what the backward pass works with at its start: two more float32 copies of the logits (the
    gradients of the loss and of the log-softmax, which live together for a moment), or in the last MLP the gradients of
    the residual and of both sides of its activation, whichever is more. With a loss in chunks, the head's gradient is
    there already, beside a chunk's two float32 tensors of logits (under autocast narrow ones too, and the cast head) or
    that MLP's; with a large embedding the end of the backward pass has more, where its gradient joins the head's.

    Args:
        native: whether the kernel of our own computes the gradients.
        saving: count the copy of weights and moments that a checkpoint is written from, in the main memory, too.
    """
    copy = state_bytes(config) - 4 * parameters(config).allocated if saving and device == "cpu" else 0
    if native:
        return state_bytes(config) + native_bytes(config, micro_batch_size, dtype) + copy
    work = _work(config, micro_batch_size, dtype, attention=attention, device=device)
    gaps = 1 + ALLOCATOR_GAPS * (device == "cpu")
    return state_bytes(config) + round(gaps * (work.kept + work.most)) + copy


def _work(config: GPTConfig, micro_batch_size: int, dtype: str, *, attention: str, device: str) -> Work:
    """What a micro-batch keeps, and what its backward pass takes at its start."""
    C, F, V, s = config.n_embd, config.mlp_width, config.padded_vocab_size, number_bytes(dtype)
    activation = s * F * (3 if config.mlp == "swiglu" else 2)
    tokens = micro_batch_size * config.block_size
    kept = activation_bytes(config, micro_batch_size, dtype, attention=attention, device=device)
    work, head = tokens * (4 * C + activation), 4 * V * C
    if loss_in_chunks(config, tokens):
        chunk = logit_rows(tokens, V) * V * (8 if s == 4 else 10) + (2 * V * C if s == 2 else 0)
        most = max(kept + head + max(chunk, work), head + head * config.tie_head) - kept
    else:
        most = max(tokens * 8 * logit_columns(config), work)
    return Work(kept, most)


def number_bytes(dtype: str) -> int:
    """Bytes of a number that a product takes."""
    return 2 if dtype in ("bfloat16", "float16") else 4


def run_bytes(config: TrainConfig, size: int, dtype: str, device: str, *, saving: bool = False) -> int:
    """`peak_bytes` of a run as it will be: with the kernels and the attention that it will take, and of a process's
    part where the strategy leaves it one. Then the main process gathers the whole state before it copies it."""
    if shares.parted(config):

        def work(layers: int) -> Work:
            shape = dataclasses.replace(config.shape(), n_layer=layers)
            return _work(shape, size, dtype, attention=config.attention, device=device)

        copies = 2 * (state_bytes(config) - 4 * parameters(config).allocated) if saving and device == "cpu" else 0
        return shares.peak_bytes(config, size, work, number_bytes(dtype)) + copies
    return peak_bytes(
        config, size, dtype, attention=config.attention, device=device, saving=saving,
        native=kernels.serves(config, device, dtype),
    )  # fmt: skip


def predicted_peak_bytes(config: TrainConfig, size: int, available_bytes: float, dtype: str, device: str) -> int:
    """The most that a run will hold, with the copy that a checkpoint is written from: a run makes one where it fits."""
    runtime = RUNTIME_BYTES if device == "cpu" else 0
    whole = run_bytes(config, size, dtype, device, saving=True)
    return runtime + (whole if whole <= available_bytes else run_bytes(config, size, dtype, device))


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
    fixed = run_bytes(config, 0, dtype, device)
    sequence = run_bytes(config, 1, dtype, device) - fixed
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
    wanted = sharing * run_bytes(config, size, dtype, device)
    if wanted <= usable:
        return
    state = sharing * share_bytes(config)
    processes = f" in {sharing} processes" if sharing > 1 else ""
    mend = "choose a smaller n_layer or n_embd"
    if size > 1 and sharing * run_bytes(config, 1, dtype, device) <= usable:
        mend = "choose a smaller micro_batch_size"
    else:
        fitting = [name for name in PRESETS if sharing * run_bytes(preset(name), 1, dtype, device) <= usable]
        if fitting and parameters(preset(fitting[-1])).total < parameters(config).total:
            mend = f"choose a smaller preset, {fitting[-1]} at most"
    shape = f"{config.n_layer} layers of width {config.n_embd}, {parameters(config).total / 1e6:,.1f}M parameters"
    many = f"{size} sequence{'s' if size > 1 else ''} at a time"
    raise ConfigError(
        f"This GPT ({shape}) wants {state / 1e9:.1f} GB of training state{processes} and {(wanted - state) / 1e9:.1f} "
        f"GB to work on {many}; {usable / 1e9:.1f} of this machine's {available_bytes / 1e9:.1f} GB are usable: {mend}."
    )
