"""What takes optimizer steps in a bench: gptlab's own, the plain opponent, and transformers' GPT-2.

    trainee = make("plain", cell, setting, world)
    trainee.step()        # the loss of an optimizer step, once the device has ended it

All begin with the same weights and see the same windows of random ids: speed does not depend on the text. The plain
loop serves as golden (float64), as eager, and as the opponent.

Left out on purpose: taking the time (`race.py`), judging (`judging.py`), sampling (`generating.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gptlab import compiling, initial
from gptlab.assembly import Setting, assemble
from gptlab.batches import Batches, micro_batches, share
from gptlab.benchmark.cells import Cell
from gptlab.config import ConfigError, GPTConfig, TrainConfig
from gptlab.manifest import MODEL
from gptlab.model import GPT
from gptlab.parallel.replicated import Replicated
from gptlab.parallel.sharded import Sharded
from gptlab.parallel.strategy import Strategy
from gptlab.parallel.world import World
from gptlab.precision import allow_tfloat32, precision

CORPUS_TOKENS = 1 << 18
"""Random ids that training windows are cut from, more where one window needs more."""

NORM = "norm of the gradient"


class Trainee(Protocol):
    """What can be judged and raced."""

    setting: dict[str, Any]
    """What it runs with."""

    def step(self) -> float:
        """Takes an optimizer step; returns its loss when the device has done it. Collective."""

    def tensors(self) -> dict[str, Tensor]:
        """Gradients as the optimizer took them and weights, after a step: `grad NAME` and `weight NAME`."""

    def outputs(self) -> Tensor | None:
        """Logits of the first micro-batch, where the weights of the moment give some on one process."""

    def reset(self) -> None:
        """Back to before the first step."""


def wait(device: str) -> None:
    """Until the device has done what it was asked to."""
    if device == "cuda":
        torch.cuda.synchronize()
    elif device == "mps":
        torch.mps.synchronize()


def batches_of(config: TrainConfig, length: int) -> Batches:
    """The windows that every side of a cell sees."""
    import numpy as np

    size = max(CORPUS_TOKENS, 2 * length)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, size).astype(np.uint32)
    return Batches(ids, block_size=length, global_batch_size=config.global_batch_size, order="random", seed=config.seed)


def weights_of(config: TrainConfig) -> dict[str, Tensor]:
    """The weights that every side of a cell begins with."""
    return initial.read(config, lambda _: None) or GPT(config, seed=config.seed).state_dict()


def transformers_model(config: GPTConfig, state: dict[str, Tensor]) -> nn.Module:
    """transformers' GPT-2 of a shape, with a GPT's weights."""
    import transformers

    plain_shape = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
    if GPTConfig(**plain_shape, dropout=config.dropout) != config.shape():
        raise ConfigError("transformers' GPT-2 has none of the switches that this config has on: leave them off.")
    drops: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd, n_positions=config.block_size,
            vocab_size=config.vocab_size, bos_token_id=None, eos_token_id=None, **drops,
        )
    )  # fmt: skip
    turned = ("c_attn.weight", "c_fc.weight", "c_proj.weight")  # its Conv1D holds (in, out)
    weights = {f"transformer.{k}": v.T.contiguous() if k.endswith(turned) else v for k, v in state.items()}
    weights["transformer.wte.weight"] = weights["transformer.wte.weight"][: config.vocab_size].clone()
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    model.load_state_dict(weights)
    return model


def make(name: str, cell: Cell, setting: Setting, world: World) -> Trainee:
    """A side of a training race: `ours`, or an opponent's name.

    Args:
        setting: what the config's `auto` became, of this side.
    """
    config = cell.config if name == "ours" else cell.opponent
    if name in ("ours", "eager"):
        if cell.recipe:
            how = setting.compile if name == "ours" else "off"
            return PlainLoop(
                cell, config, setting, world, compile=how, backend=torch_backend(cell.backend), named=cell.backend
            )
        if name == "eager":
            setting = dataclasses.replace(setting, kernels="torch", compile="off")
        return OurStep(cell, config, setting, world, torch_backend(cell.backend))
    if name == "transformers":
        return PlainLoop(cell, config, setting, world, fused=True, transformers=True)
    gpu = setting.device == "cuda"
    plain = dataclasses.replace(setting, attention="sdpa", dtype="bfloat16" if gpu else "float32")
    return PlainLoop(cell, config, plain, world, compile="model" if gpu else "off", fused=gpu or None)


def torch_backend(backend: str) -> str:
    """torch.compile's name for a backend of ours."""
    return backend if backend in ("aot_eager", "cudagraphs") else "inductor"


