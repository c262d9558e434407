"""A model made ready for decoding: the same numbers out, sooner.

A decode step multiplies a few rows with every weight, so the time to reach is that of reading the weights once. Two
things stand between on a CPU, and each has its mend here:

- torch's product is not made for few rows: 8 take two to three times as long as 1. oneDNN's is, on weights that it has
  reordered (as torch.compile's freezing does), and adds GELU or the residual on its way. For up to three rows one of
  our own does the same on the weights as they are (`native/thin.py`), a fourth faster than torch's.
- a few hundred small operations and modules a step. GPT-2's own step is written out with a third of them; the plain
  twin is the model, which also reads prompts, and does every step of a GPT with other parts.

    >>> import torch
    >>> from gptlab.presets import preset
    >>> from gptlab.decoding import Decoder
    >>> from gptlab.kvcache import KVCache
    >>> from gptlab.model import GPT
    >>> decoder, ids = Decoder(GPT(preset("tiny")).eval(), rows=8, dtype=torch.bfloat16), torch.zeros(8, 1).long()
    >>> decoder.logits(ids, KVCache(decoder.config, 8, 64, ids.device, decoder.dtype)).shape    # (B, V)
    torch.Size([8, 257])

Left out on purpose: how texts grow (`sampling.py`); weights of fewer than 16 bits; torch.compile, which takes a minute
to gain what this does.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlab.config import GPTConfig
from gptlab.kernels import lanes_refusal
from gptlab.kvcache import KVCache
from gptlab.model import GPT
from gptlab.native.thin import ThinProduct, quantised, thin_product

FEW = 4
"""Rows from which oneDNN's product is faster than ours; where ours cannot be had, in float32 than torch's."""
MOST = 8
"""Rows that ours takes in one reading of the weights: more than FEW where they must have the bits of one row alone."""
MANY = 64
"""Rows from which torch's float32 product is as good (prompts)."""

# What the written-out step knows; any other field of the config must be as GPT-2 has it.
_KNOWN = {
    "n_layer", "n_head", "n_embd", "block_size", "vocab_size", "dropout", "bias",
    "tie_head", "logit_softcap", "mask_documents",
}  # fmt: skip


Layout = Literal["plain", "thin", "packed", "bytes"]
"""How weights lie: as the model has them, (N, K), for torch's product or for ours; reordered by oneDNN; or in int8, for
ours (`drafting.py`), which are other numbers and never chosen by `layout`."""


