"""Text from a trained model: prefill the prompt once, then one token at a time through the KV cache.

    >>> from gptlab.runs import Run
    >>> from gptlab.sampling import sample
    >>> for piece in sample(Run("runs/first"), "def ", max_new_tokens=200, temperature=0.8): print(piece, end="")

Past the edge of the context the window slides: learned positions belong to places in the window, so every further token
needs the window anew, with and without a cache alike. Draws come from a generator of their own; a seed repeats.

Left out on purpose: the network (`model.py`), and finding a run (`runs.py`).
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gptlab.checkpoint import load_model, newest_good
from gptlab.config import ConfigError
from gptlab.kvcache import KVCache
from gptlab.model import GPT
from gptlab.runs import Run
from gptlab.tokenizer import from_meta


def choose(logits: Tensor, *, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    """The next id of each row.

    Args:
        logits: (B, V).
        temperature: divides the logits; 0 takes the most likely id.
        top_k: only the k most likely ids are drawn (Fan et al. 2018, section 5.1); 0 for all.

    Returns:
        (B,) int64 on the CPU.
    """
    logits = logits.float().cpu()
    if temperature == 0:
        return logits.argmax(-1)
    if 0 < top_k < logits.size(-1):
        least = logits.topk(top_k).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < least, -math.inf)
    probabilities = torch.softmax(logits / temperature, dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


@torch.inference_mode()
def generate(
    model: GPT,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    cache: bool = True,
) -> Iterator[Tensor]:
    """Continues a batch of prompts of one length, a token at a time.

    Args:
        model: in eval mode.
        prompt: (B, T) int64, T >= 1; the last block_size ids are looked at.
        cache: keep keys and values; without, the whole window is computed anew each time (the plain twin).

    Yields:
        (B,) int64, on the CPU: the next id of each row.
    """
    config, device = model.config, model.wte.weight.device
    generator = torch.Generator().manual_seed(seed)
    window = prompt[:, -config.block_size :].to(device)  # (B, <= block_size)
    kept = KVCache(config, window.size(0), config.block_size, device, model.wte.weight.dtype) if cache else None
    new = window
    for _ in range(max_new_tokens):
        if kept is not None and kept.used + new.size(1) <= config.block_size:
            logits = model(new, cache=kept)[:, -1]  # (B, V)
        else:
            logits = model(window)[:, -1]
        ids = choose(logits, temperature=temperature, top_k=top_k, generator=generator)
        yield ids
        new = ids[:, None].to(device)  # (B, 1)
        window = torch.cat([window, new], dim=1)[:, -config.block_size :]


def sample(
    run: Run, prompt: str, *, max_new_tokens: int = 200, temperature: float = 0.8, top_k: int = 0, seed: int = 0
) -> Iterator[str]:
    """Continues a text with a run's newest checkpoint, as whole characters, until the end-of-text id or the limit.

    Args:
        prompt: what to go on from; empty starts at a line's beginning.
        temperature: above 0; 0 always takes the most likely token.

    Raises:
        ConfigError: no checkpoint yet, a prompt with characters that the tokenizer lacks, or a number out of range.
    """
    for name, value, low in (
        ("max_new_tokens", max_new_tokens, 1),
        ("temperature", temperature, 0),
        ("top_k", top_k, 0),
    ):
        if not (math.isfinite(value) and value >= low):
            raise ConfigError(f"{name} {value} is out of range: give {low} or more.")
    newest = newest_good(run.path / "checkpoints", lambda _: None)
    if newest is None:
        raise ConfigError(f"The run {run.name!r} has no checkpoint yet: wait for its first, or train it to the end.")
    model, state = load_model(newest)
    tokenizer = from_meta(state["tokenizer"])
    ids = torch.from_numpy(tokenizer.encode(prompt or "\n").astype("int64"))[None]  # (1, T)
    return _text(model, ids, tokenizer, max_new_tokens, temperature, top_k, seed)


def _text(model, ids, tokenizer, max_new_tokens, temperature, top_k, seed) -> Iterator[str]:  # type: ignore[no-untyped-def]
    """Characters as they become whole: a token may end in the middle of one."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    for new in generate(model, ids, **options):
        if new.item() == tokenizer.eot:
            break
        piece = decoder.decode(tokenizer.decode_bytes([int(new)]))
        if piece:
            yield piece
    if rest := decoder.decode(b"", final=True):
        yield rest
