"""Compiled steps are the eager ones; compiling is kept apart from training; what cannot be compiled says so."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from gptlab import compiling
from gptlab.assembly import Setting, assemble
from gptlab.config import TrainConfig
from gptlab.parallel.world import World

CONFIG = TrainConfig(
    n_layer=1, n_head=2, n_embd=32, block_size=16, vocab_size=65, tokenizer="char", global_batch_size=4, grad_clip=0.5,
    warmup_iters=2,
)  # fmt: skip
ALONE = World(0, 1, torch.device("cpu"))
TOKENS = np.random.default_rng(0).integers(0, 65, 500).astype(np.uint16)


def test_the_compiled_step_equals_the_eager_one_and_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses to 1e-5 and weights to 1e-4 over six steps whose learning rate and clipping change. Graphs and guards are
    the compiler's; its last stage, C++, would take a minute here."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    eager = assemble(CONFIG, Setting("cpu", "float32", "sdpa", 2, 1), TOKENS, ALONE)
    parts = assemble(CONFIG, Setting("cpu", "float32", "sdpa", 2, 1, compile="step"), TOKENS, ALONE)
    before = compiling.seconds()
    for i in range(2):
        assert parts.step(i).loss == pytest.approx(eager.step(i).loss, abs=1e-5)
    assert compiling.seconds() > before
    spent, made = compiling.seconds(), compiling.graphs()
    for i in range(2, 6):
        assert parts.step(i).loss == pytest.approx(eager.step(i).loss, abs=1e-5)
    assert compiling.graphs() == made and compiling.seconds() == spent
    groups = parts.strategy.optimizer.param_groups
    assert all(type(group["lr"]) is float for group in groups)  # what a checkpoint can keep
    for (name, a), b in zip(parts.strategy.part.named_parameters(), eager.strategy.part.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-4), name


@pytest.mark.parametrize(
    ("asked", "kernels", "compiler", "chosen", "words"),
    [
        ("off", "torch", "g++", "off", "as asked"), ("model", "native", "g++", "off", "NOT AS ASKED"),
        ("step", "torch", "no-such-compiler", "off", "no-such-compiler was not found"),
        ("step", "torch", "sh", "step", "as asked"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_runs_eagerly_and_says_so(
    asked: str, kernels: str, compiler: str, chosen: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    found, reason = compiling.choose(asked, "cpu", kernels)
    assert found == chosen and words in reason
