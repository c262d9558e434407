"""Whether a cell computes the right thing: golden in float64, two eager runs, and two of the benched side.

    verdict, tensors = judge_training(cell, trainee, setting, world, meeting, stage)

Training: the logits, the loss, every gradient, the gradient's norm and what the optimizer made of the weights, after a
step over the whole batch; several processes are held against one on the joined batch, and against each other. The
update is held against AdamW in float64 over the side's *own* gradients, since AdamW turns a gradient that is all
rounding into a whole step of either sign.

Sampling: the greedy tokens of two kinds of prompt, a short one and one that crosses the edge of the context. At each
position float64 logits over the side's own text say what it should have chosen; another choice passes only where the
two logits are as near as an eager run in the same precision is far from golden.

Left out on purpose: the rule (`accuracy.py`) and the sides (`training.py`, `generating.py`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gptlab.assembly import Setting
from gptlab.benchmark.accuracy import TOLERANCE, Verdict, apart, compare, first_difference, limit
from gptlab.benchmark.cells import Cell
from gptlab.benchmark.inside.generating import golden_logits
from gptlab.benchmark.inside.training import PlainLoop, Trainee, decayed_groups
from gptlab.optimizer import learning_rate, make_optimizer, update
from gptlab.parallel.world import World

if TYPE_CHECKING:
    from gptlab.model import GPT

HALF = ("bfloat16", "float16", "tfloat32")
"""Precisions whose products have fewer bits than float32's."""
LOGITS = 1 << 24
"""Most logits that golden holds at once."""

Stage = Callable[[str], None]


class Meeting:
    """Where the processes of a cell hand each other small texts, and tensors that only some of them have."""

    def __init__(self, folder: Path, world: World) -> None:
        self.folder, self.world = folder, world

    def gather(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], str]:
        """All processes' tensors by name, on the main one, and where two that have one of a name disagree. Collective.

        A pipeline's stages have some of the parameters each; replicas have all of them, and must hold the same.
        """
        from safetensors.torch import load_file, save_file

        world = self.world
        if world.size == 1:
            return tensors, ""
        path = self.folder / f"digests-{world.rank}.json"
        path.write_text(json.dumps({name: digest(value) for name, value in tensors.items()}))
        world.sum([0.0])
        digests = [json.loads((self.folder / f"digests-{rank}.json").read_text()) for rank in range(world.size)]
        lacking = {name: value.cpu().contiguous() for name, value in tensors.items() if name not in digests[0]}
        if not world.is_main and lacking:
            save_file(lacking, self.folder / f"tensors-{world.rank}.safetensors")
        world.sum([0.0])
        if not world.is_main:
            return tensors, ""
        found, differs = dict(tensors), ""
        for rank in range(1, world.size):
            for name, value in digests[rank].items():
                if name in digests[0] and value != digests[0][name] and not differs:
                    differs = f"{name} is another one in process {rank} than in process 0 after the step."
            extra = self.folder / f"tensors-{rank}.safetensors"
            if extra.exists():
                found |= {name: value.to(world.device) for name, value in load_file(extra).items()}
                extra.unlink()
        return found, differs


def digest(value: Tensor) -> str:
    """A hash of a tensor's bits."""
    flat = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=8).hexdigest()


