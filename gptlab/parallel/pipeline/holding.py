"""How a process holds its stages: whole, as its replicas do too, or some rows of each, the rest being the replicas'.

    weights = Copies(part, world)    # or Rows(part, work), for `pp+fsdp`
    weights.load(initial_weights(config, seed))
    weights.zero_grad()
    ...                              # all passes of a step, forward and backward
    weights.finish()                 # gradients are now those of all replicas

Both are told of the whole model's tensors by name and take what is theirs. Left out on purpose: an embedding on two
processes (`ties.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from gptlab.parallel.pipeline.cutting import Part, Stage
from gptlab.parallel.replicas import Replicas
from gptlab.parallel.sharded import Shards, squares
from gptlab.parallel.strategy import Work
from gptlab.parallel.world import World


class Holding(Protocol):
    """A process's weights. What is marked collective is called by all replicas alike."""

    parameters: dict[str, nn.Parameter]
    """What the optimizer moves, by the whole model's names."""

    def zero_grad(self) -> None:
        """Forgets the gradients."""

    def refresh(self) -> None:
        """Before a forward pass: what follows other weights catches up."""

    def finish(self) -> None:
        """Sums the gradients over the replicas. Collective."""

    def squares(self, without: str | None) -> float:
        """Sum of the squares of the model's gradients but for one, over all stages and rows. Collective."""

    def take(self, whole: Tensor) -> Tensor:
        """What is this process's of a tensor of its stages."""

    def gather(self, name: str, mine: Tensor) -> Tensor | None:
        """The whole of a tensor on the first replica, None on the others. Collective."""


class Copies:
    """A `Holding` of whole stages: `pp` and `pp+ddp`.

    Args:
        part: its weights are yet to come; perhaps on the meta device.
    """

    def __init__(self, part: nn.Module, world: World) -> None:
        part.to_empty(device=world.device)
        self.world = world
        self.parameters = dict(part.named_parameters())
        self.replicas = Replicas(part, world)
        self._group = world.mesh.get_group("stage") if world.mesh is not None else None

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        self.replicas.zero_grad()

    def refresh(self) -> None:
        """Nothing follows other weights: an embedding that is the head too is one module."""

    def finish(self) -> None:
        """Sums the gradients over the replicas, after all passes: zero bubble has no backward pass to hook into."""
        self.replicas.finish()

    def squares(self, without: str | None) -> float:
        """Sum of squares over the stages; replicas have the same."""
        own = [p.grad for name, p in self.parameters.items() if p.grad is not None and name != without]
        total = torch.tensor(squares(own), dtype=torch.float64, device=self.world.device)
        dist.all_reduce(total, group=self._group)
        return float(total.item())

    def take(self, whole: Tensor) -> Tensor:
        """All of it."""
        return whole

    def gather(self, name: str, mine: Tensor) -> Tensor | None:
        """The first replica has it already."""
        return mine if self.world.replica == 0 else None


class Rows:
    """A `Holding` of some rows of each matrix: `pp+fsdp`.

    torch's schedules gather a stage's rows before they use it, and add up gradients of micro-batches before they leave.

    Args:
        part: on the meta device.
    """

    def __init__(self, part: Part, work: Work) -> None:
        assert work.world.mesh is not None, "a world without groups cannot share weights"
        ends = [stage for stage in part.stages.values() if stage.first or stage.last]
        double = len(ends) == 2 and ends[1].tied
        if double:  # fully_shard takes a module once
            assert isinstance(ends[0], Stage) and isinstance(ends[1], Stage), "a classifier ties nothing"
            with torch.device("meta"):
                ends[1].wte = nn.Embedding(*ends[0].wte.weight.shape)
        self.work = work
        mesh = work.world.mesh["replica"]
        self.shards = [Shards(stage, mesh, work.world.device, work.dtype) for stage in part.stages.values()]
        for stage in part.stages.values():  # the rows of a pass are gathered once, by its schedule
            cast(FSDPModule, stage).set_reshard_after_forward(False)
        self._of = {name: shards for shards in reversed(self.shards) for name in shards.parameters}
        self.parameters = {name: shards.parameters[name] for name, shards in self._of.items()}
        self._twin = self.shards[-1].parameters["wte.weight"] if double else None
        """The rows of the head, where the embedding is on this process as well."""

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        for shards in self.shards:
            shards.zero_grad()

    @torch.no_grad()
    def refresh(self) -> None:
        """A head follows its embedding on the same process."""
        if self._twin is not None:
            self._twin.copy_(self.parameters["wte.weight"])

    def finish(self) -> None:
        """Takes over the gradients, which the schedule's last action has summed over the replicas."""
        for shards in self.shards:
            shards.collect_gradients()
        if self._twin is not None:
            embedding = self.parameters["wte.weight"].grad
            assert embedding is not None and self._twin.grad is not None
            embedding.add_(self._twin.grad)

    def squares(self, without: str | None) -> float:
        """Sum of squares over all processes, which have different rows."""
        own = [p.grad for name, p in self.parameters.items() if p.grad is not None and name != without]
        return self.work.world.sum([squares(own)])[0]

    def take(self, whole: Tensor) -> Tensor:
        """This process's rows."""
        return self.shards[0].take(whole)

    def gather(self, name: str, mine: Tensor) -> Tensor | None:
        """The rows of all replicas."""
        return self._of[name].gather(name, mine)


@torch.no_grad()
def load(held: Holding, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Takes what is this process's of a whole model's weights by name."""
    for name, value in weights:
        if name in held.parameters:
            held.parameters[name].copy_(held.take(value))
