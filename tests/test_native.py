"""The kernel of our own gives the model's loss and gradients, whatever the shape and the number of threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gptlab import kernels, native
from gptlab.batches import Batches
from gptlab.config import TrainConfig
from gptlab.footprint import native_bytes
from gptlab.model import GPT
from gptlab.native import build, rates
from gptlab.native.engine import Engine
from gptlab.parallel.replicas import Replicas
from gptlab.parallel.replicated import Replicated
from gptlab.parallel.strategy import Work
from gptlab.parallel.world import World
from gptlab.step import TrainStep

ALONE = World(0, 1, torch.device("cpu"))
CONFIG = TrainConfig(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=257, global_batch_size=4)
WHY_NOT = {dtype: kernels.refusal(CONFIG, "cpu", dtype) for dtype in ("bfloat16", "float32")}
PRECISIONS = [
    pytest.param(dtype, marks=pytest.mark.skipif(why is not None, reason=str(why))) for dtype, why in WHY_NOT.items()
]
each_precision = pytest.mark.parametrize("dtype", PRECISIONS)
needs_tiles = pytest.mark.skipif(WHY_NOT["bfloat16"] is not None, reason=str(WHY_NOT["bfloat16"]))
needs_lanes = pytest.mark.skipif(WHY_NOT["float32"] is not None, reason=str(WHY_NOT["float32"]))


def make(config: TrainConfig, batch: int, dtype: str, threads: int = 2) -> tuple[GPT, Engine]:
    """A model whose biases and gains are not those of the start, and its engine."""
    model = GPT(config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.empty(p.shape).normal_(0.0, 0.03, generator=generator))
    Replicas(model, ALONE, keep=True)
    return model, Engine(model, batch=batch, threads=threads, dtype=dtype)


def batch_of(config: TrainConfig, batch: int, time: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, config.vocab_size, (batch, time + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[0, : time // 3] = -100  # left out of the loss
    return ids[:, :-1], targets


def gradients(model: GPT) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


SHAPES = [  # layers, heads, width, context, vocabulary, bias; then B and T
    ((1, 1, 32, 32, 65, True), 1, 32),
    ((2, 2, 64, 64, 257, True), 3, 64),
    ((2, 3, 96, 192, 1000, True), 2, 160),  # T short of the context
    ((1, 2, 128, 256, 600, False), 3, 256),
    ((1, 2, 64, 32, 300, True), 70, 32),  # rows that do not fill a chunk
    ((1, 1, 32, 64, 65, True), 67, 64),  # more than one stretch of logits
]
SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")


@needs_tiles
@pytest.mark.parametrize(("shape", "batch", "time"), SHAPES)
def test_loss_and_gradients_are_nearer_to_float32_than_autocast(shape: tuple[int, ...], batch: int, time: int) -> None:
    """The kernel rounds where autocast rounds, or less: each gradient's distance from float32's is at most autocast's
    and a quarter; the loss's at most 1e-3."""
    config = TrainConfig(global_batch_size=batch, **dict(zip(SHAPE, shape, strict=True)))  # type: ignore[arg-type]
    model, engine = make(config, batch, "bfloat16")
    ids, targets = batch_of(config, batch, time)
    count = int((targets >= 0).sum())
    (model(ids, targets, reduction="sum") / count).backward()
    exact = gradients(model)
    loss = float(model(ids, targets).detach())
    Replicas(model, ALONE, keep=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(ids, targets, reduction="sum") / count
    rounded.backward()
    autocast = gradients(model)
    Replicas(model, ALONE, keep=True)
    engine.begin()
    assert engine(ids, targets, 1 / count) / count == pytest.approx(loss, abs=1e-3)
    for name, found in gradients(model).items():
        assert error(found, exact[name]) <= 1.25 * error(autocast[name], exact[name]) + 1e-5, name


@needs_lanes
@pytest.mark.parametrize(("shape", "batch", "time"), SHAPES)
def test_in_float32_loss_and_gradients_are_the_plain_twins(shape: tuple[int, ...], batch: int, time: int) -> None:
    """Largest difference over largest value: 1e-5 of each gradient; 1e-6 of the loss."""
    config = TrainConfig(global_batch_size=batch, **dict(zip(SHAPE, shape, strict=True)))  # type: ignore[arg-type]
    model, engine = make(config, batch, "float32")
    ids, targets = batch_of(config, batch, time)
    count = int((targets >= 0).sum())
    plain = GPT(config, attention="math")
    plain.load_state_dict(model.state_dict())
    loss = plain(ids, targets, reduction="sum") / count
    loss.backward()
    engine.begin()
    assert engine(ids, targets, 1 / count) / count == pytest.approx(loss.item(), rel=1e-6)
    for name, p in plain.named_parameters():
        found = gradients(model)[name]
        assert p.grad is not None and (found - p.grad).abs().max() <= 1e-5 * p.grad.abs().max(), name


@each_precision
def test_the_number_of_threads_changes_no_bit(dtype: str) -> None:
    ids, targets = batch_of(CONFIG, 4, 64)
    found = []
    for threads in (1, 2, 3):
        model, engine = make(CONFIG, 4, dtype, threads)
        engine.begin()
        found.append((engine(ids, targets, 0.01), gradients(model)))
    for loss, grads in found[1:]:
        assert loss == found[0][0]
        assert all(torch.equal(grads[name], found[0][1][name]) for name in grads)


@each_precision
def test_gradients_add_up_over_micro_batches(dtype: str) -> None:
    ids, targets = batch_of(CONFIG, 4, 64)
    model, engine = make(CONFIG, 4, dtype)
    engine.begin()
    whole_loss = engine(ids, targets, 0.01)
    whole = gradients(model)
    Replicas(model, ALONE, keep=True)
    engine.begin()
    parts = [engine(ids[i : i + n], targets[i : i + n], 0.01) for i, n in ((0, 1), (1, 2), (3, 1))]
    assert sum(parts) == pytest.approx(whole_loss, rel=1e-6)
    for name, found in gradients(model).items():
        assert (found - whole[name]).abs().max() <= 1e-5 * whole[name].abs().max(), name


@needs_lanes
def test_an_id_that_is_not_in_the_vocabulary_is_refused() -> None:
    _, engine = make(CONFIG, 1, "float32")
    engine.begin()
    ids, targets = batch_of(CONFIG, 1, 64)
    ids = ids.clone()
    ids[0, 5] = 257
    with pytest.raises(IndexError, match="vocabulary of 257"):
        engine(ids, targets, 1.0)


@pytest.mark.parametrize(
    ("changes", "device", "dtype", "words"),
    [
        ({}, "cuda", "bfloat16", "CPUs"), ({}, "cpu", "float16", "bfloat16 and float32"),
        ({"dropout": 0.1}, "cpu", "bfloat16", "dropout"),
        ({"rope": True}, "cpu", "bfloat16", "rope"), ({"block_size": 48}, "cpu", "bfloat16", "block_size is 48"),
        ({"n_head": 4}, "cpu", "bfloat16", "n_embd / n_head is 16"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_said(changes: dict[str, float], device: str, dtype: str, words: str) -> None:
    assert words in str(kernels.refusal(CONFIG.replace(**changes), device, dtype))
    chosen, reason = native.choose("auto", CONFIG.replace(**changes), device, dtype, "sdpa")
    assert chosen == "torch" and words in reason


@needs_tiles
def test_a_compiler_that_is_missing_or_fails_leaves_torch_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build.library.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native.choose("native", CONFIG, "cpu", "bfloat16", "sdpa")[0] == "torch"
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho out of ideas >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    chosen, reason = native.choose("native", CONFIG, "cpu", "bfloat16", "sdpa")
    assert chosen == "torch" and "NOT AS ASKED" in reason and "out of ideas" in reason
    build.library.cache_clear()


@each_precision
@pytest.mark.parametrize(("shape", "batch"), [((2, 3, 96, 64, 1000, True), 5), ((4, 4, 128, 256, 50257, False), 16)])
def test_what_it_holds_is_predicted(dtype: str, shape: tuple[int, ...], batch: int) -> None:
    config = TrainConfig(global_batch_size=batch, **dict(zip(SHAPE, shape, strict=True)))  # type: ignore[arg-type]
    _, engine = make(config, batch, dtype)
    scratch = 2 * 2**20  # of its threads
    assert engine.held_bytes - scratch < native_bytes(config, batch, dtype) <= engine.held_bytes


@needs_lanes
def test_rates_are_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.rates_file().unlink()
    found = rates.measured("float32", 1)
    assert 1e9 < found.product_flops < 1e14 and found.attention_flops > 1e8 and found.numbers_per_s > 1e5
    monkeypatch.setattr(rates, "measure", None)
    assert rates.measured("float32", 1) == found == kernels.cached_rates("float32", 1)
    kernels.rates_file().write_text('{"spoilt": 1}')
    assert kernels.cached_rates("float32", 1) is None


def test_compiling_ahead_leaves_nothing_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    build.compile_ahead()
    monkeypatch.setattr("tempfile.TemporaryDirectory", None)  # a compilation would need one
    build.compile_ahead()


@needs_tiles
def test_the_plain_twin_of_attention_is_not_replaced() -> None:
    assert native.choose("auto", CONFIG, "cpu", "bfloat16", "math")[0] == "torch"
    assert native.choose("auto", CONFIG, "cpu", "bfloat16", "sdpa")[0] == "native"


@each_precision
def test_training_follows_the_plain_twin(dtype: str) -> None:
    """Fifty steps stay within 0.02 nats of float32's, written out and eager; in float32 within 1e-4."""
    config = CONFIG.replace(learning_rate=1e-3, warmup_iters=5, max_iters=50)
    tokens = np.random.default_rng(0).integers(0, 40, 4000).cumsum().astype(np.uint16) % 257
    losses = []
    for fast in (False, True):
        model = GPT(config, seed=1, attention="sdpa" if fast else "math")
        batches = Batches(tokens, block_size=64, global_batch_size=4, order="random", seed=1)
        work = Work(config, batches, ALONE, 3, dtype if fast else "float32")
        engine = Engine(model, batch=3, threads=2, dtype=dtype) if fast else None
        step = TrainStep(Replicated(model, work, engine=engine, fused=fast), work)
        losses.append([step(i).loss for i in range(50)])
    assert losses[0][0] - losses[0][-1] > 0.3
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) <= (0.02 if dtype == "bfloat16" else 1e-4)
