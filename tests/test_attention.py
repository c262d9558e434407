"""Attention: every kernel against the one that is written out, what masks hide, and what is chosen and refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout
from torch.utils import _triton

from gptlab.attention import Attention, attend, attend_math, check, choose, documents, make_mask, nearest, visible
from gptlab.config import ConfigError, GPTConfig
from gptlab.kvcache import KVCache

CPU = torch.device("cpu")
CUDA = torch.cuda.is_available()
SHAPE = GPTConfig(n_layer=1, n_head=4, n_embd=64, block_size=32, vocab_size=10)


def config(**changes: Any) -> GPTConfig:
    return GPTConfig.from_dict(SHAPE.to_dict() | changes)


def qkv(groups: int = 4, length: int = 32, rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, n, length, 16, generator=generator) for n in (4, groups, groups))
    return q, k, v


def text(rows: int = 2, length: int = 32) -> Tensor:
    """Ids with the last one, end-of-text, at places that differ from row to row."""
    ids = torch.randint(0, 9, (rows, length), generator=torch.Generator().manual_seed(1))
    for row in range(rows):
        ids[row, 5 + 3 * row :: 11] = 9
    return ids


def by_hand(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, window: int, split: bool) -> Tensor:
    """One query at a time, over the keys that it may see."""
    out = torch.zeros_like(q)
    group = q.size(1) // k.size(1)
    for b in range(q.size(0)):
        for i in range(q.size(2)):
            first = max(0, i - window + 1) if window else 0
            ends = [j for j in range(i + 1) if ids[b, j] == 9]
            if split and ends:
                first = max(first, ends[-1])
            for h in range(q.size(1)):
                keys = k[b, h // group, first : i + 1]
                weights = torch.softmax(keys @ q[b, h, i] / math.sqrt(q.size(3)), 0)
                out[b, h, i] = weights @ v[b, h // group, first : i + 1]
    return out


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("window", [0, 1, 7, 32, 100])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_every_kernel_sees_what_a_loop_by_hand_sees(groups: int, window: int, split: bool) -> None:
    shape = config(n_kv_head=groups, sliding_window=window, mask_documents=split)
    q, k, v = qkv(groups)
    ids = text()
    wanted = by_hand(q, k, v, ids, window, split)
    kernels: tuple[Attention, ...] = ("math", "sdpa", "flash", "flex")
    for kernel in kernels:
        mask = make_mask(kernel, shape, ids, torch.float32)
        assert (mask is None) == (window in (0, 32, 100) and not split)
        assert torch.allclose(attend(kernel, q, k, v, mask, window=window), wanted, atol=1e-5), kernel


@pytest.mark.parametrize("kernel", ["sdpa", "flash"])
@pytest.mark.parametrize(("window", "split", "groups"), [(0, False, 4), (5, False, 2), (0, True, 1), (5, True, 4)])
def test_gradients_equal_the_plain_twins(kernel: Attention, window: int, split: bool, groups: int) -> None:
    shape = config(n_kv_head=groups, sliding_window=window, mask_documents=split)
    gradients = []
    for name in ("math", kernel):
        inputs = [t.requires_grad_() for t in qkv(groups)]
        y = attend(name, *inputs, make_mask(name, shape, text(), torch.float32))  # type: ignore[call-arg, arg-type]
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        gradients.append([t.grad for t in inputs])
    for plain, fast in zip(*gradients, strict=True):
        assert plain is not None and fast is not None
        assert (fast - plain).abs().max() <= 1e-5 * plain.abs().max()


@pytest.mark.skipif(not CUDA, reason="these kernels need a GPU")
@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn", "flex"])
def test_kernels_of_gpus_equal_the_plain_twin(kernel: Attention) -> None:
    for window, split in ((0, False), (5, True)):
        shape = config(sliding_window=window, mask_documents=split)
        if kernel == "flash" and split:
            with pytest.raises(ConfigError, match="flash"):
                check(kernel, shape, torch.device("cuda"), torch.bfloat16)
            continue
        check(kernel, shape, torch.device("cuda"), torch.bfloat16)
        q, k, v = (t.cuda().bfloat16() for t in qkv())
        mask = make_mask(kernel, shape, text().cuda(), torch.bfloat16)
        wanted = attend_math(*qkv(), make_mask("math", shape, text(), torch.float32))
        assert torch.allclose(attend(kernel, q, k, v, mask).float().cpu(), wanted, atol=0.03)


@pytest.mark.parametrize("kernel", ["sdpa", "math", "flash", "flex"])
def test_the_last_query_sees_every_key(kernel: Attention) -> None:
    q, k, v = qkv()
    whole = attend_math(q, k, v)
    for new in (1, 3):
        assert torch.allclose(attend(kernel, q[:, :, -new:], k, v), whole[:, :, -new:], atol=1e-6)


def test_large_scores_do_not_leak_through_the_mask() -> None:
    q = k = torch.full((1, 1, 4, 8), 1e4)
    v = torch.arange(4.0).view(1, 1, 4, 1).expand(1, 1, 4, 8)
    assert torch.allclose(attend_math(q, k, v)[0, 0, :, 0], torch.tensor([0.0, 0.5, 1.0, 1.5]))


def test_end_of_text_begins_a_document() -> None:
    assert documents(torch.tensor([[1, 9, 2, 9, 9]]), 9).tolist() == [[0, 1, 1, 2, 3]]
    seen = visible(3, CPU, docs=torch.tensor([[0, 1, 1]]))
    assert seen[0, 0].tolist() == [[True, False, False], [False, True, False], [False, True, True]]


def test_a_window_over_a_cache_counts_from_the_querys_own_key() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0]], dtype=torch.bool)  # padding left, room right
    assert nearest(mask, 2).int().tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0]]


def test_masks_have_the_type_of_queries_under_autocast() -> None:
    shape = config(sliding_window=4)
    with torch.autocast("cpu", torch.bfloat16):
        mask = make_mask("sdpa", shape, text(), torch.float32)
    assert isinstance(mask, Tensor) and mask.dtype == torch.bfloat16
    assert mask.shape == (32, 32)  # one for all rows: no documents


def test_a_cache_says_what_its_tokens_see() -> None:
    cache = KVCache(SHAPE, 2, 32, CPU, torch.float32)
    assert make_mask("sdpa", SHAPE, text(2, 4), torch.float32, cache) is None  # empty: plain causality
    cache.advance(4)
    assert make_mask("sdpa", SHAPE, text(2, 1), torch.float32, cache) is None  # one token sees all
    mask = make_mask("math", SHAPE, text(2, 3), torch.float32, cache)
    assert isinstance(mask, Tensor) and mask[0, 0].sum(-1).tolist() == [5, 6, 7]


def test_dropout_drops_weights() -> None:
    q, k, v = qkv()
    torch.manual_seed(0)
    dropped = attend("math", q, k, v, dropout=0.5)
    torch.manual_seed(0)
    scores = (q @ k.transpose(2, 3) / 4).masked_fill(torch.ones(32, 32).triu(1).bool(), -math.inf)
    assert torch.allclose(dropped, dropout(scores.softmax(-1), 0.5) @ v, atol=1e-6)


def test_auto_takes_flex_where_a_mask_hides_much_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    masked = config(mask_documents=True)
    assert choose("auto", SHAPE, "cuda")[0] == "sdpa"
    assert choose("auto", masked, "cpu")[0] == "sdpa"
    monkeypatch.setattr(_triton, "has_triton", lambda: True)
    assert choose("auto", masked, "cuda")[0] == "flex"
    assert choose("auto", config(sliding_window=8), "cuda")[0] == "flex"
    assert choose("auto", config(sliding_window=32), "cuda")[0] == "sdpa"  # hides nothing
    assert choose("auto", config(mask_documents=True, dropout=0.1), "cuda")[0] == "sdpa"
    monkeypatch.setattr(_triton, "has_triton", lambda: False)
    name, reason = choose("auto", masked, "cuda")
    assert name == "sdpa" and "Triton" in reason
    assert choose("math", SHAPE, "cuda") == ("math", "as asked")


@pytest.mark.parametrize(
    ("kernel", "changes"), [("efficient", {}), ("cudnn", {}), ("flex", {}), ("flash", {"dropout": 0.1})]
)
def test_a_kernel_that_is_not_there_is_refused(kernel: Attention, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"attention '{kernel}' has no kernel.* on cpu in float32 .it needs"):
        check(kernel, config(**changes), CPU, torch.float32)


def test_kernels_that_are_there_pass() -> None:
    for kernel in ("sdpa", "math", "flash"):
        check(kernel, config(sliding_window=8, mask_documents=True, n_kv_head=2), CPU, torch.float32)
