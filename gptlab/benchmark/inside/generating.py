"""What samples in a bench: gptlab's own decoding, eager and compiled ones, the uncached twin, and transformers.

    way = make("ours", cell, model, torch.float32, "sdpa")
    way.greedy(prompts, 32)        # (B, 32)

Left out on purpose: taking the time (`race.py`), judging (`judging.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gptlab.benchmark.cells import Cell
from gptlab.benchmark.inside.training import torch_backend, transformers_model, wait, weights_of
from gptlab.choosing import Choice
from gptlab.decoding import Decoder
from gptlab.kvcache import KVCache
from gptlab.model import GPT
from gptlab.sampling import generate

DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}
DEVIATION = 0.02
"""Of a new GPT's weights (`model.initialise`)."""
TORCHBENCH_SAMPLING = {"temperature": 0.8, "top_k": 200}
"""As the nanogpt folder of pytorch/benchmark draws."""


@dataclass
class Way:
    """One way to continue prompts."""

    run: Callable[[Tensor, int, dict[str, Any]], Tensor]
    """Prompts (B, P), a number N and sampling options to (B, N)."""
    prompt: Callable[[Tensor], object]
    """Prompts (B, P) to the logits after them: what reading them costs."""
    setting: dict[str, Any]

    def read(self, prompts: Tensor) -> None:
        """Reads prompts, until the device has ended."""
        with torch.inference_mode():
            self.prompt(prompts)
        wait(prompts.device.type)

    def greedy(self, prompts: Tensor, new: int) -> Tensor:
        """The most likely tokens, (B, N), when the device has ended."""
        return self(prompts, new, {"temperature": 0.0})

    def __call__(self, prompts: Tensor, new: int, options: dict[str, Any]) -> Tensor:
        tokens = self.run(prompts, new, options)
        wait(prompts.device.type)
        return tokens


def model_of(cell: Cell, device: str) -> GPT:
    """The weights of a cell, float32, in eval mode.

    A GPT that has learned nothing repeats its last token, whatever came before, so that a wrong context would not show:
    the matrices of its blocks are made as large as keeps the size of what passes through, 1 / sqrt(C).
    """
    model = GPT(cell.config, seed=cell.config.seed)
    model.load_state_dict(weights_of(cell.config))
    if cell.config.init_from is None:
        with torch.no_grad():
            for name, p in model.h.named_parameters():
                if name.endswith("weight") and p.dim() == 2:
                    p.mul_(cell.config.n_embd**-0.5 / DEVIATION)
    return model.to(device).eval().requires_grad_(False)


def make(name: str, cell: Cell, model: GPT, dtype: torch.dtype, attention: str) -> Way:
    """A side: `ours`, or an opponent's name."""
    backend = cell.backend if name == "ours" else name
    setting = {"side": backend, "dtype": str(dtype).removeprefix("torch."), "cache": backend != "nocache"}
    if backend in ("config", "native", "nocache"):
        cached = backend != "nocache"

        def ours(prompts: Tensor, new: int, options: dict[str, Any]) -> Tensor:
            steps = generate(model, prompts, max_new_tokens=new, use_cache=cached, dtype=dtype, **options)
            return torch.stack(list(steps), 1)

        decoder = Decoder(model, rows=cell.config.global_batch_size, dtype=dtype)

        def read(prompts: Tensor) -> Tensor:
            cache = KVCache(model.config, len(prompts), cell.prompt, decoder.device, decoder.dtype)
            return decoder.logits(prompts, cache)

        return Way(ours, read, setting)
    if backend == "transformers":
        other: Any = transformers_model(cell.config, model.state_dict())
        other = other.to(device=model.wte.weight.device, dtype=dtype).eval()

        def theirs(prompts: Tensor, new: int, options: dict[str, Any]) -> Tensor:
            drawing = {**options, "do_sample": True} if options["temperature"] else {"do_sample": False}
            with torch.inference_mode():
                whole: Tensor = other.generate(
                    prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, use_cache=True, **drawing
                )
            return whole[:, prompts.size(1) :]

        return Way(theirs, lambda prompts: other(prompts, use_cache=True, logits_to_keep=1), setting)
    twin = GPT(cell.config, attention=attention)  # type: ignore[arg-type]
    twin.load_state_dict(model.state_dict())
    twin = twin.to(device=model.wte.weight.device, dtype=dtype).eval().requires_grad_(False)
    compile = None if backend == "eager" else torch_backend(backend)
    plain = _Plain(twin, compile)
    return Way(plain, plain.read, setting | {"compile": compile or "off", "attention": attention})


class _Plain:
    """Decoding as one writes it first: the prompt, then a token at a time through the cache. Compiled, a step sees a
    cache whose shapes never change. Past the edge of the context each token takes its window."""

    def __init__(self, model: GPT, backend: str | None) -> None:
        self.model, self.static = model, backend is not None
        self.step: Any = self._step
        if backend is not None:
            self.step = torch.compile(self._step, backend=backend, dynamic=False)

    def _step(self, ids: Tensor, cache: KVCache) -> Tensor:
        """(B, 1) -> logits (B, V)."""
        return self.model.logits(self.model.hidden(ids, cache=cache)[:, -1])

    def read(self, prompts: Tensor) -> Tensor:
        """Prompts (B, P) to the logits after them, (B, V)."""
        return self._step(prompts, self._cache(len(prompts)))

    def _cache(self, rows: int) -> KVCache:
        config, weight = self.model.config, self.model.wte.weight
        return KVCache(config, rows, config.block_size, weight.device, weight.dtype, static=self.static)

    @torch.no_grad()
    def __call__(self, prompts: Tensor, new: int, options: dict[str, Any]) -> Tensor:
        choice, draw = Choice(**options), torch.Generator().manual_seed(0)
        block_size, cache, text = self.model.config.block_size, self._cache(len(prompts)), prompts
        last = prompts  # what the cache has not seen yet
        for _ in range(new):
            if text.size(1) > block_size:
                logits = self.model.logits(self.model.hidden(text[:, -block_size:])[:, -1])
            elif text.size(1) == prompts.size(1):
                logits = self._step(last, cache)
            else:
                logits = self.step(last, cache)
            draws = torch.rand(len(text), generator=draw, dtype=torch.float64) if choice.temperature else None
            last = choice(logits.cpu(), draws=draws)[:, None].to(text.device)  # (B, 1)
            text = torch.cat((text, last), 1)
        return text[:, prompts.size(1) :]


@torch.no_grad()
def golden_logits(model: GPT, text: Tensor, prompt: int, dtype: torch.dtype) -> Tensor:
    """What a text's further tokens were chosen from, computed plainly: windows as sampling has them, no cache.

    Args:
        text: (B, P + N) int64, the prompt and what was chosen.

    Returns:
        (B, N, V).
    """
    twin = copy.deepcopy(model).to(dtype)
    part: Any
    for part in twin.modules():
        if hasattr(part, "attention"):
            part.attention = "math"
    block_size, whole = model.config.block_size, text.size(1)
    inside = min(whole - 1, block_size)
    parts = [twin.logits(twin.hidden(text[:, :inside])[:, prompt - 1 :])]
    for end in range(inside + 1, whole):
        parts.append(twin.logits(twin.hidden(text[:, end - block_size : end])[:, -1:]))
    return torch.cat(parts, 1)
