"""In which order a pipeline's processes pass forward and backward: torch's schedules, as plain data and as what runs.

    >>> from gptlab.spread import Layout
    >>> from gptlab.parallel.pipeline.schedules import order
    >>> [str(action) for action in order("1f1b", Layout(2, 1, 2, 1), 2)[0]]
    ['F0.0', 'F0.1', 'B0.0', 'B0.1']

Left out on purpose: which numbers of stages and micro-batches a schedule takes (`spread.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, schedules

from gptlab.parallel.pipeline.cutting import ScoredStage, Stage
from gptlab.spread import SCHEDULES, Layout, held

Note = Callable[[str, int, int], AbstractContextManager[None]]
"""Takes down when a pass began and ended: of a kind, a stage and a micro-batch."""


class Action(NamedTuple):
    """A pass of one micro-batch through one stage."""

    kind: str
    """F forward, B backward, or its halves I (of inputs) and W (of weights)."""
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"


class _Sketch:
    """As much of a stage as torch's schedules ask for before they run."""

    def __init__(self, place: Layout, stage: int, process: int) -> None:
        self.stage_index, self.num_stages = stage, place.stages
        self.group_size, self.group_rank = place.processes, process
        self.submod = nn.Module()
        self.stage_index_to_group_rank: dict[int, int] = {}


def order(name: str, place: Layout, micro_batches: int) -> list[list[Action]]:
    """What each process of a pipeline does, in its order."""
    if name in ("gpipe", "1f1b"):
        return [_single(name, place.stages, stage, micro_batches) for stage in range(place.stages)]
    stages = [_Sketch(place, stage, 0) for stage in held(name, place, 0)]
    made = getattr(schedules, SCHEDULES[name].torch_name)(stages, micro_batches)
    return [list(_leaves(made.pipeline_order[process])) for process in range(place.processes)]


def _single(name: str, stages: int, stage: int, count: int) -> list[Action]:
    """The order of the two schedules whose class keeps none: all forward, then all backward; or in turn, once the
    first micro-batch has been through the stages behind."""
    ahead = count if name == "gpipe" else min(count, stages - stage)
    forward = [Action("F", stage, index) for index in range(count)]
    backward = [Action("B", stage, index) for index in range(count)]
    turns = [action for pair in zip(backward, forward[ahead:], strict=False) for action in pair]
    return forward[:ahead] + turns + backward[count - ahead :]


def _leaves(actions: list[Any]) -> Iterator[Action]:
    """Passes alone: gaps are left out, and what is meant to overlap comes in torch's order, one after the other."""
    for action in actions:
        if action is None:
            continue
        for leaf in action.sub_actions or (action,):
            yield Action(leaf.computation_type.value, leaf.stage_index, leaf.microbatch_index)


class TorchStage(PipelineStage):
    """A stage as torch's schedules drive it, which gives each micro-batch its dropout and takes down its times.

    Args:
        number: of the stage, in a pipeline of `count`.
        group: the pipeline's processes.
        rows: sequences of a micro-batch.
    """

    def __init__(
        self, stage: Stage | ScoredStage, number: int, count: int, *, group: ProcessGroup, device: torch.device,
        rows: int, note: Note,
    ) -> None:  # fmt: skip
        T, C = stage.config.block_size, stage.config.n_embd
        between = torch.empty(rows, T, C, device="meta", requires_grad=True)
        ids = torch.empty(rows, T, dtype=torch.int64, device="meta")
        loss = torch.empty(1, device="meta", requires_grad=True)
        super().__init__(
            stage, number, count, device, group=group, input_args=ids if stage.first else between,
            output_args=loss if stage.last else between,
        )  # fmt: skip
        self.config, self.note = stage.config, note
        self.dropout_seeds: list[int | None] = []
        """Of the micro-batches of a pass."""

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:  # fmt: skip
        """The forward pass of a micro-batch."""
        kwargs = (kwargs or {}) | {"dropout_seed": self.dropout_seeds[fwd_chunk_id]}
        with self.note("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward pass of a micro-batch, or its first half."""
        with self.note("B" if full_backward else "I", self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Its second half."""
        with self.note("W", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


def make_schedule(
    name: str, stages: Sequence[Any], micro_batches: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> Any:
    """Torch's runtime of a schedule, for this process's stages as torch drives them.

    Gradients are added up as they are: torch would divide them by the number of micro-batches at every call, which is
    wrong for a sum, and for several calls a step.
    """
    kind = getattr(schedules, SCHEDULES[name].torch_name)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    return kind(stages[0] if single else list(stages), micro_batches, loss_fn=loss, scale_grads=False)
