"""A step's gradients do not depend on how the batch is cut, and a step that is not finite moves nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gptlab.batches import Batches
from gptlab.config import TrainConfig
from gptlab.model import GPT
from gptlab.parallel.replicas import Replicas
from gptlab.parallel.world import World
from gptlab.step import TrainStep, learning_rate, make_optimizer

CONFIG = TrainConfig(
    n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=65, tokenizer="char", global_batch_size=8, grad_clip=0.0
)
ALONE = World(0, 1, torch.device("cpu"))
TOKENS = np.random.default_rng(0).integers(0, 65, 500).astype(np.uint16)


def make(config: TrainConfig = CONFIG, micro_batch_size: int = 8, dtype: str = "float32") -> tuple[GPT, TrainStep]:
    model = GPT(config, seed=1)
    batches = Batches(
        TOKENS, block_size=config.block_size, global_batch_size=config.global_batch_size, order="random", seed=1
    )
    optimizer = make_optimizer(model, config)
    step = TrainStep(
        model, optimizer, Replicas(model, ALONE), batches, config, ALONE, micro_batch_size=micro_batch_size, dtype=dtype
    )
    return model, step


def gradients(model: GPT) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro", [1, 2, 3, 4])
def test_accumulation_gives_the_gradients_of_the_whole_batch(micro: int) -> None:
    whole, step = make()
    loss = step(0).loss
    cut, cut_step = make(micro_batch_size=micro)
    assert cut_step(0).loss == pytest.approx(loss, rel=1e-6)
    for name, wanted in gradients(whole).items():
        assert (gradients(cut)[name] - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name


def test_every_parameter_has_a_gradient() -> None:
    model, step = make()
    step(0)
    assert set(gradients(model)) == {name for name, _ in model.named_parameters()}


def test_clipping_bounds_the_norm() -> None:
    model, step = make(CONFIG.replace(grad_clip=0.01))
    before = step(0).grad_norm
    after = math.sqrt(sum(float((g**2).sum()) for g in gradients(model).values()))
    assert before > 0.1 and after == pytest.approx(0.01, rel=1e-3)


def test_weight_decay_falls_on_matrices_alone() -> None:
    model, _ = make()
    decayed, kept = make_optimizer(model, CONFIG).param_groups
    assert {p.dim() for p in decayed["params"]} == {2} and {p.dim() for p in kept["params"]} == {1}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (CONFIG.weight_decay, 0.0)
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))


def test_a_step_that_is_not_finite_moves_nothing() -> None:
    model, step = make()
    step(0)
    with torch.no_grad():
        model.get_parameter("h.0.mlp.c_fc.weight")[0, 0] = math.nan
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert step(1).skipped
    assert all(torch.equal(p, before[name]) or name == "h.0.mlp.c_fc.weight" for name, p in model.named_parameters())


def test_the_fused_optimizer_equals_the_plain_one() -> None:
    fast, step = make()
    plain, plain_step = make()
    plain_step.optimizer = make_optimizer(plain, CONFIG, fused=False)
    for s in range(5):
        step(s)
        plain_step(s)
    for (name, a), b in zip(fast.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5), name


def test_bfloat16_stays_near_float32() -> None:
    _, full = make()
    model, half = make(dtype="bfloat16")
    for s in range(10):
        assert half(s).loss == pytest.approx(full(s).loss, abs=0.02)
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize(
    ("changes", "step", "wanted"),
    [
        ({}, 0, 1e-3 / 101), ({}, 100, 1e-3), ({}, 1050, 5.5e-4), ({}, 2000, 1e-4), ({}, 9999, 1e-4),
        ({"min_lr": 0.0, "lr_decay_iters": 0}, 500, 0.0), ({"warmup_iters": 5000}, 1999, 1e-3 * 2000 / 5001),
        ({"warmup_iters": 0, "lr_decay_iters": 0}, 0, 1e-4),
    ],
)  # fmt: skip
def test_the_schedule(changes: dict[str, float], step: int, wanted: float) -> None:
    assert learning_rate(TrainConfig(**changes), step) == pytest.approx(wanted, abs=1e-9)  # type: ignore[arg-type]
