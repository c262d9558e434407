"""Several tokens for one reading of the weights: guessed by the model itself in int8, then checked by the model.

A decode step of one row takes the time of reading all weights. In int8 they are read in a quarter of it, and what they
guess is nearly always what the weights themselves would have chosen. Up to seven guesses are checked at once, in about
the time of one step: the guesses that are right have their logits already, and the first wrong one is thrown away.

    drafter = Drafter(model, decoder, choose)
    drafter.logits(last, place, cache, most)        # (1, V), as decoder.logits has them

The plain twin is the decoder alone: as its products and attention give a row the same bits whatever stands beside it,
logits and so texts are equal to the last bit. Speculative decoding (Leviathan et al. 2023), with the model's own
weights as the draft. Left out on purpose: several texts at once, which already share a reading of the weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gptlab.decoding import MOST, Decoder
from gptlab.kvcache import KVCache
from gptlab.model import GPT

LARGE = 30_000_000
"""Weights from which guessing pays: fewer lie in the CPU's cache, where int8 is read no faster."""
LONG = 64
"""New tokens from which it pays for the second copy of the weights."""


def pays(decoder: Decoder, rows: int, new: int) -> bool:
    """Whether guessing pays, and can be had: one long text by a large model in float32, by products of our own."""
    weights = sum(p.numel() for p in decoder.model.parameters())
    able = decoder.reads_ahead and decoder.dtype == torch.float32 and not decoder.config.mask_documents
    return able and rows == 1 and new >= LONG and weights >= LARGE


class Drafter:
    """Guesses and checks the ids of one text.

    Args:
        decoder: of the model, in float32; its cache serves the guesses, too.
        choose: logits (1, V), and how many ids are to be chosen before, to the id that they would give.
    """

    def __init__(self, model: GPT, decoder: Decoder, choose: Callable[[Tensor, int], int]) -> None:
        self.decoder, self.choose = decoder, choose
        self._fast = Decoder(model, rows=1, lies="bytes")
        self._checked: list[tuple[int, Tensor]] = []
        """Guesses that nobody came to yet, each with the logits (1, V) of the id after it."""
        self._right = MOST // 2 - 1
        """How many of the last guesses were right so far; at first, a hope."""

    def logits(self, last: int, place: int, cache: KVCache, most: int) -> Tensor:
        """Of the id after the text's last, (1, V).

        Args:
            place: of the last id in the cache, which has seen those before it, and maybe guesses behind it.
            most: how many ids further it may look.
        """
        if self._checked and self._checked[0][0] == last:
            self._right += 1
            return self._checked.pop(0)[1]
        guesses = self._guess(last, place, cache, min(self._right + 1, MOST - 1, most, cache.length - place - 1))
        cache.rewind(place)
        logits = self.decoder.following(self._ids(last, *guesses), cache)[0]  # (1 + guesses, V)
        first, *others = logits.split(1)
        self._checked, self._right = list(zip(guesses, others, strict=True)), 0
        return first

    def _ids(self, *ids: int) -> Tensor:
        return torch.tensor([ids], device=self.decoder.device)  # (1, T)

    def _guess(self, last: int, place: int, cache: KVCache, count: int) -> list[int]:
        """The next ids as int8 has them. What it leaves in the cache is its own, to be written over."""
        cache.rewind(place)
        guesses: list[int] = []
        for ahead in range(count):
            logits = self._fast.following(self._ids(guesses[-1] if guesses else last), cache)[0]  # (1, V)
            guesses.append(self.choose(logits, ahead))
        return guesses
