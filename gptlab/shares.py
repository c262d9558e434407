"""What one process holds of a training, where the strategy leaves it a part: in numbers, and in bytes at the most.

    >>> from gptlab.presets import preset
    >>> from gptlab.shares import held_parameters
    >>> held_parameters(preset("gpt2", strategy="fsdp", nproc=4, global_batch_size=32)) / 124475904
    0.25

Always of the process that holds most, in bytes that are in use. Left out on purpose: what a whole model takes
(`footprint.py`), the gaps of the C library's heap (up to a third more, seen with blocks of some MB), and what gloo and
NCCL keep for themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

from gptlab.config import GPTConfig, TrainConfig
from gptlab.counts import block_shapes, parameters, shapes
from gptlab.cuts import layers_of_stages
from gptlab.spread import PIPELINES, Layout, held, in_flight, layout


class Work(NamedTuple):
    """What a micro-batch takes beside the training state, in bytes."""

    kept: int
    """By autograd, from the forward pass on."""
    most: int
    """On top, at the worst moment of the backward pass."""


def parted(config: TrainConfig) -> bool:
    """Whether a process holds a part alone."""
    return config.nproc > 1 and config.strategy != "ddp"


def held_parameters(config: TrainConfig) -> int:
    """Parameters whose gradient and moments a process holds: of each some rows, or those of its stages."""
    if not parted(config):
        return parameters(config).allocated
    if config.strategy not in PIPELINES:
        return _rows(config, config.nproc)
    place = layout(config, config.nproc)
    over = place.replicas if config.strategy == "pp+fsdp" else 1
    return max(-(-_stage_parameters(config, place, process) // over) for process in range(place.processes))


def peak_bytes(config: TrainConfig, size: int, work: Callable[[int], Work], number: int) -> int:
    """Most bytes that a process holds at once, beside the interpreter.

    Args:
        size: sequences of a micro-batch.
        work: of such a one through a whole model of so many layers.
        number: bytes of a number that a product takes.
    """
    return _pipelined(config, size, work) if config.strategy in PIPELINES else _sharded(config, size, work, number)


def _rows(config: GPTConfig, nproc: int) -> int:
    """Numbers that the process with most rows has: of each parameter one part in nproc, rounded up to whole rows."""
    return sum(-(-shape[0] // nproc) * prod(shape[1:]) for shape in shapes(config).values())


def _sharded(config: TrainConfig, size: int, work: Callable[[int], Work], number: int) -> int:
    """Under fsdp: a process's rows of the state; embeddings, norms and head as a whole with their gradients, which are
    there to the end of the backward pass; of the blocks' matrices those at work and the next, as gathered and as laid
    out, and their gradients. Under autocast these are narrow from the start, so that no casts are kept. Gradients of
    its rows are there from the end of the first micro-batch on.
    """
    block = sum(prod(shape) for name, shape in block_shapes(config).items() if not name.startswith("ln_"))
    rest = parameters(config).allocated - config.n_layer * block
    whole = work(config.n_layer)
    casts = 2 * config.n_layer * block if number == 2 and whole.kept else 0
    begin = whole.kept - casts + max(whole.most, 4 * rest)
    end = 2 * 4 * rest  # their gradients, once more where they are laid out to be summed
    own = held_parameters(config)
    before = 4 * own if config.global_batch_size > max(1, size) * config.nproc else 0
    return 12 * own + 4 * rest + 3 * number * block + max(begin + before, end + 4 * own)


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


def _pipelined(config: TrainConfig, size: int, work: Callable[[int], Work]) -> int:
    """In a pipeline: the state of a process's stages; what autograd keeps of as many micro-batches as are under way at
    once; and the work of one. With `pp+fsdp` its weights and their gradients are whole while it works.
    """
    place = layout(config, config.nproc)
    layers = _layers(config, place)
    count = -(-config.global_batch_size // (max(1, size) * place.replicas))
    count = min(count, config.pipeline_micro_batches or count)
    one, block = work(1), work(2).kept - work(1).kept
    sharded = config.strategy == "pp+fsdp"
    found = []
    for process in range(place.processes):
        mine = held(config.pipeline_schedule, place, process)
        flying = in_flight(config.pipeline_schedule, place, process, count)  # passes of a micro-batch through a stage
        bytes_held = flying * block * max(len(layers[stage]) for stage in mine)
        if place.stages - 1 in mine:
            bytes_held += (one.kept - block) * -(-flying // len(mine)) + one.most
        own = _stage_parameters(config, place, process)
        bytes_held += 16 * -(-own // place.replicas) + 8 * own if sharded else 16 * own
        if sharded and config.tie_head and {0, place.stages - 1} <= set(mine):  # both ends of a V: a twin
            embedding = prod(shapes(config)["wte.weight"])
            bytes_held += 8 * -(-embedding // place.replicas) + 8 * embedding
        found.append(bytes_held)
    return max(found)