def layout(rows: int, device: torch.device, dtype: torch.dtype) -> Layout:
    """The fastest for so many rows. oneDNN's need a CPU, and in bfloat16 one that has instructions for it."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return "plain"
    if rows < FEW and lanes_refusal() is None:
        return "thin"
    if dtype == torch.float32 and rows < FEW:
        return "plain"
    there = torch.backends.mkldnn.is_available()
    return "packed" if there and (dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()) else "plain"


class RowLinear(nn.Module):
    """A linear layer (N, K) for few rows, without gradients: with the residual or GELU in the same pass.

    Prompts take the plain product in float32, by weights that are shared with the model; in bfloat16 oneDNN's serves.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, lies: Layout, rows: int, thin: ThinProduct | None = None
    ) -> None:
        super().__init__()
        weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.thin = thin
        self.packed = torch.ops.mkldnn._reorder_linear_weight.default(weight, rows) if lies == "packed" else None
        self.plain = None if lies == "packed" and weight.dtype == torch.bfloat16 else weight
        self.scale = None
        if lies == "bytes":
            self.plain, self.scale = quantised(weight)

    def _serves(self, x: Tensor) -> bool:
        """Whether it is a case for oneDNN."""
        return self.plain is None or (self.packed is not None and FEW <= x.numel() // x.size(-1) < MANY)

    def _is_thin(self, x: Tensor) -> bool:
        """Whether it is a case for ours."""
        return self.thin is not None and x.dim() == 2 and x.size(0) <= MOST

    def _few(self, x: Tensor, **further: Any) -> Tensor:
        return self.thin(x, self.plain, self.bias, scale=self.scale, **further)  # type: ignore[misc,arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        if self.packed is not None and self._serves(x):
            return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")
        if self._is_thin(x):
            return self._few(x)
        return F.linear(x, cast(Tensor, self.plain), self.bias)

    def gelu(self, x: Tensor) -> Tensor:
        """The tanh approximation of GELU over it, (B, K) -> (B, N)."""
        if self.packed is not None and self._serves(x):
            return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "gelu", [], "tanh")
        if self._is_thin(x):
            return self._few(x, gelu=True)
        return F.gelu(self.forward(x), approximate="tanh")

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The residual (B, N) added to it, (B, K) -> (B, N)."""
        if self.packed is not None and self._serves(x):
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.packed, self.bias, "add")
        if self._is_thin(x):
            return self._few(x, residual=residual)
        return self.forward(x).add_(residual)


class Decoder:
    """A model with its weights as decoding likes them.

    Embeddings and norms are shared with the model. On a CPU the weights in another layout are a further copy, as are
    those of another dtype than the model's.

    Args:
        model: in eval mode; it is left as it is.
        rows: texts that are continued at once.
        dtype: of weights and cache; none takes the model's.
        lies: how its weights lie; none for what is fastest.
    """

    def __init__(self, model: GPT, *, rows: int, dtype: torch.dtype | None = None, lies: Layout | None = None) -> None:
        self.config, own = model.config, model.wte.weight.dtype
        self.dtype, self.device = dtype or own, model.wte.weight.device
        # What deepcopy finds in the memo it doesn't copy.
        same = self.dtype == own
        memo = {id(p): p if same else nn.Parameter(p.detach().to(self.dtype), False) for p in model.parameters()}
        self.model = copy.deepcopy(model, memo)
        del memo
        lies = lies or layout(rows, self.device, self.dtype)
        self._thin = thin = thin_product() if lies in ("thin", "bytes") else None
        if self.model.lm_head is None:
            self.model.lm_head = RowLinear(self.model.wte.weight, None, lies, rows, thin)
        for module in list(self.model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, RowLinear(child.weight, child.bias, lies, rows, thin))
        self.written_out = all(
            field.name in _KNOWN or getattr(self.config, field.name) == field.default
            for field in dataclasses.fields(GPTConfig)
        )

        self._blocks = [self._parts(block) for block in self.model.h] if self.written_out else []

    @staticmethod
    def _parts(block: Any) -> tuple[Any, ...]:
        """What a step uses of a block: looking names up in modules takes as long as computing."""
        n1, n2, attn, mlp = block.ln_1, block.ln_2, block.attn, block.mlp
        norms = (n1.weight, n1.bias), (n2.weight, n2.bias)
        return *norms[0], attn.c_attn.forward, attn.c_proj.plus, *norms[1], mlp.c_fc.gelu, mlp.c_proj.plus

    @property
    def reads_ahead(self) -> bool:
        """Whether `following` can be had, and its bits are those of one id after another."""
        return self.written_out and self._thin is not None

    def logits(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Of the id after the last: (B, T) int64 that the cache has not seen yet -> (B, V)."""
        if ids.size(1) == 1 and self.written_out and not cache.static:
            return self.following(ids, cache)[:, 0]
        return self.model.logits(self.model.hidden(ids, cache=cache)[:, -1])

    def following(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Of the id after each, (B, T) -> (B, T, V), where a step is written out. T above 1 wants a cache without empty
        or hidden places, and no more than MOST ids in all."""
        with self._own_threads():
            return self.model.logits(self._step(ids, cache)).view(*ids.shape, -1)

    @contextlib.contextmanager
    def _own_threads(self) -> Iterator[None]:
        """Between products of our own torch computes with one thread: its others would spin on the cores that ours
        want, and attention over a few rows gains less from them than it would cost."""
        if self._thin is None:
            yield
            return
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def _step(self, ids: Tensor, cache: KVCache) -> Tensor:
        """What `model.hidden` gives, with fewer and larger operations: (B, T) -> (B * T, C)."""
        (B, T), C, H, D = ids.shape, self.config.n_embd, self.config.n_head, self.config.head_dim
        model: Any = self.model  # whose norms and positions are GPT-2's here
        mask, place, eps = cache.mask(1), cache.used, model.ln_f.eps
        norm, attend = torch.layer_norm, F.scaled_dot_product_attention
        if mask is not None:  # once, and not in each layer
            mask = torch.zeros(mask.shape, dtype=self.dtype, device=self.device).masked_fill_(~mask, -torch.inf)
        x = model.wte(ids.flatten()).add_(model.wpe(cache.positions(T).expand(B, T).flatten()))  # (B * T, C)
        for (w1, b1, attn, proj, w2, b2, up, down), kept in zip(self._blocks, cache.layers, strict=True):
            q, k, v = attn(norm(x, (C,), w1, b1, eps)).view(B, T, 3, H, D).permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
            keys, values = kept.unbind(0)  # each (B, H, S, D)
            keys.narrow(2, place, T).copy_(k)
            values.narrow(2, place, T).copy_(v)
            if T == 1:
                y = attend(q, keys.narrow(2, 0, place + 1), values.narrow(2, 0, place + 1), mask)  # (B, H, 1, D)
            else:  # a query at a time, so that each has the bits that it would have alone
                seen = (place + t + 1 for t in range(T))
                y = torch.cat(
                    [
                        attend(one, keys.narrow(2, 0, end), values.narrow(2, 0, end))
                        for one, end in zip(q.split(1, 2), seen, strict=True)
                    ],
                    2,
                )
            x = proj(y.transpose(1, 2).reshape(B * T, C), x)
            x = down(up(norm(x, (C,), w2, b2, eps)), x)
        cache.advance(T)
        return model.ln_f(x)
