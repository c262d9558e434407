"""Text from a trained model: the prompts once, then a token at a time through the cache of keys and values.

    >>> from gptlab import Run, sample
    >>> for piece in sample(Run("runs/first"), "def ", max_new_tokens=200, temperature=0.8): print(piece, end="")

`generate` works on ids and several prompts at once, of any lengths; a row's ids are those that it would have alone.
Past the edge of the context the window slides: positions belong to places in the window, so every further token needs
the window anew, with and without a cache alike. Draws come from a generator of each row's own; a seed repeats.

Left out on purpose: the network (`model.py`), the cache (`kvcache.py`), layouts of weights that decode faster
(`decoding.py`), how an id follows from logits (`choosing.py`), beam search.
"""

from __future__ import annotations

import codecs
import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gptlab.checkpoint import load_model, newest_of
from gptlab.choosing import Choice
from gptlab.config import ConfigError, GPTConfig, did_you_mean
from gptlab.decoding import Decoder
from gptlab.drafting import Drafter, pays
from gptlab.hardware import resolve_device
from gptlab.kvcache import KVCache
from gptlab.model import GPT
from gptlab.runs import Run
from gptlab.tokenizer import Tokenizer, from_meta

STOPPED = -1
"""What a row gives after its stop id."""


class _Texts:
    """Rows that grow: their ids, which ids each has, and the generator of each one's draws."""

    def __init__(self, prompts: Sequence[Tensor], config: GPTConfig, choice: Choice, seed: int, device: torch.device):
        self.ids: list[list[int]] = [prompt.tolist() for prompt in prompts]
        self.block_size, self.device = config.block_size, device
        # Ids are chosen in float64, which Apple's GPUs lack.
        self.choosing = torch.device("cpu") if device.type == "mps" else device
        self.seen: Tensor | None = None
        if choice.repetition_penalty != 1:
            self.seen = torch.zeros(len(prompts), config.vocab_size, dtype=torch.bool, device=self.choosing)
            for row, prompt in enumerate(prompts):
                self.seen[row, prompt.to(self.choosing)] = True
        self.choice = choice
        self.generators = None
        if choice.temperature:
            self.generators = [torch.Generator().manual_seed((seed + row) % 2**63) for row in range(len(prompts))]
        self._drawn: list[deque[Tensor]] = [deque() for _ in prompts]

    def append(self, rows: list[int], ids: Tensor) -> list[int]:
        """One id a row, (B,); returns them as numbers."""
        if self.seen is not None:
            self.seen[rows, ids] = True
        new: list[int] = ids.tolist()
        for row, one in zip(rows, new, strict=True):
            self.ids[row].append(one)
        return new

    def slides(self, row: int) -> bool:
        """Whether the row is longer than the context."""
        return len(self.ids[row]) > self.block_size

    def windows(self, rows: list[int], most: int) -> tuple[Tensor, Tensor]:
        """The last ids of each row, `most` at most: (B, T), flush right; and the empty places before them, (B,)."""
        parts = [self.ids[row][-most:] for row in rows]
        T = max(map(len, parts))
        padding = torch.tensor([T - len(part) for part in parts])
        return torch.tensor([[0] * (T - len(part)) + part for part in parts], device=self.device), padding

    def _draw(self, row: int, ahead: int) -> Tensor | None:
        """What the id after so many others will be drawn with, (1,) float64 in [0, 1)."""
        if self.generators is None:
            return None
        drawn = self._drawn[row]
        while len(drawn) <= ahead:
            drawn.append(torch.rand(1, generator=self.generators[row], dtype=torch.float64))
        return drawn[ahead]

    def choose(self, rows: list[int], logits: Tensor) -> Tensor:
        """The next id of each of these rows, (B,), by its logits (B, V)."""
        draws = [draw for row in rows if (draw := self._draw(row, 0)) is not None]
        for row in rows if draws else ():
            self._drawn[row].popleft()
        seen = None if self.seen is None else self.seen[rows]
        return self.choice(logits.to(self.choosing), seen, torch.cat(draws) if draws else None)

    def guess(self, logits: Tensor, ahead: int) -> int:
        """What the first row's logits, (1, V), would choose after so many other ids, which may be seen by then."""
        seen = None if self.seen is None else self.seen[:1]
        return int(self.choice(logits.to(self.choosing), seen, self._draw(0, ahead)))


