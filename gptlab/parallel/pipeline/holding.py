"""How a process holds its stages: whole, as its replicas do too, or some rows of each, the rest being the replicas'.

    weights = Copies(part, world)    # or Rows(part, work), for `pp+fsdp`
    weights.set(initial_weights(config, seed))
    weights.zero_grad()
    ...                              # all passes of a step, forward and backward
    weights.finish()                 # gradients are now those of all replicas

Both are told of the whole model's tensors by name and take what is theirs. Left out on purpose: an embedding on two
processes (`ties.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptlab.optimizer import squares
from gptlab.parallel.pipeline.cutting import Part
from gptlab.parallel.replicas import Replicas
from gptlab.parallel.sharded import Shards
from gptlab.parallel.strategy import Work
from gptlab.parallel.world import World


class Holding(Protocol):
    """A process's weights. What is marked collective is called by all replicas alike."""

    parameters: dict[str, nn.Parameter]
    """What the optimizer moves, by the whole model's names."""

    def zero_grad(self) -> None:
        """Forgets the gradients."""

    def finish(self) -> None:
        """Sums the gradients over the replicas. Collective."""

    def squares(self, without: str | None) -> float:
        """Sum of the squares of the model's gradients but for one, over all stages and rows. Collective."""

    def set(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes what is this process's of a whole model's weights by name."""

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

    def finish(self) -> None:
        """Sums the gradients over the replicas, after all passes: zero bubble has no backward pass to hook into."""
        self.replicas.finish()

    def squares(self, without: str | None) -> float:
        """Sum of squares over the stages; replicas have the same."""
        own = [p.grad for name, p in self.parameters.items() if p.grad is not None and name != without]
        total = torch.tensor(squares(own), dtype=torch.float64, device=self.world.device)
        dist.all_reduce(total, group=self._group)
        return float(total.item())

    @torch.no_grad()
    def set(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes the weights of its stages."""
        for name, value in weights:
            if name in self.parameters:
                self.parameters[name].copy_(value)

    def take(self, whole: Tensor) -> Tensor:
        """All of it."""
        return whole

    def gather(self, name: str, mine: Tensor) -> Tensor | None:
        """The first replica has it already."""
        return mine if self.world.replica == 0 else None


class Rows:
    """A `Holding` of some rows of each matrix: `pp+fsdp`.

    torch's schedules gather a stage's rows before they use it, and add up gradients of micro-batches before they leave.
    Each stage is gathered for itself, so an embedding at both ends of a V is there twice: the twins' gradients are
    summed, one of them is the optimizer's, and the other is a copy of it.

    Args:
        part: on the meta device.
    """

    def __init__(self, part: Part, work: Work) -> None:
        assert work.world.mesh is not None, "a world without groups cannot share weights"
        self.work = work
        mesh = work.world.mesh["replica"]
        self.shards = [
            Shards(stage, mesh, work.world.device, work.dtype, regather=False)  # once a pass, by its schedule
            for stage in part.stages.values()
        ]
        self._of: dict[str, Shards] = {}
        self._twins: list[tuple[nn.Parameter, nn.Parameter]] = []
        for shards in self.shards:
            for name, p in shards.parameters.items():
                if self._of.setdefault(name, shards) is not shards:
                    self._twins.append((self._of[name].parameters[name], p))
        self.parameters = {name: shards.parameters[name] for name, shards in self._of.items()}

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        for shards in self.shards:
            shards.zero_grad()

    def finish(self) -> None:
        """Takes over the gradients, which the schedule's last action has summed over the replicas."""
        for shards in self.shards:
            shards.collect_gradients()
        for first, last in self._twins:
            assert first.grad is not None and last.grad is not None
            first.grad += last.grad

    def squares(self, without: str | None) -> float:
        """Sum of squares over all processes, which have different rows."""
        own = [p.grad for name, p in self.parameters.items() if p.grad is not None and name != without]
        return self.work.world.sum([squares(own)])[0]

    @torch.no_grad()
    def set(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes this process's rows of the weights of its stages."""
        for shards in self.shards:
            shards.set(())  # what was gathered for an evaluation is let go
        for name, value in weights:
            if name in self.parameters:
                self.parameters[name].copy_(self.take(value))
        self.moved()

    @torch.no_grad()
    def moved(self) -> None:
        """The optimizer, which knows the first of two twins, has made a step: the other follows."""
        for first, last in self._twins:
            last.copy_(first)

    def take(self, whole: Tensor) -> Tensor:
        """This process's rows."""
        return self.shards[0].take(whole)

    def gather(self, name: str, mine: Tensor) -> Tensor | None:
        """The rows of all replicas."""
        return self._of[name].gather(name, mine)
