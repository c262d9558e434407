"""The cache: any way of filling it, and rows of any lengths, give what the whole gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gptlab.config import GPTConfig
from gptlab.kvcache import KVCache
from gptlab.model import GPT

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=65)
CPU = torch.device("cpu")


def model(attention: str = "sdpa") -> GPT:
    """In float64, where sums in another order differ by 1e-15 and not by enough to matter."""
    made = GPT(SMALL, attention=attention)  # type: ignore[arg-type]
    for p in made.parameters():
        p.data *= 4
    return made.double().eval().requires_grad_(False)


def ids(rows: int = 3, length: int = 16) -> Tensor:
    return torch.randint(0, 65, (rows, length), generator=torch.Generator().manual_seed(3))


def cache(rows: int, padding: Tensor | None = None, static: bool = False, length: int = 16) -> KVCache:
    return KVCache(SMALL, rows, length, CPU, torch.float64, padding=padding, static=static)


@pytest.mark.parametrize("attention", ["sdpa", "math"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("parts", [[16], [5, *[1] * 11], [1, 3, 12], [4, 4, 4, 4]])
def test_any_parts_equal_the_whole(attention: str, static: bool, parts: list[int]) -> None:
    gpt, text, kept = model(attention), ids(), cache(3, static=static)
    pieces = [gpt.hidden(part, cache=kept) for part in text.split(parts, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), gpt.hidden(text))


@pytest.mark.parametrize("attention", ["sdpa", "math"])
@pytest.mark.parametrize("static", [False, True])
def test_padded_rows_compute_what_they_compute_alone(attention: str, static: bool) -> None:
    gpt, text, lengths = model(attention), ids(), [6, 1, 4]
    padding = torch.tensor([6 - n for n in lengths])
    kept = cache(3, padding, static)
    prompts = torch.zeros(3, 6, dtype=torch.long)
    for row, n in enumerate(lengths):
        prompts[row, 6 - n :] = text[row, :n]
    rows = [gpt.hidden(text[row : row + 1, : n + 4])[0] for row, n in enumerate(lengths)]
    first = gpt.hidden(prompts, cache=kept)
    assert first.isfinite().all()
    for row, n in enumerate(lengths):
        torch.testing.assert_close(first[row, 6 - n :], rows[row][:n])
    for t, width in ((0, 1), (1, 2), (3, 1)):
        new = torch.stack([text[row, n + t : n + t + width] for row, n in enumerate(lengths)])
        out = gpt.hidden(new, cache=kept)
        for row, n in enumerate(lengths):
            torch.testing.assert_close(out[row], rows[row][n + t : n + t + width])


def test_nothing_is_copied_but_the_new_tokens() -> None:
    kept, k = cache(3), torch.ones(3, 2, 5, 16, dtype=torch.float64)
    keys, values = kept.extend(1, k, 2 * k)
    assert keys.data_ptr() == kept.buffer[1, 0].data_ptr() and values.data_ptr() == kept.buffer[1, 1].data_ptr()
    assert keys.shape == (3, 2, 5, 16) and (keys == 1).all() and (values == 2).all()


def test_no_mask_is_made_where_none_is_needed() -> None:
    kept = cache(2)
    assert kept.mask(5) is None
    kept.advance(5)
    assert kept.mask(1) is None and kept.mask(3) is not None


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_rows_go_on_when_one_is_dropped(gone: int) -> None:
    gpt, text = model(), ids()
    padding = torch.tensor([0, 2, 1])
    kept = cache(3, padding)
    prompts = torch.stack([torch.cat([text[r, :p] * 0, text[r, : 6 - p]]) for r, p in enumerate(padding.tolist())])
    gpt.hidden(prompts, cache=kept)
    kept.drop(gone)
    order = [0, 1, 2]
    order[gone] = order[-1]
    order.pop()
    new = torch.stack([text[row, 6 - padding[row] : 7 - padding[row]] for row in order])
    out = gpt.hidden(new, cache=kept)
    for place, row in enumerate(order):
        alone = gpt.hidden(text[row : row + 1, : 7 - padding[row]])
        torch.testing.assert_close(out[place, 0], alone[0, -1])
    kept.drop(0)
    assert kept.extend(0, torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16))[0].shape == (1, 2, 8, 16)


def test_a_document_before_is_not_seen_and_places_stay() -> None:
    gpt, text = model(), ids(2)
    other = text.clone()
    other[0, :3] = (other[0, :3] + 1) % 65
    outs = []
    for filled in (text, other):
        kept = cache(2, length=17)
        kept.hide(0, 3)
        outs.append(torch.cat([gpt.hidden(part, cache=kept) for part in filled.split([7, 9], dim=1)], 1))
        assert kept.positions(1).tolist() == [16]
    torch.testing.assert_close(outs[0][0, 3:], outs[1][0, 3:])
    torch.testing.assert_close(outs[0][1], gpt.hidden(text)[1])
    assert not torch.allclose(outs[0][0, 3:], gpt.hidden(text)[0, 3:])


def test_a_static_cache_is_compiled_once() -> None:
    from torch._dynamo.testing import CompileCounter

    gpt, text, kept, counter = model(), ids(), cache(3, static=True), CompileCounter()
    step = torch.compile(lambda new: gpt.hidden(new, cache=kept), backend=counter, fullgraph=True)
    with torch.inference_mode():
        whole = gpt.hidden(text)
        for t in range(16):
            torch.testing.assert_close(step(text[:, t : t + 1])[:, 0], whole[:, t])
    assert counter.frame_count == 1
