"""The decoder: the model's own numbers, the model untouched, weights shared."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from gptlab import kernels
from gptlab.config import GPTConfig
from gptlab.decoding import FEW, Decoder, Layout, RowLinear, layout
from gptlab.kvcache import KVCache
from gptlab.model import GPT
from gptlab.native.thin import ThinProduct, thin_product

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=65)
CPU = torch.device("cpu")


def model(bias: bool = True) -> GPT:
    made = GPT(dataclasses.replace(SMALL, bias=bias)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for p in made.parameters():
        p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
    return made


def ids(rows: int, length: int) -> Tensor:
    return torch.randint(0, 65, (rows, length), generator=torch.Generator().manual_seed(0))


def steps(decoder: Decoder, text: Tensor, prompt: int, padding: Tensor | None = None) -> Tensor:
    """Logits after the prompt and after each further id, (B, T - prompt + 1, V)."""
    cache = KVCache(SMALL, text.size(0), 64, CPU, decoder.dtype, padding=padding)
    parts = [text[:, :prompt], *text[:, prompt:].split(1, dim=1)]
    return torch.stack([decoder.logits(part, cache) for part in parts], 1)


@pytest.mark.parametrize("rows", [1, 3, FEW, 8])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("written_out", [True, False])
def test_every_step_equals_the_model(rows: int, bias: bool, written_out: bool) -> None:
    gpt, text = model(bias), ids(rows, 30)
    decoder = Decoder(gpt, rows=rows)
    assert decoder.written_out
    decoder.written_out = written_out
    torch.testing.assert_close(steps(decoder, text, 20), gpt(text)[:, 19:], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_padded_rows_too(dtype: torch.dtype) -> None:
    gpt, text, padding = model(), ids(5, 12), torch.tensor([3, 0, 7, 1, 0])
    got = steps(Decoder(gpt, rows=5, dtype=dtype), text, 8, padding)
    for row, empty in enumerate(padding.tolist()):
        wanted = gpt(text[row : row + 1, empty:])[0, 7 - empty :]
        torch.testing.assert_close(got[row].float(), wanted, atol=2e-5, rtol=2e-5)


def test_the_model_is_left_as_it_was_and_shares_its_weights() -> None:
    gpt = model()
    names, layer = set(gpt.state_dict()), gpt.get_submodule("h.1.mlp.c_fc")
    twin = Decoder(gpt, rows=8).model
    assert set(gpt.state_dict()) == names and isinstance(layer, nn.Linear) and gpt.lm_head is None
    assert twin.wte.weight is gpt.wte.weight
    made = twin.get_submodule("h.1.mlp.c_fc")
    assert isinstance(made, RowLinear) and made.plain is not None
    assert made.plain.data_ptr() == layer.weight.data_ptr()


@pytest.mark.parametrize("lies", ["plain", "thin", "packed"])
@pytest.mark.parametrize("rows", [1, 3, 5, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_the_same_however_its_weights_lie(lies: Layout, rows: int, bias: bool) -> None:
    if lies == "packed" and layout(8, CPU, torch.float32) != "packed":
        pytest.skip("torch without oneDNN")
    thin = thin_product() if lies == "thin" else None
    if lies == "thin" and thin is None:
        pytest.skip("no AVX-512, or no compiler")
    generator = torch.Generator().manual_seed(0)
    x, residual, weight = (torch.randn(shape, generator=generator) for shape in ((rows, 48), (rows, 80), (80, 48)))
    b = torch.randn(80, generator=generator) if bias else None
    layer, wanted = RowLinear(weight, b, lies, rows, thin), nn.functional.linear(x, weight, b)
    torch.testing.assert_close(layer(x), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer(x[:, None])[:, 0], wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.plus(x, residual), wanted + residual, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.gelu(x), nn.functional.gelu(wanted, approximate="tanh"), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(kernels.lanes_refusal() is not None, reason=str(kernels.lanes_refusal()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(768, 100), (40, 33), (3072, 7)])
def test_our_product_of_few_rows_is_torchs(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    """In float64 torch's; one row gives the same bits in any company and with any number of threads."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((11, inputs), (outputs, inputs), (outputs,), (11, outputs))
    x, weight, bias, residual = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    weight /= inputs**0.5
    exact = nn.functional.linear(x.double(), weight.double(), bias.double())
    exact = nn.functional.gelu(exact, approximate="tanh") + residual.double()
    found = [ThinProduct(n)(x, weight, bias, residual=residual, gelu=True) for n in (1, 2)]
    torch.testing.assert_close(found[0].double(), exact, atol=1e-5 if dtype == torch.float32 else 0.03, rtol=0)
    assert torch.equal(found[0], found[1])
    for rows in (1, 2, 3, 5, 8):
        part = ThinProduct(1)(x[:rows], weight, bias, residual=residual[:rows], gelu=True)
        assert torch.equal(part, found[0][:rows])


def test_layouts_follow_the_rows() -> None:
    few = "plain" if kernels.lanes_refusal() else "thin"
    assert [layout(rows, CPU, torch.float32) for rows in (1, 2, 3)] == [few, few, few]
    assert layout(1, CPU, torch.float64) == layout(8, torch.device("cuda"), torch.bfloat16) == "plain"


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("rows", [1, 8])
def test_bfloat16_is_near(packs: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if packs and layout(8, CPU, torch.bfloat16) != "packed":
        pytest.skip("no bfloat16 instructions")
    monkeypatch.setattr("gptlab.decoding.layout", lambda *_: "packed" if packs else "plain")
    gpt, text = model(), ids(rows, 20)
    decoder = Decoder(gpt, rows=rows, dtype=torch.bfloat16)
    assert {p.dtype for p in gpt.parameters()} == {torch.float32}
    got, wanted = steps(decoder, text, 12), gpt(text)[:, 11:]
    assert got.dtype == torch.bfloat16
    assert (got - wanted).abs().max() < 0.04 * wanted.abs().max()
