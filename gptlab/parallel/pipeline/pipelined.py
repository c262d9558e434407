"""The strategies `pp`, `pp+ddp` and `pp+fsdp`: a replica of the model is a pipeline of processes with some stages each.

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

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptlab.attention import Attention
from gptlab.cuts import layers_of_stages
from gptlab.making import first_weights, whole_shapes
from gptlab.manifest import MODEL, OPTIMIZER
from gptlab.optimizer import optimizer_of
from gptlab.pace import COMMUNICATION
from gptlab.parallel.pipeline.cutting import Part, make_part
from gptlab.parallel.pipeline.holding import Copies, Holding, Rows
from gptlab.parallel.pipeline.schedules import TorchStage, make_schedule
from gptlab.parallel.pipeline.simulator import Span
from gptlab.parallel.pipeline.ties import TiedGradient
from gptlab.parallel.pipeline.timeline import Clock, hop_seconds, record, time_stage, times_of_spans
from gptlab.parallel.pipeline.tracing import TracedStage
from gptlab.parallel.strategy import Files, Work
from gptlab.spread import SCHEDULES, held, layout, owners, passes

TIMED = 3
"""The step of a process's life whose timeline is taken down: the ones before are slower."""


class Pipelined:
    """A `Strategy` over a pipeline of stages, and over replicas of it.

    Args:
        attention: kernel of attention.
    """

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
        self.numbers = held(self.name, self.place, world.stage)
        self.clock = Clock(world.device, world.pace)
        self.part = self._cut(attention)
        sharded = config.strategy == "pp+fsdp"
        self.held: Holding
        if sharded:
            assert isinstance(self.part, Part), "rows are of our own model"
            rows = self.held = Rows(self.part, work)
        else:
            self.held = Copies(self.part, world)
        self.held.set(self._first_weights())
        self.optimizer = optimizer_of(self.held.parameters, config)
        if sharded:
            self.optimizer.register_step_post_hook(lambda *_: rows.moved())
        self.collective_score = sharded
        self.tie = self._tie()
        self.stages = self._torch_stages()
        self.schedule = make_schedule(self.name, self.stages, self.count, self._loss)
        self.score_rows = work.micro_batch_size
        self._steps = 0
        self._spans: list[Span] | None = None
        self._factor = 0.0
        self._total = torch.zeros((), device=world.device)
        self._sent: list[tuple[Any, Tensor]] = []
        self._gathered: dict[tuple[str, str], Tensor] = {}

    def _cut(self, attention: Attention) -> nn.Module:
        """This process's stages, whose parameters bear the whole model's names; their weights are yet to come."""
        return make_part(
            self.work.config, {stage: self.layers[stage] for stage in self.numbers}, self.place.stages,
            attention=attention, dtype=self.work.dtype, in_chunks=not SCHEDULES[self.name].splits,
            labels=self.work.labels, twins=self.work.config.strategy == "pp+fsdp",
        )  # fmt: skip

    def _first_weights(self) -> Iterable[tuple[str, Tensor]]:
        """The weights that the whole model begins with."""
        return first_weights(self.work.config, self.work.labels)

    def _torch_stages(self) -> Sequence[TorchStage | TracedStage]:
        """The stages as torch drives them."""
        assert isinstance(self.part, Part)
        return [
            TorchStage(
                stage, number, self.place.stages, group=self.group, device=self.work.world.device,
                rows=self.work.micro_batch_size, note=self.clock.note,
            )
            for number, stage in self.part.stages.items()
        ]  # fmt: skip

    tied = "wte.weight"
    """The parameter that is the head as well, where there is one."""

    def _tie(self) -> TiedGradient | None:
        """The other holder of this process's embedding, where there is one."""
        first, last = self.owners[0], self.owners[-1]
        here = self.work.world.stage
        if self.work.labels is not None or not self.work.config.tie_head or first == last or here not in (first, last):
            return None
        return TiedGradient(self.group, last if here == first else first)

    @property
    def gradients(self) -> list[Tensor]:
        """Of this process's stages."""
        return [p.grad for p in self.held.parameters.values() if p.grad is not None]

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the whole model's parameters, by name."""
        return whole_shapes(self.work.config, self.work.labels)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        """What the last stage goes back from: its sum of losses over the targets of the global batch."""
        self._total += output.detach().squeeze(0)
        return output.squeeze(0) * self._factor

    def compute(self, step: int, scale: float) -> float:
        """Forward and backward over the replica's micro-batches, and the sums. Collective."""
        work, each, pace = self.work, self.count * self.work.micro_batch_size, self.work.world.pace
        self.held.zero_grad()
        self._factor = scale / work.targets
        self._total.zero_()
        for turn in range(self.passes):
            at = work.world.replica * self.passes + turn
            pace.enter("windows")
            ids, targets = (part.to(work.world.device) for part in work.batches.micro_batch(step, at, each))
            pace.enter(COMMUNICATION)  # all that is no pass; each pass says so itself
            watched = self._steps == TIMED - 1 and turn == 0
            if watched:
                dist.barrier(self.group)  # whose end is one moment for all
                self.clock.start()
            self._run(ids, targets, [work.dropout_seed(step, at * self.count + index) for index in range(self.count)])
            if watched:
                self._spans = self.clock.spans(work.world.stage)
        self._steps += 1
        self.held.finish()
        if self.tie is not None:
            gradient = self.held.parameters[self.tied].grad
            assert gradient is not None
            self.tie.add(gradient)
        pace.enter("other")
        return float(self._total.item())

    def _run(self, ids: Tensor, targets: Tensor, seeds: list[int | None]) -> None:
        """One pass of the schedule, which cuts ids and targets, (count * b, T), into its micro-batches."""
        for stage in self.stages:
            stage.dropout_seeds = seeds
        first = (ids,) if 0 in self.numbers else ()
        self.schedule.step(*first, target=targets, ids=ids, targets=targets, return_outputs=False)

    def observe(self) -> dict[str, Any] | None:
        """After step `TIMED` of a process: what the first pipeline did in it and what was to be expected, on the
        main process. Collective."""
        work, spans = self.work, self._spans
        self._spans = None
        if spans is None:
            return None
        ids, targets = work.micro_batch(0, 0)
        alone = [stage for stage in self.stages if isinstance(stage, TorchStage)]  # traced ones know no such thing
        if isinstance(self.held, Rows) or not alone:
            times = {stage.stage_index: times_of_spans(spans, stage.stage_index) for stage in self.stages}
        else:
            dist.barrier(self.group)  # so that they are timed as they work: all at once
            times = {stage.stage_index: time_stage(stage, ids, targets, self.clock) for stage in alone}
        between = torch.zeros(*ids.shape, work.config.n_embd, device=ids.device)
        hop = hop_seconds(self.group, between, self.clock)
        lists: list[Any] | None = [None] * self.place.processes if work.world.stage == 0 else None
        dist.gather_object((times, hop, spans), lists, group=self.group, group_dst=0)
        if lists is None or not work.world.is_main:
            return None
        known = {number: found for each, _, _ in lists for number, found in each.items()}
        hops = [seconds for _, seconds, _ in lists[:-1]]
        found = record(
            self.name, self.place, self.count, [known[number] for number in range(self.place.stages)],
            sum(hops) / len(hops), [span for _, _, each in lists for span in each],
        )  # fmt: skip
        return found | {"passes": self.passes, "blocks": [[part.start, part.stop] for part in self.layers]}

    def norm(self) -> float:
        """Norm of the whole gradient, an embedding that two stages hold counted on the first. Collective."""
        return math.sqrt(self.held.squares(self.tied if self._second else None))

    @property
    def _second(self) -> bool:
        """Whether this process's embedding is the second copy of another's."""
        return self.tie is not None and self.work.world.stage == self.owners[-1]

    @torch.no_grad()
    def score(self, ids: Tensor, targets: Tensor) -> Tensor:
        """`tally` of sequences, on the process with the last stage, and 0 on the others. All processes of a pipeline
        call it alike."""
        assert isinstance(self.part, Part)
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
            x = self.part.stages[number](x, ids=ids, targets=targets, tally=True)
            if number + 1 < self.place.stages and self.owners[number + 1] != here:
                self._sent.append((dist.isend(x, group=self.group, group_dst=self.owners[number + 1]), x))
        return x if here == self.owners[-1] else torch.zeros(1 if self.work.labels is None else 2, device=ids.device)

    def _let_go(self) -> None:
        """Waits for what evaluation sent last: so one stage can be a call ahead of the next."""
        while self._sent:
            self._sent.pop()[0].wait()

    def gather(self) -> Files | None:
        """The whole training state on the main process, from the stages of its pipeline. Collective."""
        self._let_go()
        mine: list[tuple[str, str, Tensor]] = []
        for name, p in self.held.parameters.items():
            for key, value in {"": p.data, **self.optimizer.state.get(p, {})}.items():
                whole = self.held.gather(name, value)
                if whole is not None and not (self._second and name == self.tied):
                    mine.append((OPTIMIZER, f"{name}.{key}", whole) if key else (MODEL, name, whole))
        if self.work.world.replica != 0:
            return None
        found = self._collect(mine)
        if found is None:
            return None
        order = {name: place for place, name in enumerate(self.shapes)}
        return {
            file: {name: value for _, name, value in sorted(
                ((kind, name, value) for kind, name, value in found if kind == file),
                key=lambda item: order[_owner(item[0], item[1])],
            )}
            for file in (MODEL, OPTIMIZER)
        }  # fmt: skip

    def _collect(self, mine: list[tuple[str, str, Tensor]]) -> list[tuple[str, str, Tensor]] | None:
        """Tensors of all stages of the pipeline, by file and name, on its first process; None on the others."""
        device = self.work.world.device
        names = [(file, name, value.shape, value.dtype) for file, name, value in mine]
        lists: list[Any] | None = [None] * self.place.processes if self.work.world.is_main else None
        dist.gather_object(names, lists, group=self.group, group_dst=0)
        if lists is None:
            for _, _, value in mine:
                dist.send(value.to(device).contiguous(), group=self.group, group_dst=0)
            return None
        for process, theirs in enumerate(lists[1:], start=1):
            for file, name, shape, dtype in theirs:
                value = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(value, group=self.group, group_src=process)
                mine.append((file, name, self._kept(file, name, value)))
        return mine

    def _kept(self, file: str, name: str, value: Tensor) -> Tensor:
        """A copy on the CPU, in memory that is taken once."""
        kept = self._gathered.setdefault((file, name), torch.empty(value.shape, dtype=value.dtype))
        return kept.copy_(value)

    def load(self, files: Files) -> None:
        """Takes the part of this process's stages."""
        self.held.set(files[MODEL].items())
        for name, value in files.get(OPTIMIZER, {}).items():
            owner, _, key = name.rpartition(".")
            if owner in self.held.parameters:
                p = self.held.parameters[owner]
                self.optimizer.state[p][key] = self.held.take(value).to(p.device, copy=True)


def _owner(file: str, name: str) -> str:
    """The parameter that a tensor of a checkpoint belongs to."""
    return name if file == MODEL else name.rpartition(".")[0]