class _Cached:
    """Rows whose keys and values are kept: those within the context that have not stopped."""

    def __init__(self, decoder: Decoder, drafter: Drafter | None, texts: _Texts, new: int) -> None:
        self.decoder, self.drafter, self.texts, self.rows = decoder, drafter, texts, list(range(len(texts.ids)))
        config = decoder.config
        ids, padding = texts.windows(self.rows, config.block_size)
        # A row grows until it is as long as the context; the shortest has the farthest to go.
        shortest = ids.size(1) - int(padding.max())
        length = ids.size(1) + min(new - 1, config.block_size - shortest)
        self.cache = KVCache(config, len(self.rows), length, decoder.device, decoder.dtype, padding=padding)
        self.new: Tensor | None = ids  # what the cache has not seen yet
        self.before = len(texts.ids[0]) - ids.size(1)  # ids of the first row that the window left out
        self.end = len(texts.ids[0]) + new
        self.end_of_text = config.vocab_size - 1 if config.mask_documents else None
        self._hide(ids)

    def _hide(self, ids: Tensor) -> None:
        """With document masking, what stands before a row's last end of text is not seen."""
        if self.end_of_text is None:
            return
        for row, column in (ids == self.end_of_text).nonzero().tolist():
            self.cache.hide(row, self.cache.used + column)

    def logits(self) -> Tensor:
        """Of the id after each row, (B, V), in the order of `rows`."""
        ids = self.new
        if ids is None and self.drafter is not None:
            text = self.texts.ids[0]
            return self.drafter.logits(text[-1], len(text) - 1 - self.before, self.cache, self.end - len(text) - 1)
        if ids is None:
            ids, _ = self.texts.windows(self.rows, 1)  # (B, 1)
            self._hide(ids)
        self.new = None
        return self.decoder.logits(ids, self.cache)

    def drop(self, row: int) -> None:
        """Forgets a row, if it is here."""
        if row in self.rows:
            index = self.rows.index(row)
            self.cache.drop(index)
            self.rows[index] = self.rows[-1]
            self.rows.pop()


def generate(
    model: GPT,
    prompts: Sequence[Tensor] | Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    stop_ids: Collection[int] = (),
    seed: int = 0,
    use_cache: bool = True,
    draft: bool = True,
    dtype: torch.dtype | None = None,
) -> Iterator[Tensor]:
    """Continues prompts, a token at a time.

    Args:
        model: in eval mode.
        prompts: (B, T) int64, or B tensors (T,) of any lengths above 0. Only the last block_size ids are looked at.
        stop_ids: a row ends with the first of these that it gives.
        seed: row r draws what it would draw alone with the seed `seed + r`.
        use_cache: keep keys and values; without, each token computes its whole window (the plain twin).
        draft: where it pays, guess ids and check several at once (`drafting.py`); the ids stay what they are.
        dtype: of weights and cache while decoding; none takes the model's.

    Yields:
        (B,) int64, on the CPU: the next id of each row, or STOPPED. Ends when all rows have stopped.

    Raises:
        ConfigError: a prompt that is empty or has ids out of the vocabulary, or a number out of range.
    """
    choice = Choice(temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty)
    vocab_size = model.config.vocab_size
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens {max_new_tokens} is out of range: give a value of 1 or more.")
    if not len(prompts):
        raise ConfigError("There is no prompt: give one or more.")
    for row, prompt in enumerate(prompts):
        if not prompt.numel():
            raise ConfigError(f"Prompt {row} has no ids: give it one or more.")
        if not 0 <= int(prompt.min()) <= int(prompt.max()) < vocab_size:
            wrong = int(prompt.max()) if prompt.max() >= vocab_size else int(prompt.min())
            raise ConfigError(f"Prompt {row} has the id {wrong}: give ids from 0 to {vocab_size - 1}.")
    texts = _Texts(list(prompts), model.config, choice, seed, model.wte.weight.device)
    return _generate(model, texts, max_new_tokens, frozenset(stop_ids), use_cache, draft, dtype)


