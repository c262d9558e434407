"""What a config holds in memory: the training state, what autograd keeps, and the most at once, by strategy.

    >>> from gptlab.presets import preset
    >>> from gptlab.footprint import state_bytes
    >>> state_bytes(preset("gpt2")) / 2**30    # GiB
    1.8548355102539062

Left out on purpose: the interpreter and torch themselves, what gloo and NCCL keep for themselves, time (`costs.py`).
"""

from __future__ import annotations

import dataclasses
from math import prod
from typing import NamedTuple

from gptlab.config import GPTConfig, TrainConfig
from gptlab.counts import block_shapes, logit_rows, loss_in_chunks, matmul_parameters, parameters, shapes
from gptlab.cuts import layers_of_stages
from gptlab.spread import PIPELINES, Layout, held, in_flight, layout


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
    L, C, T, V, F = config.n_layer, config.n_embd, config.block_size, config.vocab_size, config.mlp_width
    s = width(dtype)
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

    So it is under ddp, whose replicas sum gradients where they lie. The others: `_sharded_peak`, `_pipelined_peak`.
    """
    if nproc > 1 and isinstance(config, TrainConfig) and config.strategy != "ddp":
        spread = _pipelined_peak if config.strategy in PIPELINES else _sharded_peak
        return spread(config, micro_batch_size, dtype, nproc, attention, device)
    work = _work(config, micro_batch_size, dtype, attention=attention, device=device)
    return state_bytes(config) + work.kept + work.most


class Work(NamedTuple):
    """What a micro-batch takes beside the training state, in bytes."""

    kept: int
    """By autograd, from the forward pass on."""
    most: int
    """On top, at the worst moment of the backward pass."""


def _work(config: GPTConfig, micro_batch_size: int, dtype: str, *, attention: str, device: str) -> Work:
    """A micro-batch's work through the whole model."""
    C, F, V, s = config.n_embd, config.mlp_width, config.padded_vocab_size, width(dtype)
    activation = s * F * (3 if config.mlp == "swiglu" else 2)
    tokens = micro_batch_size * config.block_size
    kept = activation_bytes(config, micro_batch_size, dtype, attention=attention, device=device)
    work, head = tokens * (4 * C + activation), 4 * V * C
    if loss_in_chunks(config, tokens):
        chunk = logit_rows(tokens, V) * V * (8 if s == 4 else 10) + (2 * V * C if s == 2 else 0)
        most = max(kept + head + max(chunk, work), head + head * config.tie_head) - kept
    else:
        most = max(tokens * 8 * config.vocab_size, work)
    return Work(kept, most)


def share_bytes(config: TrainConfig, nproc: int) -> int:
    """Training state of the process that holds most of it, by strategy: `state_bytes` under ddp."""
    if nproc == 1 or config.strategy == "ddp":
        return state_bytes(config)
    if config.strategy == "fsdp":
        return 16 * _rows(config, nproc)
    place = layout(config, nproc)
    return max(_stage_state(config, place, process) for process in range(place.processes))


def _rows(config: GPTConfig, nproc: int) -> int:
    """Numbers that the process with most rows has: of each parameter one part in nproc, rounded up to whole rows."""
    return sum(-(-shape[0] // nproc) * prod(shape[1:]) for shape in shapes(config).values())


def _sharded_peak(
    config: TrainConfig, micro_batch_size: int, dtype: str, nproc: int, attention: str, device: str
) -> int:  # fmt: skip
    """Under fsdp: a process's rows of the state; embeddings, norms and head as a whole with their gradients, which are
    there to the end of the backward pass; of the blocks' matrices those at work and the next, as gathered and as laid
    out, and their gradients. Under autocast these are narrow from the start, so that no casts are kept.
    """
    s = width(dtype)
    block = sum(prod(shape) for name, shape in block_shapes(config).items() if not name.startswith("ln_"))
    rest = parameters(config).allocated - config.n_layer * block
    work = _work(config, micro_batch_size, dtype, attention=attention, device=device)
    casts = 2 * config.n_layer * block if s == 2 and micro_batch_size else 0
    gathered = 4 * rest + 3 * s * block
    begin = work.kept - casts + max(work.most, 4 * rest)
    end = 2 * 4 * rest  # their gradients, once more where they are laid out to be summed
    return 16 * _rows(config, nproc) + gathered + max(begin, end)


def _stage_parameters(config: TrainConfig, place: Layout, process: int) -> int:
    """Numbers in the stages of a process of a pipeline; a tied embedding is on the first and on the last."""
    layers = _layers(config, place)
    mine = held(config.pipeline_schedule, place, process)
    sizes = {name: prod(shape) for name, shape in shapes(config).items()}
    block = sum(prod(shape) for shape in block_shapes(config).values())
    first, last = 0 in mine, place.stages - 1 in mine
    names = [name for name in sizes if not name.startswith("h.")]
    ends = sum(
        sizes[name] for name in names
        if (first and name.startswith(("wte", "wpe"))) or (last and name.startswith(("ln_f", "lm_head")))
        or (last and name.startswith("wte") and config.tie_head)
    )  # fmt: skip
    return ends + block * sum(len(layers[stage]) for stage in mine)


def _layers(config: TrainConfig, place: Layout) -> list[range]:
    return layers_of_stages(config, place.stages, None if config.split is None else str(config.split))


def _stage_state(config: TrainConfig, place: Layout, process: int) -> int:
    """Training state of a process of a pipeline: 16 bytes a number, of which `pp+fsdp` leaves it a part."""
    return 16 * -(-_stage_parameters(config, place, process) // (place.replicas if config.strategy == "pp+fsdp" else 1))


def _pipelined_peak(
    config: TrainConfig, micro_batch_size: int, dtype: str, nproc: int, attention: str, device: str
) -> int:  # fmt: skip
    """In a pipeline: the state of a process's stages; what autograd keeps of as many micro-batches as are under way at
    once; and the work of one. Of the process that has most. With `pp+fsdp` its weights and their gradients are whole
    while it works.
    """
    place = layout(config, nproc)
    layers = _layers(config, place)
    count = -(-config.global_batch_size // (max(1, micro_batch_size) * place.replicas))
    count = min(count, config.pipeline_micro_batches or count)
    one, two = (
        _work(
            dataclasses.replace(config.shape(), n_layer=n), micro_batch_size, dtype, attention=attention, device=device
        )
        for n in (1, 2)
    )  # fmt: skip
    block = two.kept - one.kept
    found = []
    for process in range(place.processes):
        mine = held(config.pipeline_schedule, place, process)
        flying = in_flight(config.pipeline_schedule, place, process, count)  # passes of one micro-batch by one stage
        kept = flying * block * max(len(layers[stage]) for stage in mine)
        most = one.most if place.stages - 1 in mine else 0
        if place.stages - 1 in mine:
            kept += (one.kept - block) * -(-flying // len(mine))
        whole = 8 * _stage_parameters(config, place, process) if config.strategy == "pp+fsdp" else 0
        found.append(_stage_state(config, place, process) + whole + kept + most)
    return max(found)


def width(dtype: str) -> int:
    """Bytes of a number that a product takes."""
    return 2 if dtype in ("bfloat16", "float16") else 4