class OurStep:
    """The step that `gptlab train` takes."""

    def __init__(self, cell: Cell, config: TrainConfig, setting: Setting, world: World, backend: str) -> None:
        self.setting = vars(setting) | {"backend": backend if setting.compile != "off" else "eager"}
        self.world, self.config, self.turn = world, config, 0
        self.batches = batches_of(config, config.block_size)
        self.parts = assemble(config, setting, self.batches.tokens, world, backend=backend)
        if weights := initial.read(config, lambda _: None):
            self.parts.strategy.load({MODEL: weights})
        self.parts.strategy.part.train()
        self.mine = [p for group in self.parts.strategy.optimizer.param_groups for p in group["params"]]
        self.begin = [p.detach().clone() for p in self.mine]
        self.scale = scaler.state() if (scaler := self.parts.step.scaler) else None
        self.norm = 0.0

    def step(self) -> float:
        """See `Trainee`. Steps that only lower float16's loss scale are taken again, as training does."""
        result = self.parts.step(self.turn)
        while result.rescaled:
            result = self.parts.step(self.turn)
        self.turn, self.norm = self.turn + 1, result.grad_norm
        wait(self.world.device.type)
        return result.loss

    def tensors(self) -> dict[str, Tensor]:
        """See `Trainee`."""
        return whole_tensors(self.parts.strategy) | {NORM: torch.tensor([self.norm])}

    def outputs(self) -> Tensor | None:
        """See `Trainee`. The kernel of our own gives no logits."""
        strategy = self.parts.strategy
        if self.world.size > 1 or not isinstance(strategy, Replicated) or strategy.engine is not None:
            return None
        ids, _ = self.batches.micro_batch(0, 0, strategy.work.micro_batch_size)
        with torch.no_grad(), precision(self.world.device, self.setting["dtype"]):
            logits: Tensor = strategy.callee(ids.to(self.world.device))
        return logits

    @torch.no_grad()
    def reset(self) -> None:
        """See `Trainee`. In place: what is compiled holds on to the tensors."""
        for p, begin in zip(self.mine, self.begin, strict=True):
            p.copy_(begin)
        for state in self.parts.strategy.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()
        if self.scale is not None and self.parts.step.scaler:
            self.parts.step.scaler.restore(self.scale)
        self.turn = self.parts.step.skipped = 0


class LastLogits(nn.Module):
    """What the nanogpt folder of pytorch/benchmark trains: the mean of the last position's logits."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, 1, V)."""
        return self.model.logits(self.model.hidden(ids)[:, -1:])


