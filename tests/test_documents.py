"""Documents as rows, and which a step sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gptlab.documents import DocumentBatches, Documents

PAD = 9
FOUND = Documents(
    np.array([1, PAD, 2, 3, PAD, 4, 5, 6, PAD, 7, PAD], np.uint16), [0, 1, 0, 1], names=["a", "b"], pad=PAD
)  # fmt: skip


def batches(**changes: Any) -> DocumentBatches:
    values: dict[str, Any] = {"block_size": 2, "global_batch_size": 4, "order": "random", "seed": 1}
    return DocumentBatches(FOUND, **(values | changes))


def test_rows_are_cut_or_filled_up() -> None:
    ids, labels = FOUND.rows(np.array([0, 2, 1]), 2)
    assert ids.tolist() == [[1, PAD], [4, 5], [2, 3]] and labels.tolist() == [0, 0, 1]
    assert FOUND.rows(np.array([], np.int64), 2)[0].shape == (0, 2)


@pytest.mark.parametrize("order", ["random", "epoch"])
def test_a_step_is_a_function_of_itself(order: str) -> None:
    one, other = batches(order=order), batches(order=order)
    later = [other.chosen(step).tolist() for step in (5, 3)]
    assert [one.chosen(step).tolist() for step in range(6)][5::-2][:2] == later
    assert any(one.chosen(step).tolist() != batches(order=order, seed=2).chosen(step).tolist() for step in range(4))
    whole = one.micro_batch(3, 0, 4)
    for index in range(2):
        ids, labels = one.micro_batch(3, index, 2)
        assert ids.tolist() == whole[0][2 * index : 2 * index + 2].tolist()
        assert labels.tolist() == whole[1][2 * index : 2 * index + 2].tolist()
    assert one.targets == 4


def test_an_epoch_shows_each_once() -> None:
    dealt = batches(order="epoch", global_batch_size=3)
    seen = np.concatenate([dealt.chosen(step) for step in range(8)])
    for epoch in range(6):
        assert sorted(seen[4 * epoch : 4 * epoch + 4]) == [0, 1, 2, 3]
    assert len({tuple(seen[4 * epoch : 4 * epoch + 4]) for epoch in range(6)}) > 1


def test_the_fixed_ones_are_the_same_each_time_and_their_hash_sees_labels() -> None:
    chosen = FOUND.fixed(3)
    assert chosen.tolist() == FOUND.fixed(3).tolist() == sorted(set(chosen.tolist())) and len(FOUND.fixed(9)) == 4
    other = Documents(FOUND.tokens, [1, 1, 1, 1], names=FOUND.names, pad=PAD)
    assert FOUND.hash(chosen, 2) == FOUND.hash(chosen, 2) != other.hash(chosen, 2)
