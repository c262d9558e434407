"""Which runs to make: one dial for a model's whole recipe, and runs of equal compute.

    >>> from gptlab.dial import dial, isoflops
    >>> turned = dial(4)
    >>> turned.config.n_embd, turned.sources["n_embd"]
    >>> gptlab.sweep(base, isoflops(base, [1e11, 4e11], [{"n_layer": 2, "n_embd": 64}, ...]), name="isoflop")

`dial(depth)` sets width, heads, batch, learning rate and tokens from the depth alone, each by a published rule, or
a choice of ours, that stands beside it. Left out on purpose: running them (`sweeps.py`), fits (`scaling/`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gptlab.config import ConfigError, TrainConfig
from gptlab.fields import check_range

ASPECT = 64
"""Features a block of depth: nanochat's (scripts/base_train.py). Little hangs on it: Kaplan et al. (2020, figure 5)
vary width over depth 40-fold and find the loss within a few per cent."""
HEAD_DIM = 64
"""Features of a head: GPT-2's at every size (768 over 12 heads to 1600 over 25), and GPT-3's up to Medium; larger ones
have 80 to 128 (Brown et al. 2020, table 2.1)."""
TOKENS_PER_PARAMETER = 20.0
"""Tokens for each parameter that spend compute best: Hoffmann et al. (2022), table 3 (8.0 G for 0.4 G parameters,
205.1 G for 10 G)."""
LEAST_STEPS = 10
"""Fewer optimizer steps than this are no training, and such a run says nothing about scaling: a choice of ours."""
MOST_WARMUP = 2000
"""Steps of warm-up, at most: nanoGPT's for GPT-2 (train.py)."""
WARMUP_SHARE = 20
"""Shorter runs warm up for one of so many steps: a choice of ours."""


@dataclass(frozen=True)
class Dialled:
    """A config that follows from one number, and where each of its values comes from."""

    config: TrainConfig
    sources: dict[str, str]
    """By field the rule that set it."""


def learning_rate(n_embd: int) -> float:
    """Highest learning rate of AdamW by width: GPT-3 Small's 6e-4 at 768 (Brown et al. 2020, table 2.1), falling with
    the root of the width (Vaswani et al. 2017, section 5.3; nanochat does so for its AdamW groups, from 768 too)."""
    return float(f"{6e-4 * (768 / n_embd) ** 0.5:.3g}")


def batch_tokens(compute: float) -> float:
    """Tokens of a step that are best for a compute budget: 0.2920 C^0.3271 (Bi et al. 2024, "DeepSeek LLM", section
    3.1, equation 1), fitted from 1e17 FLOPs on; below, it is an extrapolation."""
    return float(0.2920 * compute**0.3271)


def dial(
    depth: int,
    base: TrainConfig | None = None,
    *,
    aspect: int = ASPECT,
    tokens_per_parameter: float = TOKENS_PER_PARAMETER,
) -> Dialled:
    """The recipe for a depth.

    Args:
        base: text, tokenizer, context and whatever else the dial does not set.
        aspect: width over depth; the width is rounded to whole heads.

    Raises:
        ConfigError: a depth under 1.
    """
    from gptlab import costs

    if depth < 1:
        raise ConfigError(f"depth {depth} is no model: give 1 or more blocks.")
    if aspect < 1 or tokens_per_parameter <= 0:
        raise ConfigError(
            f"aspect {aspect} and {tokens_per_parameter:g} tokens a parameter must be above 0: raise them."
        )
    base = base or TrainConfig()
    wanted = depth * aspect
    head = min(HEAD_DIM, wanted)
    n_head = max(1, round(wanted / head))
    width = n_head * head
    shaped = base.replace(n_layer=depth, n_head=n_head, n_embd=width, n_kv_head=0)
    if not shaped.vocab_size:
        raise ConfigError(
            "vocab_size is not known before the text is prepared, and the dial counts parameters: give it."
        )
    size = costs.parameters(shaped).total
    tokens = tokens_per_parameter * size
    compute = tokens * costs.flops_per_token(shaped)
    batch = max(base.nproc, round(batch_tokens(compute) / base.block_size))
    steps = max(1, round(tokens / (batch * base.block_size)))
    lr = learning_rate(width)
    config = shaped.replace(
        vocab_size=shaped.vocab_size, global_batch_size=batch, max_iters=steps, learning_rate=lr, min_lr=None,
        warmup_iters=warmup(steps), lr_decay_iters=None, micro_batch_size=min(base.micro_batch_size, batch),
    )  # fmt: skip
    return Dialled(
        config,
        {
            "n_layer": "the dial",
            "n_embd": f"{aspect} features a block, in whole heads (nanochat; Kaplan et al. 2020, figure 5: flat)",
            "n_head": f"{head} features a head (GPT-2; Brown et al. 2020, table 2.1, up to Medium)",
            "max_iters": f"{tokens_per_parameter:g} tokens a parameter, {tokens:.3g} in all (Hoffmann et al. 2022)",
            "global_batch_size": f"0.2920 C^0.3271 tokens a step at C = {compute:.3g} (Bi et al. 2024, section 3.1)",
            "learning_rate": "6e-4 at width 768 (Brown et al. 2020), with the root of the width (Vaswani et al. 2017)",
            "warmup_iters": f"one of {WARMUP_SHARE} steps (a choice of ours), {MOST_WARMUP} at most (nanoGPT)",
            "lr_decay_iters": "the last step: a decay that is longer costs loss (Hoffmann et al. 2022, appendix B)",
        },
    )


