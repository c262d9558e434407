"""Weights in and out: what transformers computes we compute, what we save it loads, and a bad file is named."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptlab.config import ConfigError, GPTConfig
from gptlab.counts import shapes
from gptlab.model import GPT
from gptlab.presets import preset

transformers = pytest.importorskip("transformers", reason="transformers is a dependency of the tests alone")

SIZES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=65)


def scatter(model: torch.nn.Module, seed: int = 0) -> None:
    """Gives every parameter, gains and biases too, values that no other has."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.05 + (1.0 if "ln_" in name and p.dim() == 1 else 0.0))


def theirs(config: GPTConfig, **more: Any) -> Any:
    """transformers' GPT-2 of that shape, without dropout."""
    values = {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd} | more
    values |= {"n_positions": config.block_size, "vocab_size": config.vocab_size}
    values |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=None, eos_token_id=None, **values))
    scatter(model)
    return model.eval()


def text(config: GPTConfig, rows: int = 2, length: int = 48) -> Tensor:
    length = min(length, config.block_size)
    return torch.randint(0, config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(3))


def renamed(name: str) -> tuple[str, bool]:
    """transformers' name of our parameter, and whether it is transposed there."""
    return f"transformer.{name}", name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


@pytest.mark.parametrize("name", SIZES)
def test_logits_equal_transformers_both_ways(name: str, tmp_path: Path) -> None:
    whole = preset(name)
    config = GPTConfig(n_layer=2, n_head=whole.n_head, n_embd=whole.n_embd, vocab_size=1003)
    other = theirs(config)
    other.save_pretrained(tmp_path / "theirs")
    model = GPT.from_pretrained(tmp_path / "theirs")
    assert model.config == config
    ids = text(config)
    with torch.inference_mode():
        wanted = other(ids).logits
        assert (model(ids) - wanted).abs().max() <= 2e-4
        scatter(model, 1)
        model.save_pretrained(tmp_path / "ours")
        back = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours").eval()
        assert (back(ids).logits - wanted).abs().max() > 0.01
        assert (back(ids).logits - model(ids)).abs().max() <= 2e-4


def test_loss_and_every_gradient_equal_transformers(tmp_path: Path) -> None:
    config = GPTConfig(n_layer=3, n_head=12, n_embd=768, block_size=128, vocab_size=1003)
    other = theirs(config)
    other.save_pretrained(tmp_path)
    model, ids = GPT.from_pretrained(tmp_path), text(config)
    wanted = other(ids, labels=ids).loss
    wanted.backward()
    loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    gradients = {name: p.grad for name, p in other.named_parameters()}
    for name, p in model.named_parameters():
        key, transposed = renamed(name)
        expected = gradients.pop(key)
        expected = expected.t() if transposed else expected
        assert p.grad is not None
        assert (p.grad[: len(expected)] - expected).abs().max() <= 1e-4 * expected.abs().max(), name
    assert not gradients


@pytest.mark.parametrize("more", [{"tie_word_embeddings": False}, {"activation_function": "relu2"}])
def test_what_transformers_can_do_too_goes_both_ways(more: dict[str, Any], tmp_path: Path) -> None:
    other, ids = theirs(SMALL, **more), text(SMALL)
    other.save_pretrained(tmp_path / "theirs")
    model = GPT.from_pretrained(tmp_path / "theirs")
    assert (model.config.tie_head, model.config.mlp) == (
        "tie_word_embeddings" not in more,
        more.get("activation_function", "gelu"),
    )
    with torch.inference_mode():
        assert (model(ids) - other(ids).logits).abs().max() <= 1e-5
        model.save_pretrained(tmp_path / "ours")
        back = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours").eval()
        assert torch.equal(back(ids).logits, other(ids).logits)


