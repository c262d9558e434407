"""The processes that train together, and the few sums they exchange.

    >>> import torch
    >>> from gptlab.parallel.world import World
    >>> World(rank=0, size=1, device=torch.device("cpu")).sum([1.0, 2.0])
    [1.0, 2.0]

A world of one has no process group and sends nothing. The processes form a grid, `rank = replica * stages + stage`:
each replica computes its share of the micro-batches, and its stages hold the parts of a pipeline, one alone without.
`connect` is the one place where a process group is made, however the processes were started.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gptlab.pace import COMMUNICATION, Pace


@dataclass(frozen=True)
class World:
    """This process among those that train together."""

    rank: int
    size: int
    device: torch.device
    stages: int = 1
    """Processes of a replica; divides the size."""
    mesh: DeviceMesh | None = None
    """Groups of the grid's columns (dimension `replica`) and rows (`stage`, in a pipeline); None where nothing needs
    them."""
    pace: Pace = field(default=None, compare=False, repr=False)  # type: ignore[assignment]
    """Is told what this process does; None makes one that nobody asks."""

    def __post_init__(self) -> None:
        if self.pace is None:
            object.__setattr__(self, "pace", Pace(self.rank, self.size))

    @property
    def stage(self) -> int:
        """This process's place in its replica."""
        return self.rank % self.stages

    @property
    def replica(self) -> int:
        """The number of this process's replica."""
        return self.rank // self.stages

    @property
    def replicas(self) -> int:
        """How many replicas share the global batch."""
        return self.size // self.stages

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums of each value over all processes, in float64. Collective: every process calls it alike."""
        if self.size == 1:
            return list(values)
        with self.pace.within(COMMUNICATION):
            tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
            dist.all_reduce(tensor)
            return [float(value) for value in tensor.tolist()]

    def of_main(self, text: str) -> str:
        """The main process's text, on every process. Collective."""
        if self.size == 1:
            return text
        with self.pace.within(COMMUNICATION):
            box = [text]
            dist.broadcast_object_list(box, src=0)
            return box[0]

    def close(self) -> None:
        """Ends the process group."""
        if self.size > 1:
            dist.destroy_process_group()


def connect(
    rank: int, size: int, device: torch.device, store: Store | None, *, shared_gpu: bool = False,
    stages: int = 1, groups: bool = False, pace: Pace | None = None,
) -> World:  # fmt: skip
    """Joins the world: NCCL where each process has a GPU of its own, gloo elsewhere.

    Args:
        store: where the processes of this attempt meet, fresh for each attempt; None in a world of one.
        stages: of a pipeline; divides the size.
        groups: whether to make the grid's groups too.
        pace: is told what this process does; None makes one that nobody asks.
    """
    assert size % stages == 0, f"{size} processes are no whole number of replicas of {stages} stages"
    mesh = None
    if size > 1:
        assert store is not None, "a world of several needs a store to meet at"
        backend = "nccl" if device.type == "cuda" and not shared_gpu else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=datetime.timedelta(minutes=10)
        )
        if groups:
            shape, names = ((size,), ("replica",)) if stages == 1 else ((size // stages, stages), ("replica", "stage"))
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    return World(rank, size, device, stages, mesh, pace)  # type: ignore[arg-type]
