"""The strategies `pp` and `pp+ddp`: a replica of the model is a pipeline of processes, each with some of its stages.

    strategy = Pipelined(work, attention="sdpa")
    strategy.compute(0, 1.0)

A step's micro-batches go through the pipeline in one pass of its schedule, or in several (accumulation). Gradients of
replicas are summed by ourselves once all backward passes are over, whatever the schedule: DistributedDataParallel
around a stage dies at the second step under gpipe, and under zero bubble never sums at all, without a word.

Every process draws its batches itself, from the step's number: only what lies between two stages is sent. Evaluation
has a forward pass of its own, from stage to stage, which serves every schedule; torch's fails where stages lie in a V.

Left out on purpose: cutting, schedules, ties and times, one a file beside this one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptlab import checkpoint, counts
from gptlab.attention import Attention
from gptlab.optimizer import make_optimizer
from gptlab.parallel.pipeline.cutting import Part, layers_of_stages, make_part
from gptlab.parallel.pipeline.schedules import TorchStage, make_schedule
from gptlab.parallel.pipeline.ties import TiedGradient
from gptlab.parallel.pipeline.timeline import Clock
from gptlab.parallel.replicas import Replicas
from gptlab.parallel.strategy import Files, Work
from gptlab.spread import SCHEDULES, held, layout, owners, passes


class Pipelined:
    """A `Strategy` over a pipeline of stages, and over replicas of it.

    Args:
        attention: kernel of attention.
    """

    collective_score = False

    def __init__(self, work: Work, *, attention: Attention) -> None:
        config, world = work.config, work.world
        assert world.mesh is not None, "a pipeline needs several processes"
        self.work = work
        self.name = config.pipeline_schedule
        self.place = layout(config, world.size)
        self.passes = passes(config, work.micro_batch_size, self.place)
        self.count = work.count // (self.place.replicas * self.passes)  # micro-batches of a pass
        self.group = world.mesh.get_group("stage")
        self.owners = owners(self.name, self.place)
        self.layers = layers_of_stages(config, self.place.stages, None if config.split is None else str(config.split))
        mine = held(self.name, self.place, world.stage)
        self.part: Part = make_part(
            config, {stage: self.layers[stage] for stage in mine}, self.place.stages, attention=attention,
            seed=config.seed, dtype=work.dtype, in_chunks=not SCHEDULES[self.name].splits, device=world.device,
        )  # fmt: skip
        self.optimizer = make_optimizer(self.part, config)
        self.replicas = Replicas(self.part, world)
        self.tie = self._tie()
        self.clock = Clock(world.device)
        self.stages = [
            TorchStage(
                stage, number, self.place.stages, group=self.group, device=world.device, rows=work.micro_batch_size,
                note=self.clock.note,
            )
            for number, stage in self.part.stages.items()
        ]  # fmt: skip
        self.schedule = make_schedule(self.name, self.stages, self.count, self._loss)
        self.score_rows = work.micro_batch_size
        self._factor = 0.0
        self._total = torch.zeros((), device=world.device)
        self._sent: list[tuple[Any, Tensor]] = []
        self._gathered: dict[str, dict[str, Tensor]] = {}

    def _tie(self) -> TiedGradient | None:
        """The other holder of this process's embedding, where there is one."""
        first, last = self.owners[0], self.owners[-1]
        here = self.work.world.stage
        if not self.work.config.tie_head or first == last or here not in (first, last):
            return None
        return TiedGradient(self.group, last if here == first else first)

    @property
    def gradients(self) -> list[Tensor]:
        """Of this process's stages, in as few tensors as there are."""
        return self.replicas.gradients

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the whole model's parameters, by name."""
        return {name: torch.Size(shape) for name, shape in counts.shapes(self.work.config).items()}

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        """What the last stage goes back from: its sum of losses over the targets of the global batch."""
        self._total += output.detach().squeeze(0)
        return output.squeeze(0) * self._factor

    def compute(self, step: int, scale: float) -> float:
        """Forward and backward over the replica's micro-batches, and the sums. Collective."""
        work, each = self.work, self.count * self.work.micro_batch_size
        self.replicas.zero_grad()
        self._factor = scale / work.targets
        self._total.zero_()
        for turn in range(self.passes):
            at = work.world.replica * self.passes + turn
            ids, targets = (part.to(work.world.device) for part in work.batches.micro_batch(step, at, each))
            self._run(ids, targets, [work.dropout_seed(step, at * self.count + index) for index in range(self.count)])
        self.replicas.finish()
        if self.tie is not None:
            gradient = self.part.get_parameter("wte.weight").grad
            assert gradient is not None
            self.tie.add(gradient)
        return float(self._total.item())

    def _run(self, ids: Tensor, targets: Tensor, seeds: list[int | None]) -> None:
        """One pass of the schedule, which cuts ids and targets, (count * b, T), into its micro-batches."""
        for stage in self.stages:
            stage.dropout_seeds = seeds
        first = (ids,) if 0 in self.part.stages else ()
        self.schedule.step(*first, target=targets, ids=ids, targets=targets, return_outputs=False)

    def norm(self) -> float:
        """Norm of the whole gradient: the squares of all stages, an embedding that two hold counted on the first."""
        twice = self.tie is not None and self.work.world.stage == self.owners[-1]
        own = [
            p.grad
            for name, p in self.part.named_parameters()
            if p.grad is not None and not (twice and name == "wte.weight")
        ]
        squares = nn.utils.get_total_norm(own).double() ** 2
        dist.all_reduce(squares, group=self.group)
        return float(squares.sqrt().item())

    @torch.no_grad()
    def score(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The summed loss of sequences, on the process with the last stage, and 0 on the others. All processes of a
        pipeline call it alike."""
        config, here = self.work.config, self.work.world.stage
        self._let_go()
        x = ids
        for number, owner in enumerate(self.owners):
            if owner != here:
                continue
            before = self.owners[number - 1] if number else here
            if before != here:
                x = torch.empty(*ids.shape, config.n_embd, device=ids.device)  # (B, T, C)
                dist.recv(x, group=self.group, group_src=before)
            x = self.part.stages[number](x, ids=ids, targets=targets)
            if number + 1 < self.place.stages and self.owners[number + 1] != here:
                self._sent.append((dist.isend(x, group=self.group, group_dst=self.owners[number + 1]), x))
        return x.squeeze(0) if here == self.owners[-1] else torch.zeros((), device=ids.device)

    def _let_go(self) -> None:
        """Waits for what evaluation sent last: so one stage can be a call ahead of the next."""
        while self._sent:
            self._sent.pop()[0].wait()

    def gather(self) -> Files | None:
        """The whole training state on the main process, from the stages of its pipeline. Collective."""
        world = self.work.world
        if world.replica != 0:
            return None
        self._let_go()
        files = checkpoint.tensors(self.part, self.optimizer)
        twice = self.tie is not None and world.stage != 0
        mine = [
            (file, name, value)
            for file, named in files.items()
            for name, value in named.items()
            if not (twice and name.startswith("wte."))
        ]
        names = [(file, name, value.shape, value.dtype) for file, name, value in mine]
        lists: list[Any] | None = [None] * self.place.processes if world.is_main else None
        dist.gather_object(names, lists, group=self.group, group_dst=0)
        if lists is None:
            for _, _, value in mine:
                dist.send(value.to(world.device).contiguous(), group=self.group, group_dst=0)
            return None
        for process, found in enumerate(lists[1:], start=1):
            for file, name, shape, dtype in found:
                kept = self._gathered.setdefault(file, {})
                if name not in kept:
                    kept[name] = torch.empty(shape, dtype=dtype)
                there = (
                    kept[name] if world.device.type == "cpu" else torch.empty(shape, dtype=dtype, device=world.device)
                )
                dist.recv(there, group=self.group, group_src=process)
                if there is not kept[name]:
                    kept[name].copy_(there)
        return {file: dict(named) | self._gathered.get(file, {}) for file, named in files.items()}

    def load(self, files: Files) -> None:
        """Takes the part of this process's stages."""
        own = {name for name, _ in self.part.named_parameters()}
        mine = {
            file: {name: value for name, value in named.items() if _owner(file, name) in own}
            for file, named in files.items()
        }  # fmt: skip
        checkpoint.load_tensors(mine, self.part, self.optimizer)


def _owner(file: str, name: str) -> str:
    """The parameter that a tensor of a checkpoint belongs to."""
    return name if file == checkpoint.MODEL else name.rpartition(".")[0]
