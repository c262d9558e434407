"""The kernel at work on a model: it owns the memory, and adds gradients to the parameters' own.

    engine = Engine(model, batch=4, threads=2, dtype="float32")
    engine.begin()                                  # after each change of the weights
    loss_sum = engine(ids, targets, scale=1 / 4096)  # p.grad += scale * d loss_sum / d p

Left out on purpose: what it computes (`gpt.cpp`), and the optimizer.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gptlab.native.build import library

if TYPE_CHECKING:
    from gptlab.model import GPT

_ALIGNED = 64
_LAYER = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")


class Engine:
    """Loss and gradients of a GPT-2, for micro-batches of up to `batch` sequences.

    Args:
        model: its parameters are float32 on the CPU, each with a gradient.
        threads: CPU threads, its own.
        dtype: of the products: bfloat16 or float32.
    """

    def __init__(self, model: GPT, *, batch: int, threads: int, dtype: str) -> None:
        self.model, self._library = model, library(dtype)
        config = model.config
        names = ["wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias"]
        names += [
            f"h.{i}.{part}.{kind}" for i in range(config.n_layer) for part in _LAYER for kind in ("weight", "bias")
        ]
        parameters = dict(model.named_parameters())
        assert set(parameters) <= set(names), "the kernel knows GPT-2's parameters alone"
        self._parameters = [parameters.get(name) for name in names]
        self._shape = [
            config.n_layer, config.n_head, config.n_embd, config.vocab_size, config.padded_vocab_size
        ]  # fmt: skip
        self._pool = ctypes.c_void_p(self._library.gptlab_pool(threads))
        weakref.finalize(self, self._library.gptlab_pool_end, self._pool)
        packed, work = ctypes.c_int64(), ctypes.c_int64()
        self._library.gptlab_sizes(
            self._pool, self._dimensions(batch, config.block_size), ctypes.byref(packed), ctypes.byref(work)
        )
        self._packed, self._work = self._memory(packed.value), self._memory(work.value)
        self.held_bytes = packed.value + work.value
        self._batch = batch
        self._weights: ctypes.Array[ctypes.c_void_p] | None = None
        self._gradients: ctypes.Array[ctypes.c_void_p] | None = None

    @staticmethod
    def _memory(size: int) -> Tensor:
        return torch.empty(size + _ALIGNED, dtype=torch.uint8)

    @staticmethod
    def _start(memory: Tensor) -> ctypes.c_void_p:
        return ctypes.c_void_p(-(-memory.data_ptr() // _ALIGNED) * _ALIGNED)

    def _dimensions(self, batch: int, time: int) -> ctypes.Array[ctypes.c_int64]:
        return (ctypes.c_int64 * 7)(*self._shape, batch, time)

    def begin(self) -> None:
        """Takes over the present weights, in the precision and order that the products want."""
        gradients = [None if p is None else p.grad for p in self._parameters]
        pointers = ctypes.c_void_p * len(self._parameters)
        self._weights = pointers(*[None if p is None else p.data_ptr() for p in self._parameters])
        self._gradients = pointers(*[None if g is None else g.data_ptr() for g in gradients])
        assert all((p is None) == (g is None) for p, g in zip(self._parameters, gradients, strict=True))
        shape = self._dimensions(self._batch, self.model.config.block_size)
        self._library.gptlab_pack(self._pool, shape, self._weights, self._start(self._packed))

    def __call__(self, ids: Tensor, targets: Tensor, scale: float) -> float:
        """The sum of the losses, in nats, with the weights of the last `begin`; adds the gradients of `scale` times it.

        Args:
            ids: (B, T) int64, B <= batch, T a multiple of 32 and at most block_size.
            targets: (B, T) int64; negative ones are left out.

        Raises:
            IndexError: an id that is not in the vocabulary.
        """
        batch, time = ids.shape
        config = self.model.config
        assert batch <= self._batch and time <= config.block_size and time % 32 == 0 and self._weights is not None
        low, high = ids.aminmax()
        if low < 0 or max(high, targets.max()) >= config.vocab_size:
            raise IndexError(f"an id is not in the vocabulary of {config.vocab_size}")
        ids, targets = ids.contiguous(), targets.contiguous()
        loss: float = self._library.gptlab_run(
            self._pool, self._dimensions(batch, time), self._weights, self._gradients, self._start(self._packed),
            self._start(self._work), ctypes.c_void_p(ids.data_ptr()), ctypes.c_void_p(targets.data_ptr()),
            ctypes.c_float(scale),
        )  # fmt: skip
        return loss