def test_an_older_file_is_read(tmp_path: Path) -> None:
    """Older versions saved masks, the tied head, and a bare network without a prefix."""
    theirs(SMALL).save_pretrained(tmp_path)
    wanted = GPT.from_pretrained(tmp_path)(text(SMALL))
    tensors = load_file(tmp_path / "model.safetensors")
    assert "transformer.wte.weight" in tensors and "lm_head.weight" not in tensors
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    for layer in range(SMALL.n_layer):
        old[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 16, 16, dtype=torch.bool)
        old[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    old["lm_head.weight"] = old["wte.weight"].clone()
    save_file(old, tmp_path / "model.safetensors")
    assert torch.equal(GPT.from_pretrained(tmp_path)(text(SMALL)), wanted)


def test_several_files_with_an_index_are_read(tmp_path: Path) -> None:
    other = theirs(SMALL)
    other.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1 and not (tmp_path / "model.safetensors").exists()
    assert (GPT.from_pretrained(tmp_path)(text(SMALL)) - other(text(SMALL)).logits).abs().max() <= 1e-5


def test_half_precision_becomes_float32(tmp_path: Path) -> None:
    theirs(SMALL).to(torch.bfloat16).save_pretrained(tmp_path)
    model = GPT.from_pretrained(tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.float32} and all(p.requires_grad for p in model.parameters())
    model(text(SMALL), text(SMALL)).backward()


def test_a_shorter_context_is_cut_off_and_a_longer_one_refused(tmp_path: Path) -> None:
    model = GPT(SMALL)
    model.save_pretrained(tmp_path)
    short = GPT.from_pretrained(tmp_path, block_size=8, dropout=0.1)
    assert (short.config.block_size, short.config.dropout, short.wpe.weight.shape) == (8, 0.1, (8, 32))  # type: ignore[union-attr]
    ids = text(SMALL, length=8)
    assert torch.allclose(short(ids), model.eval()(ids), atol=1e-6)
    with pytest.raises(ConfigError, match="block_size 32 is more than the 16 positions"):
        GPT.from_pretrained(tmp_path, block_size=32)


def test_padding_rows_are_left_out_and_come_back_as_zeros(tmp_path: Path) -> None:
    model = GPT(SMALL)
    with torch.no_grad():
        model.wte.weight[65:] = 7.0
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["transformer.wte.weight"].shape == (65, 32)
    again = GPT.from_pretrained(tmp_path).wte.weight
    assert again.shape == (128, 32) and not again[65:].any() and torch.equal(again[:65], model.wte.weight[:65])


def test_without_biases_transformers_gets_zeros(tmp_path: Path) -> None:
    model = GPT(GPTConfig.from_dict(SMALL.to_dict() | {"bias": False})).eval()
    scatter(model)
    model.save_pretrained(tmp_path)
    back = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert (back(text(SMALL)).logits - model(text(SMALL))).abs().max() <= 1e-5
    assert torch.allclose(GPT.from_pretrained(tmp_path)(text(SMALL)), model(text(SMALL)), atol=1e-6)


@pytest.mark.parametrize(
    "switch",
    [
        {"rope": True}, {"rmsnorm": True}, {"qk_norm": True}, {"mlp": "swiglu"}, {"n_kv_head": 1},
        {"sliding_window": 4}, {"logit_softcap": 15.0}, {"mask_documents": True},
        {"rope": True, "tie_head": False, "bias": False},
    ],
)  # fmt: skip
def test_switches_that_gpt2_lacks_go_through_files_of_our_own(switch: dict[str, Any], tmp_path: Path) -> None:
    model = GPT(GPTConfig.from_dict(SMALL.to_dict() | switch), seed=4).eval()
    model.save_pretrained(tmp_path)
    again = GPT.from_pretrained(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(text(SMALL)), model(text(SMALL)))
    with pytest.raises(ValueError):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def nanogpt(model: GPT, prefix: str = "") -> dict[str, Any]:
    """A checkpoint as nanoGPT saves it."""
    tensors = {f"{prefix}transformer.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors[f"{prefix}transformer.wte.weight"] = model.wte.weight.detach()[: model.config.vocab_size].clone()
    tensors[f"{prefix}lm_head.weight"] = tensors[f"{prefix}transformer.wte.weight"]
    tensors[f"{prefix}transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
    names = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
    arguments = {name: getattr(model.config, name) for name in names}
    return {
        "model": tensors, "optimizer": {"state": {0: {"step": torch.tensor(5.0)}}, "param_groups": []},
        "model_args": arguments, "iter_num": 5, "best_val_loss": torch.tensor(1.5), "config": {"out_dir": "out"},
    }  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_nanogpts_checkpoint_is_read(prefix: str, bias: bool, tmp_path: Path) -> None:
    model = GPT(GPTConfig.from_dict(SMALL.to_dict() | {"bias": bias}), seed=2).eval()
    torch.save(nanogpt(model, prefix), tmp_path / "ckpt.pt")
    again = GPT.from_pretrained(tmp_path / "ckpt.pt")
    assert again.config == model.config
    assert torch.equal(again(text(SMALL)), model(text(SMALL)))


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("went-off"),))


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(nanogpt(GPT(SMALL)) | {"config": Bomb()}, tmp_path / "ckpt.pt")
    with pytest.raises(ConfigError, match="holds more than tensors and plain values"):
        GPT.from_pretrained("ckpt.pt")
    GPT(SMALL).save_pretrained(tmp_path / "folder")
    (tmp_path / "folder" / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ConfigError, match=r"model.safetensors cannot be read as safetensors"):
        GPT.from_pretrained("folder")
    (tmp_path / "folder" / "model.safetensors").rename(tmp_path / "folder" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model.bin is a pickle"):
        GPT.from_pretrained("folder")
    assert not (tmp_path / "went-off").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_embd": 64}, "wte.weight as float32 .65, 32., and its config asks for floating point .65, 64."),
        ({"n_layer": 3}, "lacks h.2.ln_1.weight and 11 other tensors"),
        ({"n_layer": 1}, "has h.1.attn.c_attn.bias, which its config leaves no place for"),
        ({"n_head": 5}, "n_embd 32 cannot be split over n_head 5"),
        ({"n_layer": "2"}, "n_layer '2' is not a whole number"),
        ({"vocab_size": 0}, "vocab_size of 0"),
        ({"activation_function": "gelu"}, "activation_function 'gelu'"),
        ({"activation_function": ["gelu"]}, "activation_function"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon 1e-06"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ({"n_inner": 64}, "n_inner 64"),
        ({"model_type": "llama"}, "type 'llama'"),
        ({"model_type": "gptlab", "gptlab": {"n_layers": 3}}, "did you mean 'n_layer'"),
        ({"tie_word_embeddings": "no"}, "tie_head 'no'"),
        ({"n_positions": None}, "block_size None"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    GPT(SMALL).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=said) as caught:
        GPT.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = GPT(SMALL)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    good = {name: tensor.clone() for name, tensor in load_file(path).items()}  # the file is written again
    name = "transformer.h.1.mlp.c_fc.weight"
    for tensor, said in (
        (None, "lacks h.1.mlp.c_fc.weight: "),
        (torch.zeros(128, 32), r"h.1.mlp.c_fc.weight as float32 \(32, 128\)"),
        (torch.zeros(32, 128, dtype=torch.int32), "h.1.mlp.c_fc.weight as int32"),
    ):
        save_file({n: t for n, t in (good | {name: tensor}).items() if t is not None}, path)
        with pytest.raises(ConfigError, match=said):
            GPT.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" * 100_000, "not a JSON object"), (b"[]", "not a JSON object"), (b"\xff\xfe", "not a JSON object"),
        (b" " * 10_000_001, "at most 10000000"), (None, "no file .*config.json"),
    ],
)  # fmt: skip
def test_a_config_that_is_none_is_refused(content: bytes | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        GPT.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([1, 2], "no model_args and model"),
        ({"model": {}, "model_args": {"n_layer": 1}}, "no n_head in its model_args"),
        ({"model": {"a": 1}, "model_args": {}}, "something else than tensors"),
    ],
)
def test_a_checkpoint_that_is_not_nanogpts_is_refused(found: Any, said: str, tmp_path: Path) -> None:
    torch.save(found, tmp_path / "ckpt.pt")
    with pytest.raises(ConfigError, match=said):
        GPT.from_pretrained(tmp_path / "ckpt.pt")
    (tmp_path / "ckpt.pt").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="not a checkpoint of torch"):
        GPT.from_pretrained(tmp_path / "ckpt.pt")
    with pytest.raises(ConfigError, match="There are no weights at"):
        GPT.from_pretrained(tmp_path / "nowhere")


def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    GPT(SMALL).save_pretrained(tmp_path / "secret")
    GPT(SMALL).save_pretrained(tmp_path / "folder")
    (tmp_path / "folder" / "model.safetensors").unlink()
    index = {"weight_map": {"wte.weight": "../secret/model.safetensors"}}
    (tmp_path / "folder" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"folder/model.safetensors cannot be read"):
        GPT.from_pretrained(tmp_path / "folder")


def test_shapes_are_the_models_own_in_its_order() -> None:
    for switch in ({}, {"bias": False, "rope": True}, {"qk_norm": True, "rmsnorm": True}, {"tie_head": False}):
        config = GPTConfig.from_dict(SMALL.to_dict() | switch)
        assert list(shapes(config).items()) == [(n, tuple(p.shape)) for n, p in GPT(config).named_parameters()]