@torch.inference_mode()
def _generate(
    model: GPT,
    texts: _Texts,
    max_new_tokens: int,
    stop_ids: frozenset[int],
    use_cache: bool,
    draft: bool,
    dtype: torch.dtype | None,
) -> Iterator[Tensor]:
    count, block_size, drafter = len(texts.ids), model.config.block_size, None
    if use_cache or dtype not in (None, model.wte.weight.dtype):
        decoder = Decoder(model, rows=count, dtype=dtype)
        if use_cache and draft and pays(decoder, count, max_new_tokens):
            drafter = Drafter(model, decoder, texts.guess)
        model = decoder.model
    alive = list(range(count))
    cached = _Cached(decoder, drafter, texts, max_new_tokens) if use_cache else None
    for _ in range(max_new_tokens):
        rows, parts = [], []
        if cached is not None and cached.rows:
            rows += cached.rows
            parts.append(cached.logits())  # (B, V)
        # The others compute their windows, which are the same for all that slide; rows of one length go together.
        key = lambda row: len(texts.ids[row][-block_size:])  # noqa: E731
        for _, same in itertools.groupby(sorted(set(alive) - set(rows), key=key), key):
            group = list(same)
            window, _ = texts.windows(group, block_size)
            rows += group
            parts.append(model.logits(model.hidden(window)[:, -1]))
        ids = texts.choose(rows, torch.cat(parts))
        given = [STOPPED] * count
        for row, one in zip(rows, texts.append(rows, ids), strict=True):
            given[row] = one
            stops = one in stop_ids
            if stops:
                alive.remove(row)
            if cached is not None and (stops or texts.slides(row)):
                cached.drop(row)
        yield torch.tensor(given)
        if not alive:
            return


def sample(
    run: Run,
    prompt: str | Sequence[str],
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    stop_ids: Collection[int] | None = None,
    seed: int = 0,
    use_cache: bool = True,
    dtype: str = "float32",
    device: str = "auto",
) -> Iterator[Any]:
    """Continues texts with a run's newest checkpoint, as whole characters, until a stop id or the limit.

    Args:
        prompt: what to go on from; empty starts at a line's beginning. Several are continued at once.
        temperature: above 0; 0 always takes the most likely token.
        stop_ids: ids that end a text and are not shown; none takes the tokenizer's end of text.
        dtype: float32, or bfloat16 for speed.
        device: auto, cpu, cuda or mps.
        (The others as `generate` has them.)

    Returns:
        Pieces of text; for several prompts, pairs of the prompt's number and a piece.

    Raises:
        ConfigError: no checkpoint yet, a prompt with characters that the tokenizer lacks, or a number out of range.
    """
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in kinds:
        raise ConfigError(f"dtype {dtype!r} is unknown{did_you_mean(dtype, kinds)}: choose float32 or bfloat16.")
    if device not in (devices := ("auto", "cpu", "cuda", "mps")):
        raise ConfigError(
            f"device {device!r} is unknown{did_you_mean(device, devices)}: choose auto, cpu, cuda or mps."
        )
    newest = newest_of(run)
    model, state = load_model(newest, device=resolve_device(device)[0])
    tokenizer = from_meta(state.get("tokenizer"))
    if tokenizer.vocab_size != model.config.vocab_size:
        raise ConfigError(
            f"The checkpoint {newest} has a tokenizer of {tokenizer.vocab_size} ids and a model of "
            f"{model.config.vocab_size}: choose another run."
        )
    if stop_ids is None:
        stop_ids = () if tokenizer.eot is None else (tokenizer.eot,)
    for one in stop_ids:
        if not 0 <= one < tokenizer.vocab_size:
            raise ConfigError(f"stop id {one} stands for nothing: give one from 0 to {tokenizer.vocab_size - 1}.")
    prompts = [prompt] if isinstance(prompt, str) else prompt
    ids = generate(
        model,
        [torch.from_numpy(tokenizer.encode(text or "\n").astype("int64")) for text in prompts],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        stop_ids=stop_ids,
        seed=seed,
        use_cache=use_cache,
        dtype=kinds[dtype],
    )
    pieces = _pieces(ids, len(prompts), tokenizer, stop_ids)
    return (piece for _, piece in pieces) if isinstance(prompt, str) else pieces


def _pieces(
    steps: Iterator[Tensor], rows: int, tokenizer: Tokenizer, stop_ids: Collection[int]
) -> Iterator[tuple[int, str]]:
    """Characters of each row as they become whole: a token may end in the middle of one."""
    decoders = [codecs.getincrementaldecoder("utf-8")(errors="replace") for _ in range(rows)]
    for ids in steps:
        for row, one in enumerate(ids.tolist()):
            shown = one != STOPPED and one not in stop_ids
            if shown and (piece := decoders[row].decode(tokenizer.decode_bytes([one]))):
                yield row, piece
    for row, decoder in enumerate(decoders):
        if rest := decoder.decode(b"", final=True):
            yield row, rest
