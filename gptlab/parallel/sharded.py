"""The strategy `fsdp`: weights, gradients and optimizer state are spread over the processes, row by row.

    strategy = Sharded(model, work)    # a GPT on the meta device: no process ever holds the whole
    strategy.compute(0, 1.0)

torch's fully_shard gathers a block's matrices before it runs, forward and backward, and leaves each process the sum of
its own rows of the gradient. Each process computes its own micro-batches; gradients leave after each of them, so that
the whole gradient never lies anywhere. Embeddings, norms and head are gathered once a micro-batch (a tied head is one
tensor with the embedding, and stays so). In half precision the blocks' matrices travel as what autocast would make of
them, so that the numbers are those of one process.

The optimizer sees this process's rows as plain tensors, which costs nothing and lets it stay the fused one. Every
process has to join every collective, so one whose share is shorter passes a micro-batch without targets: its loss
and gradients are 0. Left out on purpose: offloading to the CPU, and groups of processes with a copy each.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gptlab.heads import tally
from gptlab.loss import IGNORED
from gptlab.making import first_weights
from gptlab.manifest import MODEL, OPTIMIZER
from gptlab.model import Block
from gptlab.optimizer import optimizer_of, squares
from gptlab.parallel.strategy import Files, Work
from gptlab.precision import AUTOCAST, precision


class Shards:
    """The rows that this process holds of each parameter of a module, as plain tensors; what `replicas.Replicas` is to
    whole copies.

    Args:
        module: on the meta device; its blocks and then the rest become fully_shard's groups. Its weights are left
            undefined.
        mesh: the processes that share it, one dimension.
        device: this process's own.
        dtype: precision of the products (`precision.py`).
        regather: whether a block's matrices are let go after its forward pass and gathered again for its backward pass.
    """

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, device: torch.device, dtype: str, *, regather: bool = True
    ) -> None:
        self.mesh, self.shapes = mesh, {name: p.shape for name, p in module.named_parameters()}
        policy = MixedPrecisionPolicy()
        if dtype in AUTOCAST:
            policy = MixedPrecisionPolicy(AUTOCAST[dtype], torch.float32, cast_forward_inputs=False)
        # torch warns at every start that outputs which are views must not be changed in place: blocks don't.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        for block in module.modules():
            if isinstance(block, Block):  # without its norms, whose gains autocast leaves in float32
                fully_shard([block.attn, block.mlp], mesh=mesh, mp_policy=policy, reshard_after_forward=regather)
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
        self._groups = [part for part in module.modules() if isinstance(part, FSDPModule)]
        for part in self._groups:
            part.set_gradient_divide_factor(1.0)  # sums: the loss is divided already
            part.set_force_sum_reduction_for_comms(True)  # gloo knows no other way
        module.to_empty(device=device)
        self._sharded = {name: cast(DTensor, p) for name, p in module.named_parameters()}
        self.parameters = {name: nn.Parameter(p.to_local().detach()) for name, p in self._sharded.items()}
        """This process's rows, in the memory that fully_shard gathers from."""

    @property
    def gradients(self) -> list[Tensor]:
        """Those of this process's rows."""
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        for name, p in self.parameters.items():
            p.grad = self._sharded[name].grad = None

    def collect_gradients(self) -> None:
        """Hands the gradients that the backward passes left to the plain parameters."""
        for name, p in self.parameters.items():
            p.grad = cast(DTensor, self._sharded[name].grad).to_local()

    def take(self, whole: Tensor) -> Tensor:
        """This process's rows of a tensor; a number is everybody's."""
        if whole.dim() == 0:
            return whole
        rows = -(-whole.size(0) // self.mesh.size())
        at = self.mesh.get_local_rank() * rows
        return whole[at : at + rows]

    @torch.no_grad()
    def gather(self, name: str, rows: Tensor) -> Tensor | None:
        """The whole of a parameter, or of something like it, on the CPU of the first process; None on the others.
        Collective."""
        group, first = self.mesh.get_group(), self.mesh.get_local_rank() == 0
        if rows.dim() == 0:
            return rows.cpu() if first else None
        shape, size = self.shapes[name], self.mesh.size()
        padded = rows.new_zeros(-(-shape[0] // size), *shape[1:])
        padded[: len(rows)] = rows
        pieces = [torch.empty_like(padded) for _ in range(size)] if first else None
        dist.gather(padded, pieces, group=group, group_dst=0)
        return torch.cat([piece.cpu() for piece in pieces])[: shape[0]] if pieces else None

    def files(self, optimizer: Optimizer) -> Files | None:
        """The whole state of the module and its optimizer, on the CPU of the first process; None on the others.
        Collective."""
        files: dict[str, dict[str, Tensor]] = {MODEL: {}, OPTIMIZER: {}}
        for name, p in self.parameters.items():
            for key, rows in {"": p.data, **optimizer.state.get(p, {})}.items():
                whole = self.gather(name, rows)
                if whole is not None:
                    files[OPTIMIZER if key else MODEL][f"{name}.{key}" if key else name] = whole
        return files if self.mesh.get_local_rank() == 0 else None

    @torch.no_grad()
    def set(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes this process's rows of weights by name, and leaves out those of other modules."""
        for part in self._groups:
            part.reshard()
        for name, value in weights:
            if name in self.parameters:
                self.parameters[name].copy_(self.take(value))

    def load(self, files: Files, optimizer: Optimizer) -> None:
        """Takes this process's rows of a whole training state, or of weights alone."""
        self.set(files[MODEL].items())
        for name, value in files.get(OPTIMIZER, {}).items():
            owner, _, key = name.rpartition(".")
            if owner in self.parameters:
                p = self.parameters[owner]
                optimizer.state[p][key] = self.take(value).to(p.device, copy=True)


class Sharded:
    """A `Strategy` over rows.

    Args:
        model: a GPT or a classifier of ours, on the meta device.
    """

    collective_score = True

    def __init__(self, model: nn.Module, work: Work) -> None:
        assert work.world.mesh is not None, "a world without groups cannot share weights"
        self.part, self.work = model, work
        self.shards = Shards(model, work.world.mesh["replica"], work.world.device, work.dtype)
        self.optimizer = optimizer_of(self.shards.parameters, work.config)
        self.score_rows = work.micro_batch_size
        self.shards.set(first_weights(work.config, work.labels))

    @property
    def gradients(self) -> list[Tensor]:
        """Those of this process's rows."""
        return self.shards.gradients

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the whole parameters, by name."""
        return self.shards.shapes

    def compute(self, step: int, scale: float) -> float:
        """Forward and backward over this process's micro-batches; gradients are summed after each. Collective."""
        work, device = self.work, self.work.world.device
        self.shards.zero_grad()
        total = torch.zeros((), device=device)
        most = -(-work.count // work.world.replicas)
        for turn in range(most):
            if turn < len(work.share):
                index = work.share[turn]
                ids, targets = work.micro_batch(step, index)  # each (b, T)
                seed = work.dropout_seed(step, index)
            else:  # the others have one more
                ids = torch.zeros(1, work.config.block_size, dtype=torch.int64, device=device)
                targets, seed = torch.full_like(ids if work.labels is None else ids[:, 0], IGNORED), None
            with precision(device, work.dtype):
                loss = self.part(ids, targets, reduction="sum", dropout_seed=seed)
            work.world.pace.enter("backward")
            (loss / (work.targets / scale)).backward()
            total += loss.detach()
        work.world.pace.enter("other")
        self.shards.collect_gradients()
        return float(total.item())

    def norm(self) -> float:
        """Norm of the whole gradient. Collective."""
        return math.sqrt(self.work.world.sum([squares(self.gradients)])[0])

    def score(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The summed loss of sequences, and how many are classed rightly, without gradients. Collective."""
        with torch.no_grad(), precision(self.work.world.device, self.work.dtype):
            return tally(self.part, ids, targets)

    def observe(self) -> None:
        """Nothing that the metrics do not say."""

    def gather(self) -> Files | None:
        """The whole training state on the CPU of the main process. Collective."""
        return self.shards.files(self.optimizer)

    def load(self, files: Files) -> None:
        """Takes this process's rows of a whole training state, or of weights alone."""
        self.shards.load(files, self.optimizer)