def warmup(steps: int) -> int:
    """Warm-up of a run of so many steps."""
    return max(1, min(MOST_WARMUP, steps // WARMUP_SHARE))


def isoflops(
    base: TrainConfig,
    compute: Sequence[float],
    shapes: Sequence[Mapping[str, Any]],
    *,
    convention: str = "matmul",
) -> list[dict[str, Any]]:
    """Rows for `gptlab.sweep`: every shape at every budget, each trained on D = C / 6 N tokens.

    Args:
        compute: budgets C, in FLOPs.
        shapes: fields by shape; a learning rate among them stands, otherwise the dial's rule sets it.
        convention: how N is counted (`scaling.CONVENTIONS`).

    Raises:
        ConfigError: a shape or convention that cannot be, or a budget that gives a shape hardly any step.
    """
    from gptlab import scaling

    if convention not in scaling.CONVENTIONS:
        raise ConfigError(
            f"There is no convention {convention!r} of N: choose one of {', '.join(scaling.CONVENTIONS)}."
        )
    rows = []
    for budget in compute:
        check_range("a budget in FLOPs of", budget, 1, 1e30)
        for shape in shapes:
            config = base.replace(**shape)
            n = scaling.sizes(config)[convention]
            steps = round(budget / (6 * n) / (config.global_batch_size * config.block_size))
            if steps < LEAST_STEPS:
                raise ConfigError(
                    f"{budget:g} FLOPs are {steps} steps of the shape {dict(shape)}: give a larger budget, a smaller "
                    "shape or a smaller global_batch_size."
                )
            learned = {"learning_rate": learning_rate(config.n_embd), "warmup_iters": warmup(steps)}
            rows.append(learned | dict(shape) | {"max_iters": steps})
    return rows


def spread(rows: Sequence[Mapping[str, Any]], column: str = "val_loss") -> list[dict[str, Any]]:
    """Cells that differ in their seed alone, as one row each: the mean of a column, its standard deviation, the range
    and how many seeds there are. Rows without a number in that column are left out."""
    import statistics

    names = ("name", "seed", "state", "step", "loss", "val_loss", "tokens_per_s", "mfu", "seconds", "reason")
    groups: dict[tuple[Any, ...], list[float]] = {}
    cells: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        if not isinstance(row.get(column), int | float):
            continue
        same = {name: value for name, value in row.items() if name not in names}
        key = tuple(same.items())
        cells[key] = same
        groups.setdefault(key, []).append(float(row[column]))
    return [
        cells[key]
        | {
            "seeds": len(found), column: statistics.fmean(found),
            "sd": statistics.stdev(found) if len(found) > 1 else None, "least": min(found), "most": max(found),
        }
        for key, found in groups.items()
    ]  # fmt: skip