def judge_training(
    cell: Cell, trainee: Trainee, setting: Setting, world: World, meeting: Meeting, stage: Stage
) -> tuple[Verdict, dict[str, Tensor]]:
    """Collective; the verdict is the main process's.

    Args:
        trainee: at its beginning, where it is left again; its config has no dropout.
        stage: is told what is being run, so that a crash has a name.

    Returns:
        The verdict, and the benched side's tensors.
    """
    stage("candidate")
    first, differs = meeting.gather(_step(trainee))
    trainee.reset()
    second, _ = meeting.gather(_step(trainee))
    trainee.reset()
    logits = trainee.outputs()
    if not world.is_main:
        return Verdict(), first
    half = setting.dtype in HALF
    if gap := apart(first, second, half=half):
        return Verdict("runs_differ", f"{gap[0]} is off by {gap[1]:.2e} of its size in a second run.", gap[0]), first
    if logits is not None:
        first["logits"] = logits
    alone = World(0, 1, world.device)
    config = cell.config.alone().replace(dropout=0.0)
    plain = dataclasses.replace(setting, attention="math", kernels="torch", compile="off")
    most = max(1, LOGITS // (cell.length * config.vocab_size))
    stage("golden")
    golden_loop = PlainLoop(cell, config, plain, alone, dtype="float64", micro=min(setting.micro_batch_size, most))
    golden = _step(golden_loop)
    begin = golden_loop.begin
    if logits is not None:
        golden_loop.reset()
        golden["logits"] = _outputs(golden_loop, setting.micro_batch_size)
    del golden_loop
    stage("eager")
    eager_loop = PlainLoop(cell, config, plain, alone)
    eager = _step(eager_loop)
    eager_loop.reset()
    again = _step(eager_loop)
    if name := first_difference(eager, again):
        return Verdict("eager_two_runs_differ", f"{name} differs between two eager runs.", name), first
    if logits is not None:
        eager_loop.reset()
        eager["logits"] = _outputs(eager_loop, setting.micro_batch_size)
    del eager_loop
    compared = _with_updates(cell, begin, golden, eager, first)
    verdict = compare(*compared, half=half)
    if verdict.status == "pass" and differs:
        verdict = Verdict("ranks_differ", differs, differs.partition(" is another")[0], verdict.figures)
    if differs and verdict.status == "fail_accuracy":  # the cause, rather than the first number it made wrong
        verdict = Verdict("ranks_differ", f"{differs} {verdict.note}", verdict.worst, verdict.figures)
    return verdict, compared[2]


def _step(trainee: Trainee) -> dict[str, Tensor]:
    """The tensors of one step."""
    loss = trainee.step()
    return trainee.tensors() | {"loss": torch.tensor([loss], dtype=torch.float64)}


def _outputs(loop: PlainLoop, size: int) -> Tensor:
    """Logits of the first `size` sequences, however many the loop takes at once."""
    ids, _ = loop.batches.micro_batch(0, 0, size)
    whole, parts = loop.micro, []
    for at in range(0, len(ids), whole):
        with torch.no_grad():
            parts.append(loop.logits(ids[at : at + whole].to(loop.world.device)))
    return torch.cat(parts)


def _with_updates(
    cell: Cell, begin: Mapping[str, Tensor], golden: dict[str, Tensor], eager: dict[str, Tensor],
    candidate: dict[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:  # fmt: skip
    """The three with `update NAME`, what the step added to a weight, in place of `weight NAME`. Golden's is what the
    optimizer makes of the candidate's gradients in float64; eager's is off from that by as much as eager is off from
    what the optimizer makes of eager's own."""
    names = [name.removeprefix("weight ") for name in golden if name.startswith("weight ")]
    out: list[dict[str, Tensor]] = []
    for tensors in (golden, eager, candidate):
        out.append({name: value for name, value in tensors.items() if not name.startswith("weight ")})
    mine = _updated(cell, begin, candidate)
    theirs = _updated(cell, begin, eager)
    for name in names:
        key = f"update {name}"
        if f"weight {name}" not in candidate:
            continue
        start = begin[name].double()
        out[0][key] = mine[name] - start
        out[1][key] = out[0][key] + (eager[f"weight {name}"].double() - theirs[name])
        out[2][key] = candidate[f"weight {name}"].double() - start
    return out[0], out[1], out[2]


def _updated(cell: Cell, begin: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights after the optimizer's step over some gradients, in float64."""
    config = cell.config
    named = {name: nn.Parameter(value.double().clone()) for name, value in begin.items()}
    for name, p in named.items():
        if (gradient := tensors.get(f"grad {name}")) is not None:
            p.grad = gradient.double()
    if cell.recipe:
        torch.optim.AdamW(named.values(), lr=config.learning_rate).step()
    elif config.optimizer == "adamw":
        betas = (config.beta1, config.beta2)
        torch.optim.AdamW(decayed_groups(named, config), lr=config.learning_rate, betas=betas).step()
    else:
        holder: Any = _Holder(named)
        update(make_optimizer(holder, config, fused=False), lr=learning_rate(config, 0))
    return {name: p.detach() for name, p in named.items()}


class _Holder(nn.Module):
    """Parameters under the names that they bear in a GPT."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._named = dict(named)

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter(self._named.items())


# Sampling ------------------------------------------------------------------------------------------------------------

Greedy = Callable[[Tensor, int], Tensor]
"""Prompts (B, P) and a number of tokens to the tokens chosen, (B, N)."""


def judge_generation(cell: Cell, greedy: Greedy, model: GPT, dtype: torch.dtype, stage: Stage) -> Verdict:
    """Args:
    greedy: the benched side.
    model: the weights, float32, in eval mode.
    dtype: of the benched side's weights.
    """
    seed = torch.Generator().manual_seed(1)
    config, device = cell.config, model.wte.weight.device
    half = dtype != torch.float32
    long = max(1, config.block_size - EDGE)
    scenes = {"short": (cell.prompt, min(cell.new_tokens, 32)), "edge": (long, EDGE + PAST)}
    worst = Verdict(figures={"limit": 0.0})
    for scene, (length, new) in scenes.items():
        prompts = torch.randint(0, config.vocab_size, (config.global_batch_size, length), generator=seed).to(device)
        stage("candidate")
        tokens = greedy(prompts, new)
        if not torch.equal(tokens, greedy(prompts, new)):
            return Verdict("runs_differ", f"greedy tokens after a {scene} prompt differ in a second run.", "tokens")
        text = torch.cat((prompts.cpu(), tokens.cpu()), 1).to(device)
        stage("golden")
        golden = golden_logits(model, text, length, torch.float64)  # (B, N, V)
        stage("eager")
        eager = golden_logits(model, text, length, dtype)
        if not torch.equal(eager, golden_logits(model, text, length, dtype)):
            return Verdict(
                "eager_two_runs_differ", f"logits after a {scene} prompt differ in two eager runs.", "logits"
            )
        verdict = judge_tokens(tokens, golden, eager, scene, half=half)
        if verdict.status != "pass" or not worst.worst or verdict.figures["logit_gap"] > worst.figures["logit_gap"]:
            worst = verdict
        if verdict.status != "pass":
            break
    return worst


EDGE = 6
"""Tokens of the context that the long prompt leaves free."""
PAST = 4
"""Tokens past the edge."""


def judge_tokens(tokens: Tensor, golden: Tensor, eager: Tensor, scene: str, *, half: bool) -> Verdict:
    """Holds greedy tokens (B, N) against logits (B, N, V) over the same text, golden's and eager's."""
    tokens = tokens.to(golden.device).long()
    eager = eager.double()
    size = golden.square().mean(-1).sqrt()  # (B, N)
    off = (eager - golden).square().mean(-1).sqrt() / size  # eager's error, relative
    wide = (eager - golden).abs().amax(-1)  # (B, N)
    chosen = golden.gather(2, tokens[..., None]).squeeze(2)
    gap = golden.amax(-1) - chosen  # how much less likely than the best, in logits
    allowed = 2 * limit(1.0, golden.size(2), half=half) * wide + TOLERANCE[half] / 10 * size
    differs = tokens != eager.argmax(-1)
    figures: dict[str, float] = {
        "logit_gap": float(gap.max()), "limit": float(allowed.flatten()[gap.argmax()]), "eager_rmse": float(off.max()),
        "compared": tokens.numel(),
    }  # fmt: skip
    where = f"tokens after a {scene} prompt"
    if differs.any():
        position, row = min((int(p), int(r)) for r, p in differs.nonzero().tolist())
        figures |= {"first_difference": position, "first_gap": float(gap[row, position])}
    over = gap > allowed
    if not over.any():
        return Verdict("pass", "", where, figures)
    position, row = min((int(p), int(r)) for r, p in over.nonzero().tolist())
    note = (
        f"{where} go wrong at position {position} of row {row}: the chosen logit is {gap[row, position]:.3g} under the "
        f"best, where rounding explains {allowed[row, position]:.2g}."
    )
    return Verdict("tokens_differ", note, where, figures | {"first_difference": position})
