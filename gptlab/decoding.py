"""A model whose weights lie as decoding likes them: the same numbers out, sooner.

A decode step multiplies a few rows with every weight, so the time is that of reading the weights, if the product is
made for few rows. torch's own is not on a CPU: 8 rows take two to three times as long as 1. oneDNN's is, on weights
that it has reordered (torch.compile's freezing does the same), so linear layers are replaced by ones that hold them so.

    >>> import torch
    >>> from gptlab.config import preset
    >>> from gptlab.decoding import for_decoding
    >>> from gptlab.model import GPT
    >>> twin = for_decoding(GPT(preset("tiny")).eval(), rows=8, dtype=torch.bfloat16)
    >>> twin(torch.zeros(8, 1, dtype=torch.long)).dtype
    torch.bfloat16

Left out on purpose: when it is used (`sampling.py`); weights of fewer than 16 bits.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlab.model import GPT

FEW = 4
"""Rows from which the reordered float32 product is faster; with fewer, torch's reads the weights at full speed."""
MANY = 64
"""Rows from which torch's float32 product is as good (prompts)."""


class PackedLinear(nn.Module):
    """A linear layer with its weights (N, K) reordered by oneDNN for few rows; without gradients."""

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int) -> None:
        super().__init__()
        weight = weight.detach()
        # Several kernels to choose from in float32, whose weights are shared with the model; one in bfloat16.
        self.plain = weight if weight.dtype == torch.float32 else None
        self.bias = None if bias is None else bias.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        if self.plain is not None and not FEW <= x.numel() // x.size(-1) < MANY:
            return F.linear(x, self.plain, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has the reordered product for these: a CPU build with oneDNN, float32, or bfloat16 where the CPU
    has instructions for it."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def for_decoding(model: GPT, *, rows: int, dtype: torch.dtype) -> GPT:
    """A twin of the model for sampling, which shares the weights that it can.

    Where nothing is to be gained it is the model itself. On a CPU the reordered weights are a further copy of them: in
    float32 with FEW or more rows, and in bfloat16.

    Args:
        rows: texts that are continued at once.
        dtype: of the weights; another one than the model's is a copy.
    """
    device, own = model.wte.weight.device, model.wte.weight.dtype
    pack = can_pack(device, dtype) and (dtype != torch.float32 or rows >= FEW)
    if dtype == own and not pack:
        return model
    # What deepcopy finds in the memo it doesn't copy.
    memo = {id(p): p if dtype == own else nn.Parameter(p.detach().to(dtype), False) for p in model.parameters()}
    twin = copy.deepcopy(model, memo)
    del memo
    if pack:
        if twin.lm_head is None:
            twin.lm_head = PackedLinear(twin.wte.weight, None, rows)
        for module in list(twin.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, PackedLinear(child.weight, child.bias, rows))
    return twin.eval()
