"""Windows are a function of (seed, step) alone, cover an epoch once, and are shared without overlap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gptlab.batches import Batches, micro_batches, share, stream_seed, windows


def make(order: Any = "random", seed: int = 1, tokens: int = 1000, size: int = 6) -> Batches:
    return Batches(
        np.arange(tokens, dtype=np.uint16),
        block_size=8,
        global_batch_size=size,
        order=order,
        seed=seed,
    )


@pytest.mark.parametrize("order", ["random", "epoch"])
def test_a_step_does_not_depend_on_the_steps_before(order: str) -> None:
    one, other = make(order), make(order)
    far = one.starts(40)
    for step in range(40):
        other.starts(step)
    assert (other.starts(40) == far).all()
    assert (make(order, seed=2).starts(40) != far).any()
    assert (one.starts(41) != far).any()


def test_an_epoch_shows_each_window_once() -> None:
    batches = make("epoch", tokens=8 * 31 + 5, size=6)
    per_epoch = (8 * 31 + 4) // 8 - 1
    seen = np.concatenate([batches.starts(step) for step in range(per_epoch * 6 // 6)])
    for epoch in range(3):
        part = seen[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert len(set(part.tolist())) == per_epoch
        assert (np.diff(np.sort(part)) == 8).all()
        assert part.min() >= 0 and part.max() + 9 <= 8 * 31 + 5


def test_the_shortest_text_has_a_window_in_both_orders() -> None:
    for order in ("random", "epoch"):
        ids, targets = make(order, tokens=9).micro_batch(3, 0, 6)
        assert ids.shape == (6, 8) and (targets == ids + 1).all()


def test_micro_batches_make_up_the_global_batch_however_they_are_shared() -> None:
    batches = make(size=8)
    whole = windows(batches.tokens, batches.starts(5), 8)[0]
    count = micro_batches(8, 3)
    assert count == 3
    for world in (1, 2, 3, 5):
        parts = [batches.micro_batch(5, i, 3)[0] for rank in range(world) for i in share(count, rank, world)]
        assert sum(len(p) for p in parts) == 8
        assert (np.concatenate(parts) == whole.numpy()).all()


def test_shares_are_even() -> None:
    assert [len(share(8, rank, 3)) for rank in range(3)] == [3, 3, 2]


def test_ids_of_a_large_vocabulary_do_not_wrap() -> None:
    ids, targets = windows(np.array([65535, 0, 40000], dtype=np.uint16), np.array([0]), 2)
    assert ids.tolist() == [[65535, 0]] and targets.tolist() == [[0, 40000]]


def test_streams_differ() -> None:
    names = [("batch", 1, 2), ("batch", 2, 1), ("epoch", 1, 2), ("batch", 1, 3)]
    assert len({stream_seed(*name) for name in names}) == 4
    assert all(0 <= stream_seed(*name) < 2**62 for name in names)
