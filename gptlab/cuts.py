"""Where a GPT is cut into stages of a pipeline: by hand (`split`), or so that the dearest stage is as cheap as can be.

    >>> from gptlab.presets import preset
    >>> from gptlab.cuts import layers_of_stages
    >>> layers_of_stages(preset("gpt2"), stages=3)    # the head costs as much as four blocks and a half
    [range(0, 5), range(5, 11), range(11, 12)]

Left out on purpose: what is a legal cut (`spread.py`), the stages themselves (`parallel/pipeline/cutting.py`).
"""

from __future__ import annotations

from functools import cache

from gptlab import tasks
from gptlab.config import GPTConfig
from gptlab.counts import attention_flops_per_token, block_shapes, logit_columns, published
from gptlab.spread import cut_places, split_points


def piece_costs(config: GPTConfig) -> tuple[float, float, float]:
    """FLOPs of training, a token, of the embedding, of a block and of the head.

    A block's and the head's are those of `counts.flops_per_token`; the embedding has no product: reading a row, adding
    a position and adding its gradient are three operations a number.
    """
    block = 6 * sum(shape[0] * shape[1] for shape in block_shapes(config).values() if len(shape) == 2)
    block += attention_flops_per_token(config) // config.n_layer
    return 3.0 * config.n_embd, float(block), 6.0 * logit_columns(config) * config.n_embd


def layers_of_stages(config: GPTConfig, stages: int, split: str | None = None) -> list[range]:
    """The blocks of each stage. The first has the embedding besides, the last the head; either may have no block.

    Args:
        split: the cuts as text; None balances the stages by cost.
    """
    L = config.n_layer
    if split is None:
        places = _balanced(config, stages)
    elif published(config):
        names = tasks.published_cuts(split_points(split), config)  # type: ignore[arg-type]
        places = [int(name.rpartition(".")[2]) if ".h." in name else L for name in names]
    else:
        places = cut_places(split_points(split), L)
    assert len(places) == stages - 1, f"{len(places)} cuts for {stages} stages"
    return [range(start, end) for start, end in zip([0, *places], [*places, L], strict=True)]


def _balanced(config: GPTConfig, stages: int) -> list[int]:
    """Cuts whose dearest stage is the cheapest that there is; of equal ones those with the most even stages."""
    L = config.n_layer
    embedding, block, head = piece_costs(config)

    @cache
    def best(start: int, left: int) -> tuple[float, float, tuple[int, ...]]:
        """Cost of the dearest stage, sum of squared costs, and cuts, of blocks from `start` in `left` stages."""
        first = embedding if left == stages else 0.0
        if left == 1:
            cost = first + (L - start) * block + head
            return cost, cost**2, ()
        found = []
        # Only the first and the last stage may be without a block, so that cuts differ.
        for end in range(start if left == stages else start + 1, L + 1 - max(0, left - 2)):
            cost = first + (end - start) * block
            dearest, squares, cuts = best(end, left - 1)
            found.append((max(cost, dearest), squares + cost**2, (end, *cuts)))
        return min(found)

    return list(best(0, stages)[2])
