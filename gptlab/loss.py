"""The loss without the logits: the head and its cross-entropy a chunk of rows at a time.

    >>> import torch
    >>> from gptlab.loss import head_loss
    >>> hidden, head = torch.randn(8, 16, requires_grad=True), torch.randn(64, 16, requires_grad=True)
    >>> head_loss(hidden, head, torch.arange(8), vocab_size=50).backward()
    >>> head.grad.shape
    torch.Size([64, 16])

With a vocabulary of 50,257 and a context of 1024 the logits of four sequences fill 0.8 GB in float32, and what softmax
and its gradient write fills it again. Here a chunk's logits become its loss and at once the gradients of its hidden
rows and of the head, which the backward pass only multiplies (the idea of Wijmans et al. 2024, "Cut your losses in
large-vocabulary language models", and of Liger's fused linear cross-entropy). Logits that
are one chunk at most take the plain way, which is as fast and which a compiler sees through.

Left out on purpose: the plain twin, F.cross_entropy on `GPT.logits`, which tests compare with; a soft cap, whose
model takes that plain way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptlab.counts import logit_rows

IGNORED = -100
"""The target that is left out of the loss, as torch has it."""


@torch.compiler.disable
def head_loss(hidden: Tensor, head: Tensor, targets: Tensor, *, vocab_size: int, reduction: str = "mean") -> Tensor:
    """The cross-entropy of hidden @ head.T, where logits (N, V) never exist as a whole.

    Under autocast the products take its type, as F.linear would; softmax, loss and sums are float32.

    Args:
        hidden: (N, C), what the head reads.
        head: (padded V, C); rows past `vocab_size` take no part, and their gradient is 0.
        targets: (N,) int64; -100 is left out.
        reduction: `mean` over the targets that count, or their `sum` (nats).

    Returns:
        A scalar, float32. Its gradient can be taken once, and has no gradient itself.
    """
    assert reduction in ("mean", "sum"), reduction
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    wanted = torch.is_grad_enabled()
    total = _HeadLoss.apply(
        hidden, head, targets, vocab_size, dtype, wanted and hidden.requires_grad, wanted and head.requires_grad
    )
    return total / (targets != IGNORED).sum() if reduction == "mean" else total


class _HeadLoss(torch.autograd.Function):
    """Sum of the losses, with both gradients made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, vocab_size: int, dtype: torch.dtype,
        hidden_wanted: bool, head_wanted: bool,
    ) -> Tensor:  # fmt: skip
        with torch.autocast(hidden.device.type, enabled=False):
            x = hidden.to(dtype)  # (N, C)
            w = head.to(dtype)  # (padded V, C)
            d_hidden = torch.empty_like(hidden) if hidden_wanted else None  # (N, C)
            d_head = None  # (padded V, C)
            total = torch.zeros((), dtype=torch.float32, device=hidden.device)
            rows = logit_rows(len(x), len(w))
            lift = 2.0 ** (10 - (rows - 1).bit_length()) if dtype == torch.float16 else 1.0
            for start in range(0, len(x), rows):
                part = slice(start, start + rows)
                loss, d_logits = _chunk(x[part] @ w.T, targets[part], vocab_size, lift, hidden_wanted or head_wanted)
                total += loss
                if d_hidden is not None:
                    d_hidden[part] = _product(d_logits, w, lift)
                if head_wanted and d_head is None:
                    d_head = _product(d_logits.T, x[part], lift).to(head.dtype)
                elif d_head is not None and d_head.dtype == dtype:
                    d_head.addmm_(d_logits.T, x[part], alpha=1 / lift)
                elif d_head is not None:  # in float32, whatever the product is in
                    d_head += _product(d_logits.T, x[part], lift)
                del d_logits
            if head_wanted and d_head is None:  # no rows at all
                d_head = torch.zeros_like(head)
        ctx.gradients = d_hidden, d_head
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradient of a loss in chunks can be taken once: compute the loss again")
        gradients, ctx.gradients = ctx.gradients, None  # multiplied in place: a copy of the head's is 154 MB in gpt2
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(grad_output)
        return *gradients, None, None, None, None, None


def _chunk(logits: Tensor, targets: Tensor, vocab_size: int, lift: float, gradient: bool) -> tuple[Tensor, Tensor]:
    """The sum of a chunk's losses, and its gradient by the logits (rows, padded V), of their type and times `lift`.

    float16 ends at 6e-8, near the probabilities of a large vocabulary: lifted, a chunk's gradients stay within its
    range whatever the hidden rows are.
    """
    dtype = logits.dtype
    logits[:, vocab_size:] = -torch.inf  # no probability, no gradient; cropping would copy, and products like multiples
    log_p = torch.log_softmax(logits, dim=-1, dtype=torch.float32)  # (rows, padded V)
    del logits
    counts = (targets != IGNORED)[:, None]  # (rows, 1)
    index = torch.where(counts[:, 0], targets, 0)[:, None]
    loss = -(log_p.gather(1, index) * counts).sum()
    if not gradient:
        return loss, log_p
    log_p[:, vocab_size:] = 0.0  # the exponential of -inf is right, but ten times as slow on some CPUs
    p = log_p.exp_()
    p[:, vocab_size:] = 0.0
    p.scatter_add_(1, index, -counts.to(p.dtype))
    if lift != 1.0 or p.device.type != "cpu" or not counts.all():  # on a CPU a look is cheaper than a pass
        p.mul_(counts * lift)
    return loss, p.to(dtype)


def _product(a: Tensor, b: Tensor, lift: float) -> Tensor:
    """a @ b / lift."""
    return a @ b if lift == 1.0 else (a @ b).float() / lift
