"""An embedding that is the head as well, in a pipeline: one copy on the first process and one on the last.

Each copy gets a part of the gradient, and both must become the whole one. They send theirs to each other and add: a sum
of two numbers is the same in either order, so the gradients are equal bit for bit, and with the same optimizer so are
the weights, for good.

Left out on purpose: a process that holds both ends (V-shaped schedules), where the embedding is one module, or two in
`holding.Rows`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class TiedGradient:
    """The gradient of an embedding that another process holds too.

    Args:
        peer: the other process, in the pipeline's group.
    """

    def __init__(self, group: ProcessGroup, peer: int) -> None:
        self.group, self.peer = group, peer
        self._theirs: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        """Adds the other's part to this one's, in place. Collective between the two."""
        if self._theirs is None:
            self._theirs = torch.empty_like(gradient)
        mine = gradient.contiguous()
        work = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, mine, group=self.group, group_peer=self.peer),
            dist.P2POp(dist.irecv, self._theirs, group=self.group, group_peer=self.peer),
        ])  # fmt: skip
        for each in work:
            each.wait()
        gradient.add_(self._theirs)
