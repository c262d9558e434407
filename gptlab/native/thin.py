"""A few rows times a weight on a CPU, with GELU or a residual in the same pass: the products of decoding.

    product = ThinProduct(threads=2)
    product(x, weight, bias)                       # as torch's linear

torch's product of one row waits for its threads more than it computes; this one reads the weight, as the model has it,
once. The plain twin is `torch.nn.functional.linear`. Left out on purpose: who calls it (`decoding.py`).
"""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor

from gptlab.kernels import lanes_refusal
from gptlab.native.build import BuildError, library

_KINDS = {
    (torch.float32, torch.float32): 0, (torch.bfloat16, torch.bfloat16): 1, (torch.float32, torch.int8): 2,
}  # fmt: skip
"""Of numbers and weights, as `gptlab_thin` counts them."""


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight (N, K) in int8 and its scale, (N,) float32: each output's largest magnitude is 127."""
    scale = weight.abs().amax(1).clamp_(min=1e-30) / 127
    return (weight / scale[:, None]).round_().to(torch.int8), scale.float()


def thin_product() -> ThinProduct | None:
    """The product with as many threads as torch's, or None where this machine cannot have it."""
    if lanes_refusal() is not None:
        return None
    try:
        return ThinProduct(torch.get_num_threads())
    except (BuildError, OSError):
        return None


class ThinProduct:
    """y = x W^T + bias in float32 or bfloat16, summed in float32; a row's bits are the same for any number of
    threads and of other rows.

    Args:
        threads: CPU threads, its own.
    """

    def __init__(self, threads: int) -> None:
        self._library = library("float32")
        self._pool = ctypes.c_void_p(self._library.gptlab_pool(threads))
        weakref.finalize(self, self._library.gptlab_pool_end, self._pool)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        scale: Tensor | None = None,
        residual: Tensor | None = None,
        gelu: bool = False,
    ) -> Tensor:
        """(M, K) times (N, K), both contiguous and of one type, or float32 times int8 -> (M, N).

        Args:
            bias: (N,).
            scale: (N,) float32, what int8 weights are to be multiplied by.
            residual: (M, N), added at the end.
            gelu: the tanh approximation of GELU over the product.
        """
        rows, outputs = x.size(0), weight.size(0)
        x, y = x.contiguous(), x.new_empty(rows, outputs)
        kind = _KINDS[x.dtype, weight.dtype]
        assert weight.is_contiguous() and (weight.dtype == torch.int8) == (scale is not None)
        if residual is not None:
            residual = residual.contiguous()
        place = (None if t is None else ctypes.c_void_p(t.data_ptr()) for t in (weight, scale, bias, residual, x, y))
        size = (ctypes.c_int64(n) for n in (outputs, weight.size(1), rows))
        self._library.gptlab_thin(self._pool, kind, *place, *size, int(gelu))
        return y