class PlainLoop:
    """A training step as one writes it first: full logits, F.cross_entropy, AdamW, clip_grad_norm_, and torch's own
    DistributedDataParallel where there are several processes.

    Args:
        setting: `dtype` may be float64, which casts the model.
        fused: AdamW's; None leaves torch its default.
    """

    def __init__(
        self, cell: Cell, config: TrainConfig, setting: Setting, world: World, *, compile: str = "off",
        backend: str = "inductor", named: str = "plain", fused: bool | None = None, transformers: bool = False,
        dtype: str = "", micro: int = 0,
    ) -> None:  # fmt: skip
        self.config, self.world, self.recipe = config, world, cell.recipe
        self.dtype, self.micro, self.turn = dtype or setting.dtype, micro or setting.micro_batch_size, 0
        self.batches = batches_of(config, cell.length)
        allow_tfloat32(self.dtype)
        model: nn.Module = GPT(config, attention=setting.attention, seed=config.seed)
        if weights := initial.read(config, lambda _: None):
            model.load_state_dict(weights)
        attention: str = setting.attention
        if transformers:
            model = transformers_model(config, model.state_dict())
            attention = getattr(model.config, "_attn_implementation", "")
        model = model.to(world.device).train()
        if self.dtype == "float64":
            model = model.double()
        self.model: nn.Module = LastLogits(model) if self.recipe else model  # type: ignore[arg-type]
        self.named = dict(model.named_parameters())
        self.begin = {name: p.detach().clone() for name, p in self.named.items()}
        self.fused = fused
        self.optimizer = self._optimizer()
        self.called = compiling.compiled(self.model, compile, backend)
        self.ddp = DistributedDataParallel(self.called) if world.size > 1 else None
        count = micro_batches(config.global_batch_size, self.micro)
        if count < world.size:
            raise ConfigError(f"{count} micro-batches are too few for {world.size} processes: use smaller ones.")
        self.share = share(count, world.rank, world.size)
        self.norm = 0.0
        self.setting = {
            "side": named, "dtype": self.dtype, "attention": attention, "micro_batch_size": self.micro,
            "compile": compile, "optimizer": "AdamW, fused" if fused else "AdamW",
        }  # fmt: skip

    def _optimizer(self) -> torch.optim.Optimizer:
        config, parameters = self.config, self.named.values()
        if self.recipe:
            return torch.optim.AdamW(parameters, lr=config.learning_rate, fused=self.fused)
        return torch.optim.AdamW(
            decayed_groups(self.named, config), lr=config.learning_rate, betas=(config.beta1, config.beta2),
            fused=self.fused,
        )  # fmt: skip

    def step(self) -> float:
        """See `Trainee`."""
        config, device = self.config, self.world.device
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float64)
        for index in self.share:
            ids, targets = self.batches.micro_batch(self.turn, index, self.micro)  # each (b, T)
            ids, targets = ids.to(device), targets.to(device)
            if self.ddp is not None:
                self.ddp.require_backward_grad_sync = index == self.share[-1]
            loss = self._loss(ids, targets) * (len(ids) / config.global_batch_size)
            (loss * self.world.size).backward()  # DistributedDataParallel takes the mean
            total += loss.detach().cpu()
        if not self.recipe:
            limit = config.grad_clip or math.inf
            self.norm = float(nn.utils.clip_grad_norm_(list(self.named.values()), limit))
        self.optimizer.step()
        self.turn += 1
        wait(device.type)
        return self.world.sum([total.item()])[0]

    def logits(self, ids: Tensor) -> Tensor:
        """(b, T) int64 on the device -> (b, T, V)."""
        with precision(self.world.device, self.dtype):
            logits = (self.called if self.ddp is None else self.ddp)(ids)
        found: Tensor = getattr(logits, "logits", logits)
        return found

    def _loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(ids)
        with precision(self.world.device, self.dtype):
            if logits.dtype != torch.float64:
                logits = logits.float()
            return logits.mean() if self.recipe else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def tensors(self) -> dict[str, Tensor]:
        """See `Trainee`."""
        norm = {} if self.recipe else {NORM: torch.tensor([self.norm])}
        return named_tensors(self.named) | norm

    def outputs(self) -> Tensor | None:
        """See `Trainee`."""
        if self.world.size > 1:
            return None
        ids, _ = self.batches.micro_batch(0, 0, self.micro)
        with torch.no_grad():
            return self.logits(ids.to(self.world.device))

    @torch.no_grad()
    def reset(self) -> None:
        """See `Trainee`."""
        for name, p in self.named.items():
            p.copy_(self.begin[name])
        self.optimizer, self.turn = self._optimizer(), 0


def decayed_groups(named: dict[str, nn.Parameter], config: TrainConfig) -> list[dict[str, Any]]:
    """Parameters for AdamW: weight decay falls on matrices alone."""
    return [
        {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]


def named_tensors(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`grad NAME` and `weight NAME` of parameters, in copies of their own."""
    found = {f"grad {name}": p.grad.clone() for name, p in named.items() if p.grad is not None}
    return found | {f"weight {name}": p.detach().clone() for name, p in named.items()}


def whole_tensors(strategy: Strategy) -> dict[str, Tensor]:
    """The same of a strategy: what this process holds, or, of rows, the whole on the main one. Collective."""
    if not isinstance(strategy, Sharded):
        return named_tensors(dict(strategy.part.named_parameters()))
    found: dict[str, Tensor] = {}
    for name, rows in strategy.shards.parameters.items():
        for kind, value in (("grad", rows.grad), ("weight", rows.detach())):
            whole = None if value is None else strategy.shards.gather(name, value)
            if whole is not None and strategy.work.world.is_main:
                found[f"{kind} {name}"] = whole.clone()
    return found
