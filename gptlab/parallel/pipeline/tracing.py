"""A model cut at its submodules by torch's tracer: for modules that are not written with stages in mind.

    pipe = trace(module, {"transformer.h.4": "beginning"}, rows=2, length=128, device=device)
    stage = TracedStage(pipe, 0, group=group, device=device, dtype="float32", note=clock.note)

torch.export turns the module's forward pass into a graph, which is split right before and right after the submodules
that are named. It takes some seconds, and what it saw is fixed: the shape of a micro-batch, and on which device. What a
stage makes and a later one reads is sent between the two, over those in between: a causal mask, the places where a
classifier reads. Schedules with several stages a process refuse that, so gpipe and 1f1b are the two that remain.

A parameter that two stages use would be a whole copy on each whose gradients never meet: `untie` parts them beforehand,
and the strategy (`published.py`) adds their gradients. Each process traces the whole module and then keeps its stage.

Left out on purpose: our own GPT, which is cut by hand, at no cost and for every schedule (`cutting.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import Pipe, SplitPoint, pipeline
from torch.distributed.pipelining.stage import _PipelineStage

from gptlab.parallel.pipeline.schedules import Note
from gptlab.precision import precision


def trace(module: nn.Module, points: Mapping[str, str], *, rows: int, length: int, device: torch.device) -> Pipe:
    """The module in stages.

    Args:
        module: called with ids (rows, length), on `device`.
        points: submodules, each with `beginning` or `end`.
    """
    where = {name: SplitPoint.BEGINNING if side == "beginning" else SplitPoint.END for name, side in points.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own making, and nothing that a user could mend
        return pipeline(module, (torch.zeros(rows, length, dtype=torch.int64, device=device),), split_spec=where)


def untie(module: nn.Module, name: str, shared: str) -> None:
    """Gives a submodule weights of its own that equal those that it shares with another."""
    module.get_submodule(name).weight = nn.Parameter(module.get_parameter(shared).detach().clone())


class NamedParameters(nn.Module):
    """A module that has these parameters under these names, as in the whole one, and does nothing.

    Args:
        named: by dotted names.
    """

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        for name, parameter in named.items():
            *path, last = name.split(".")
            at: nn.Module = self
            for step in path:
                if step not in dict(at.named_children()):
                    at.add_module(step, nn.Module())
                at = at.get_submodule(step)
            at.register_parameter(last, parameter)


class TracedStage(_PipelineStage):
    """A traced stage as torch's schedules drive it.

    Args:
        pipe: the traced module.
        number: of the stage.
        group: the pipeline's processes.
        dtype: what it computes in (`precision.py`).
        note: takes down its times.
    """

    def __init__(
        self, pipe: Pipe, number: int, *, group: ProcessGroup, device: torch.device, dtype: str, note: Note
    ) -> None:
        super().__init__(pipe.get_stage_module(number), number, pipe.info(), device, group)
        self.dtype, self.note = dtype, note
        self.dropout_seeds: list[int | None] = []
        """Unused: a traced model draws from nothing."""

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:  # fmt: skip
        """The forward pass of a micro-batch, which knows ids alone."""
        with precision(self.device, self.dtype), self.note("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, args, {}, save_forward_output)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward pass of a micro-batch."""
        with self.note("B", self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
