"""What races: gptlab's step and sampling, the plain opponent, and transformers' GPT-2.

    >>> from gptlab.benchmark.sides import Job, make
    >>> from gptlab.presets import preset
    >>> make("plain", Job("train", preset("tiny"))).turn()

Every side of a race begins with the same weights and sees the same windows, of random ids: speed does not depend on the
text. A turn is an optimizer step over the global batch, or the continuation of global_batch_size prompts; it ends when
the device has ended. Left out on purpose: taking the time (`pairing.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gptlab import hardware, worker
from gptlab.config import ConfigError, GPTConfig, TrainConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gptlab.batches import Batches

CORPUS_TOKENS = 1 << 18
"""Random ids that training windows are cut from, more where one window needs more."""


@dataclass
class Job:
    """What both sides do."""

    kind: str
    config: TrainConfig
    new_tokens: int = 128
    prompt: int = 16

    @property
    def threads(self) -> int:
        """CPU threads of each side."""
        return self.config.threads or hardware.default_threads(1)

    @property
    def tokens(self) -> int:
        """Tokens of a turn: seen in training, made in sampling."""
        each = self.config.block_size if self.kind == "train" else self.new_tokens
        return self.config.global_batch_size * each

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return vars(self) | {"config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Job:
        """What `to_dict` gave."""
        return cls(**(values | {"config": TrainConfig.from_dict(values["config"])}))


@dataclass
class Side:
    """One of the two that race."""

    turn: Callable[[], None]
    device: str
    setting: dict[str, Any]
    """What it runs with."""
    first_token: Callable[[], None] | None = None

    def prefill_ms(self) -> float:
        """Milliseconds from the prompts to the first new token, at best of three."""
        assert self.first_token is not None
        times = []
        for _ in range(3):
            began = time.perf_counter()
            self.first_token()
            times.append(time.perf_counter() - began)
        return 1e3 * min(times)


def prepare(job: Job) -> str:
    """Threads, device and imports of this process, before any model is made; returns the device."""
    import torch

    import gptlab.sampling
    import gptlab.step  # noqa: F401

    torch.set_num_threads(job.threads)
    return hardware.resolve_device(job.config.device)[0]


def make(name: str, job: Job) -> Side:
    """A side: `gptlab`, `plain`, `nocache` or `transformers`."""
    prepare(job)
    return (_train if job.kind == "train" else _generate)(name, job)


def _wait(device: str) -> None:
    """Until the device has done what it was asked to."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    elif device == "mps":
        torch.mps.synchronize()


def _transformers(config: GPTConfig, state: dict[str, Tensor]) -> nn.Module:
    """transformers' GPT-2 of a shape, with a GPT's weights."""
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            "transformers is not installed: `pip install gptlab[test]` brings it, or race plain or nocache."
        ) from None
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


def _train(name: str, job: Job) -> Side:
    """A side that takes optimizer steps."""
    import numpy as np
    import torch

    from gptlab.assembly import assemble
    from gptlab.batches import Batches
    from gptlab.model import GPT
    from gptlab.parallel.world import World
    from gptlab.precision import allow_tfloat32

    config = job.config
    settled, _ = worker.settle(config, {}, 1, 1)
    kind = settled.device
    size = max(CORPUS_TOKENS, 2 * config.block_size)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, size).astype(np.uint16)
    if name == "gptlab":
        step = assemble(config, settled, ids, World(0, 1, torch.device(kind))).step
        turns = iter(range(10**9))

        def turn() -> None:
            step(next(turns))
            _wait(kind)

        return Side(turn, kind, vars(settled))
    batches = Batches(
        ids, block_size=config.block_size, global_batch_size=config.global_batch_size, order="random", seed=config.seed
    )
    setting = {name: getattr(settled, name) for name in ("dtype", "micro_batch_size", "attention")} | {"compile": "off"}
    if name == "plain":
        setting |= {"attention": "sdpa", "dtype": "bfloat16" if kind == "cuda" else "float32"}
        setting |= {"compile": "model" if kind == "cuda" else "off"}
    allow_tfloat32(setting["dtype"])
    model: nn.Module = GPT(config, attention=setting["attention"], seed=config.seed)
    if name == "transformers":
        model = _transformers(config, model.state_dict())
        setting["attention"] = getattr(model.config, "_attn_implementation", "")
    model = model.to(kind).train()
    called: Any = torch.compile(model) if setting["compile"] == "model" else model
    fused = True if name == "transformers" or kind == "cuda" else None
    loop = _PlainLoop(
        called, model, batches, config, torch.device(kind), settled.micro_batch_size, setting["dtype"], fused
    )
    return Side(loop.turn, kind, setting | {"optimizer": "AdamW, fused" if fused else "AdamW"})


class _PlainLoop:
    """A training step as one writes it first: full logits, F.cross_entropy, AdamW, clip_grad_norm_."""

    def __init__(
        self, called: Any, model: nn.Module, batches: Batches, config: TrainConfig, device: torch.device, micro: int,
        dtype: str, fused: bool | None,
    ) -> None:  # fmt: skip
        import torch

        self.called, self.batches, self.config, self.device = called, batches, config, device
        self.micro, self.dtype, self.step = micro, dtype, 0
        self.parameters = list(model.parameters())
        groups = [
            {"params": [p for p in self.parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=fused
        )

    def turn(self) -> None:
        """One optimizer step over the global batch."""
        import torch
        import torch.nn.functional as F

        from gptlab.batches import micro_batches
        from gptlab.precision import precision

        config = self.config
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for index in range(micro_batches(config.global_batch_size, self.micro)):
            ids, targets = self.batches.micro_batch(self.step, index, self.micro)  # each (b, T)
            ids, targets = ids.to(self.device), targets.to(self.device)
            with precision(self.device, self.dtype):
                logits = self.called(ids)  # (b, T, V)
                logits = getattr(logits, "logits", logits)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            loss = loss * (len(ids) / config.global_batch_size)
            loss.backward()
            total += loss.item()
        if config.grad_clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, config.grad_clip)
        self.optimizer.step()
        self.step += 1
        _wait(self.device.type)


def _generate(name: str, job: Job) -> Side:
    """A side that continues prompts, greedily."""
    import torch

    from gptlab.model import GPT
    from gptlab.sampling import generate

    config = job.config
    kind, _ = hardware.resolve_device(config.device)
    width = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}.get(config.dtype)
    if width is None:
        raise ConfigError(f"bench generate has no dtype {config.dtype!r}: choose float32 or bfloat16.")
    if job.prompt + job.new_tokens > config.block_size:
        raise ConfigError(
            f"{job.prompt} and {job.new_tokens} tokens are more than block_size {config.block_size}: use fewer."
        )
    model = GPT(config, seed=config.seed).to(kind).eval().requires_grad_(False)
    seed = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, config.vocab_size, (config.global_batch_size, job.prompt), generator=seed).to(kind)
    setting = {"dtype": str(width).removeprefix("torch."), "cache": name != "nocache"}
    if name == "transformers":
        other: Any = _transformers(config, model.state_dict()).to(device=kind, dtype=width).eval()

        def run(new: int) -> None:
            with torch.inference_mode():
                other.generate(
                    prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, do_sample=False,
                    use_cache=True,
                )  # fmt: skip
            _wait(kind)
    else:

        def run(new: int) -> None:
            for _ in generate(
                model, prompts, max_new_tokens=new, temperature=0, use_cache=name != "nocache", dtype=width
            ):
                pass
            _wait(kind)

    return Side(lambda: run(job.new_tokens), kind, setting, lambda: run(1))
