"""The strategies `pp` and `pp+ddp` of Hugging Face's own modules, cut by the tracer.

    strategy = PublishedPipeline(work, attention="sdpa")
    strategy.compute(0, 1.0)

The pipeline is that of our own model: passes, sums over replicas, ties, norms and checkpoints are written once
(`pipelined.py`). What differs is how the module is cut, that its last stage gives scores and not yet a loss, and that
evaluation goes through the schedule, since a traced stage may read what several stages before it made.

Left out on purpose: dropout, which a traced graph would draw as the process happens to stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from gptlab import huggingface
from gptlab.attention import Attention
from gptlab.heads import tally_scores
from gptlab.parallel.pipeline.pipelined import Pipelined
from gptlab.parallel.pipeline.schedules import TorchStage
from gptlab.parallel.pipeline.tracing import NamedParameters, TracedStage, trace, untie
from gptlab.parallel.strategy import Work
from gptlab.spread import split_points
from gptlab.tasks import published_cuts

EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"


class PublishedPipeline(Pipelined):
    """A `Strategy` over a pipeline of traced stages.

    Args:
        attention: `sdpa` or `math`.
    """

    tied = EMBEDDING

    def __init__(self, work: Work, *, attention: Attention) -> None:
        super().__init__(work, attention=attention)
        self.score_rows = self.count * work.micro_batch_size
        self.collective_score = True  # a schedule takes whole passes

    def _cut(self, attention: Attention) -> nn.Module:
        """Traces the whole module, and keeps this process's stage."""
        work, config, device = self.work, self.work.config, self.work.world.device
        module: nn.Module = huggingface.make(config, work.labels, seed=config.seed, attention=attention).to(device)
        if huggingface.is_tied(module):
            untie(module, "lm_head", EMBEDDING)
        pipe = trace(module, self._points(), rows=work.micro_batch_size, length=config.block_size, device=device)
        self._traced = [
            TracedStage(pipe, number, group=self.group, device=device, dtype=work.dtype, note=self.clock.note)
            for number in self.numbers
        ]
        named = dict(self._traced[0].submod.named_parameters())
        if work.labels is None:
            # The head is the embedding's second copy. The tracer leaves one without use on the first stage.
            head = named.pop(HEAD, None)
            if head is not None and EMBEDDING not in named:
                named[EMBEDDING] = head
        return NamedParameters(named)

    def _points(self) -> dict[str, str]:
        """Where to cut: as asked, or balanced by cost."""
        config = self.work.config
        if config.split is not None:
            return published_cuts(split_points(str(config.split)), config)
        L = config.n_layer
        starts = [layers.start for layers in self.layers[1:]]
        return {f"transformer.h.{at}" if at < L else "transformer.ln_f": "beginning" for at in starts}

    def _first_weights(self) -> Iterable[tuple[str, Tensor]]:
        """The weights that the whole module begins with."""
        return huggingface.begin(self.work.config, self.work.labels, self.work.config.seed)

    def _torch_stages(self) -> Sequence[TorchStage | TracedStage]:
        """The stages as torch drives them."""
        return self._traced

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The same from logits (b, T, V) or scores (b, K)."""
        loss = huggingface.loss(output, target, "sum")
        self._total += loss.detach()
        return loss * self._factor

    @torch.no_grad()
    def score(self, ids: Tensor, targets: Tensor) -> Tensor:
        """`tally` of a pass's sequences, on the process with the last stage, and 0 on the others. Collective."""
        first = (ids,) if 0 in self.numbers else ()
        out = self.schedule.eval(*first, target=targets)
        if self.work.labels is not None:
            return torch.zeros(2, device=ids.device) if out is None else tally_scores(out, targets)
        return torch.zeros(1, device=ids.device) if out is None else huggingface.loss(out, targets, "sum")[None]
