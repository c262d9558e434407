"""Each parameter has one optimizer, fast steps equal plain ones, and the learning rate is what its schedule says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon

from gptlab.config import TrainConfig
from gptlab.model import GPT
from gptlab.optimizer import MuonWithAdamW, check_coverage, clip_divisor, learning_rate, make_optimizer, squares, update

CONFIG = TrainConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=65, tokenizer="char")
MUON = CONFIG.replace(optimizer="muon")
IDS = torch.arange(32).view(2, 16)


def stepped(optimizer: Any, model: GPT, divisor: float, steps: int = 4) -> list[Tensor]:
    """Parameters after steps with given gradients: those of a model whose key biases have none would be its noise."""
    noise = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=noise)
        update(optimizer, lr=1e-2, divisor=divisor)
    return [p.detach() for p in model.parameters()]


def test_weight_decay_falls_on_matrices_alone() -> None:
    model = GPT(CONFIG, seed=1)
    decayed, kept = make_optimizer(model, CONFIG).param_groups
    assert {p.dim() for p in decayed["params"]} == {2} and {p.dim() for p in kept["params"]} == {1}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (CONFIG.weight_decay, 0.0)
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))


def test_muon_has_the_matrices_of_the_blocks() -> None:
    model = GPT(MUON, seed=1)
    optimizer = make_optimizer(model, MUON)
    assert isinstance(optimizer, MuonWithAdamW)
    by_id = {id(p): name for name, p in model.named_parameters()}
    muon, decayed, kept = ([by_id[id(p)] for p in group["params"]] for group in optimizer.param_groups)
    assert len(muon) == 8 and all(name.startswith("h.") and name.endswith("weight") for name in muon)
    assert decayed == ["wte.weight", "wpe.weight"]
    assert sorted([*muon, *decayed, *kept]) == sorted(by_id.values())


@pytest.mark.parametrize("count", [0, 2])
def test_a_parameter_in_no_group_or_in_two_is_noticed(count: int) -> None:
    model = GPT(MUON, seed=1)
    optimizer = make_optimizer(model, MUON)
    group = optimizer.param_groups[1]["params"]
    group[:] = [*group[1:], *group[:1] * count]
    with pytest.raises(AssertionError, match=r"wte\.weight"):
        check_coverage(dict(model.named_parameters()), optimizer)


def test_a_parameter_that_is_not_trained_is_in_no_group() -> None:
    model = GPT(CONFIG, seed=1)
    model.get_parameter("wpe.weight").requires_grad_(False)
    count = sum(len(group["params"]) for group in make_optimizer(model, CONFIG).param_groups)
    assert count == len(list(model.parameters())) - 1


@pytest.mark.parametrize("config", [CONFIG, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("divisor", [1.0, 7.3])
def test_the_fused_step_equals_the_plain_one(config: TrainConfig, divisor: float) -> None:
    fast, plain = GPT(config, seed=1), GPT(config, seed=1)
    quick = stepped(make_optimizer(fast, config), fast, divisor)
    slow = stepped(make_optimizer(plain, config, fused=False), plain, divisor)
    for a, b in zip(quick, slow, strict=True):
        assert (a - b).abs().max() <= 1e-6


def test_fused_is_what_is_asked_for() -> None:
    model = GPT(MUON, seed=1)
    for config in (CONFIG, MUON):
        for fused in (True, False):
            groups = make_optimizer(model, config, fused=fused).param_groups
            assert {group["fused"] for group in groups if "fused" in group} == {fused}


@pytest.mark.parametrize("config", [CONFIG, MUON], ids=["adamw", "muon"])
def test_a_divided_step_is_that_of_divided_gradients(config: TrainConfig) -> None:
    one, other = GPT(config, seed=1), GPT(config, seed=1)
    optimizer, wanted = make_optimizer(one, config), make_optimizer(other, config)
    for model in (one, other):
        model(IDS, IDS + 1).backward()
    for p in other.parameters():
        p.grad = p.grad / 4 if p.grad is not None else None
    update(optimizer, lr=1e-2, divisor=4.0)
    update(wanted, lr=1e-2)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b) and a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def orthogonal(G: Tensor) -> Tensor:
    """Five Newton-Schulz steps towards U V^T (Jordan et al. 2024), in float32 and as one reads them."""
    X = G.T if G.size(0) > G.size(1) else G
    X = X / X.norm()
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X.T if G.size(0) > G.size(1) else X


def test_muon_equals_what_its_paper_says() -> None:
    weights = [
        nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(3))) for shape in ((24, 8), (8, 8))
    ]
    kept = [p.detach().clone() for p in weights]
    idle = nn.Parameter(torch.zeros(3))
    optimizer = MuonWithAdamW(Muon(weights, adjust_lr_fn="match_rms_adamw"), AdamW([idle], fused=True))
    momentum = [torch.zeros_like(p) for p in kept]
    for step in range(3):
        for p, w, m in zip(weights, kept, momentum, strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 + step))
            m.copy_(0.95 * m + 0.05 * p.grad)
            w.mul_(1 - 0.02 * 0.1)
            w.sub_(0.02 * 0.2 * math.sqrt(max(w.shape)) * orthogonal(0.05 * p.grad + 0.95 * m))
        update(optimizer, lr=0.02)
    for p, w in zip(weights, kept, strict=True):
        moved = 3 * 0.02 * 0.2
        assert (p - w).norm() < 0.03 * moved * math.sqrt(w.numel())  # torch iterates in bfloat16


def test_clipping_is_torchs() -> None:
    for norm, limit in ((5.0, 1.0), (0.5, 1.0), (5.0, 0.0)):
        p = nn.Parameter(torch.zeros(4))
        p.grad = torch.full((4,), norm / 2)
        if limit:
            nn.utils.clip_grad_norm_([p], limit)
        assert norm / 2 / clip_divisor(norm, limit) == pytest.approx(p.grad[0].item(), rel=1e-6)


WSD: dict[str, Any] = {"schedule": "wsd"}


@pytest.mark.parametrize(
    ("changes", "step", "wanted"),
    [
        ({}, 0, 1e-3 / 101), ({}, 100, 1e-3), ({}, 1050, 5.5e-4), ({}, 2000, 1e-4), ({}, 9999, 1e-4),
        ({"min_lr": 0.0, "lr_decay_iters": 0}, 500, 0.0), ({"warmup_iters": 5000}, 1999, 1e-3 * 2000 / 5001),
        ({"warmup_iters": 0, "lr_decay_iters": 0}, 0, 1e-4),
        (WSD, 0, 1e-3 / 101), (WSD, 100, 1e-3), (WSD, 1600, 1e-3), (WSD, 1700, 5.5e-4), (WSD, 2000, 1e-4),
        (WSD | {"cooldown_iters": 0}, 1999, 1e-3), (WSD | {"cooldown_iters": 9999}, 100, 1e-3),
        (WSD | {"warmup_iters": 5000}, 1999, 1e-3 * 2000 / 5001), (WSD | {"warmup_iters": 1990}, 1990, 1e-3),
        (WSD | {"warmup_iters": 0, "lr_decay_iters": 0}, 0, 1e-4),
        (WSD | {"warmup_iters": 0, "lr_decay_iters": 500, "min_lr": 0.0}, 425, 1e-3 * (1 - 0.5)),
    ],
)  # fmt: skip
def test_the_schedule(changes: dict[str, Any], step: int, wanted: float) -> None:
    assert learning_rate(TrainConfig(**changes), step) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 7, 50])
def test_every_step_of_a_run_moves(schedule: str, warmup: int) -> None:
    config = TrainConfig(schedule=schedule, warmup_iters=warmup, max_iters=20, min_lr=0.0)  # type: ignore[arg-type]
    rates = [learning_rate(config, step) for step in range(20)]
    assert all(0 < rate <= config.learning_rate for rate in rates)
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)


def test_the_norm_of_a_large_gradient_is_that_of_its_elements() -> None:
    """Held in one tensor or in several: torch's own is off by 1e-4 where ten million lie in one."""
    whole = torch.randn(10_000_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    golden = float(whole.double().square().sum())
    for held in ([whole], whole.split(1_234_567), [whole.view(2500, 4000).T]):
        assert squares(held) == pytest.approx(golden, rel=1e-6)
    assert squares([]) == 0 and squares([torch.tensor([1.0, torch.inf])]) == torch.inf
