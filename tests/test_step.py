"""A step's gradients do not depend on how the batch is cut, and a step that is not finite moves nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gptlab.batches import Batches
from gptlab.config import TrainConfig
from gptlab.model import GPT
from gptlab.optimizer import learning_rate
from gptlab.parallel.replicated import Replicated
from gptlab.parallel.strategy import Work
from gptlab.parallel.world import World
from gptlab.step import TrainStep

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
    work = Work(config, batches, ALONE, micro_batch_size, dtype)
    return model, TrainStep(Replicated(model, work), work)


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


def test_a_step_that_is_not_finite_moves_nothing() -> None:
    model, step = make()
    step(0)
    with torch.no_grad():
        model.get_parameter("h.0.mlp.c_fc.weight")[0, 0] = math.nan
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert step(1).skipped
    assert all(torch.equal(p, before[name]) or name == "h.0.mlp.c_fc.weight" for name, p in model.named_parameters())


def test_bfloat16_stays_near_float32() -> None:
    _, full = make()
    model, half = make(dtype="bfloat16")
    for s in range(10):
        assert half(s).loss == pytest.approx(full(s).loss, abs=0.02)
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_step_that_is_not_finite_does_not_move_the_schedule() -> None:
    model, step = make(CONFIG.replace(warmup_iters=100))
    rates = [step(0).lr]
    healthy = model.wte.weight.detach().clone()
    with torch.no_grad():
        model.wte.weight[0] = math.inf
    rates += [step(1).lr, step(2).lr]
    with torch.no_grad():
        model.wte.weight.copy_(healthy)
    rates += [step(3).lr, step(4).lr]
    wanted = [learning_rate(step.work.config, taken) for taken in (0, 1, 1, 1, 2)]
    assert rates == wanted and step.skipped == 2
    assert {int(state["step"]) for state in step.strategy.optimizer.state.values()} == {3}


# float16


def test_float16_stays_near_float32_and_its_gradients_are_unscaled() -> None:
    plain, full = make()
    model, half = make(dtype="float16")
    for s in range(10):
        a, b = half(s), full(s)
        assert a.loss == pytest.approx(b.loss, abs=0.01) and a.grad_norm == pytest.approx(b.grad_norm, rel=0.01)
        assert a.scale == 65536 and b.scale is None and not a.skipped
    for name, wanted in gradients(plain).items():
        assert (gradients(model)[name] - wanted).abs().max() <= 0.05 * wanted.abs().max(), name
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_float16_clips_after_unscaling() -> None:
    model, step = make(CONFIG.replace(grad_clip=0.01), dtype="float16")
    before = step(0).grad_norm
    after = math.sqrt(sum(float((g**2).sum()) for g in gradients(model).values()))
    assert before > 0.1 and after == pytest.approx(0.01, rel=1e-3)


def test_an_overflow_moves_neither_weights_nor_schedule_and_halves_the_scale() -> None:
    model, step = make(dtype="float16")
    assert step.scaler is not None
    step.scaler.scale = 2.0**40
    before = [p.clone() for p in model.parameters()]
    done = step(0)
    assert done.skipped and done.rescaled and math.isfinite(done.loss) and done.scale == 2.0**40
    assert (
        all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        and not step.strategy.optimizer.state
    )
    results = [step(s) for s in range(1, 40)]
    taken = [result for result in results if not result.skipped]
    assert all(result.rescaled for result in results if result.skipped)
    assert len(taken) > 5 and taken[0].lr == done.lr and taken[0].scale == step.scaler.scale < 2.0**30
    assert results[-1].loss < done.loss


def test_a_loss_that_is_not_finite_leaves_the_scale() -> None:
    model, step = make(dtype="float16")
    with torch.no_grad():
        model.wte.weight[0, 0] = math.nan
    done = step(0)
    assert step.scaler is not None and done.skipped and not done.rescaled and step.scaler.scale == 65536
