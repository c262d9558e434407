"""Data parallelism: each process holds the whole model, and their gradients are summed.

    replicas = Replicas(model, world)
    replicas.zero_grad()
    for last, batch in ...:
        replicas.reduce_next(last)    # on the last backward, buckets leave while the rest is still computed
        loss.backward()
    replicas.finish()                 # each p.grad is now the sum over the world

As torch's DistributedDataParallel (Li et al. 2020) it sums flat buckets, in the order in which backward fills them,
while backward runs. It is our own for two reasons. DDP regroups its buckets after the first step, so a run that resumes
sums in another order for one step, and from three processes on that changes bits: a killed run would not equal an
unbroken one. And its ranks must all run backward, while here a process whose share is empty just joins the sums.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptlab.pace import COMMUNICATION
from gptlab.parallel.world import World

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradient in a bucket: torch's own default, large enough for bandwidth and small enough to overlap."""


class Replicas:
    """Sums gradients over the replicas of a model or of a stage. Where there is one alone it does nothing.

    Args:
        keep: gradients stay where they are from step to step, also where there is one replica.
    """

    def __init__(self, model: nn.Module, world: World, bucket_bytes: int = BUCKET_BYTES, *, keep: bool = False) -> None:
        self.world = world
        self.group = world.mesh.get_group("replica") if world.mesh is not None else None  # None is all processes
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._reducing = False
        self._work: dict[int, dist.Work | None] = {}
        self._flat: list[Tensor] = []
        self._waiting: list[int] = []
        self._sizes: list[int] = []
        if world.replicas > 1 or keep:
            for bucket in _buckets(list(reversed(self.parameters)), bucket_bytes):
                self._add(bucket)

    def _add(self, bucket: list[nn.Parameter]) -> None:
        """Makes the gradients of a bucket views of one flat tensor."""
        index = len(self._flat)
        flat = torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype, device=bucket[0].device)
        at = 0
        for p in bucket:
            p.grad = flat[at : at + p.numel()].view_as(p)
            at += p.numel()
            p.register_post_accumulate_grad_hook(lambda _, index=index: self._arrived(index))
        self._flat.append(flat)
        self._sizes.append(len(bucket))
        self._waiting.append(len(bucket))

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        if not self._flat:
            for p in self.parameters:
                p.grad = None
        for flat in self._flat:
            flat.zero_()
        self._work, self._waiting, self._reducing = {}, list(self._sizes), False

    @property
    def gradients(self) -> list[Tensor]:
        """All gradients, in as few tensors as there are."""
        return self._flat or [p.grad for p in self.parameters if p.grad is not None]

    def reduce_next(self, reduce: bool) -> None:
        """Says whether the next backward is this step's last, so that its gradients are complete and may leave."""
        self._reducing = reduce and self.world.replicas > 1

    def _arrived(self, index: int) -> None:
        if self._reducing:
            self._waiting[index] -= 1
            if self._waiting[index] == 0:
                self._send_in_order()

    def _send_in_order(self) -> None:
        """Sends the full buckets in their order: every process must enqueue the same sums in the same order."""
        while len(self._work) < len(self._flat) and self._waiting[len(self._work)] == 0:
            index = len(self._work)
            self._work[index] = dist.all_reduce(self._flat[index], group=self.group, async_op=True)

    def finish(self) -> None:
        """Sends what has not left (all of it, where this process had no share) and waits for the sums."""
        if self.world.replicas > 1:
            self._waiting = [0] * len(self._flat)
            self._send_in_order()
            with self.world.pace.within(COMMUNICATION):
                for work in self._work.values():
                    if work is not None:
                        work.wait()


def _buckets(parameters: list[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Parameters in order, in groups of one type and about `limit` bytes."""
    groups: list[list[nn.Parameter]] = []
    filled = 0
    for p in parameters:
        size = p.numel() * p.element_size()
        if not groups or filled + size > limit or groups[-1][0].dtype != p.dtype:
            groups.append([])
            filled = 0
        groups[-1].append(p)
        filled += size
    return groups
