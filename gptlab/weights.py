"""GPT-2's weights in files: in from transformers' layout and nanoGPT's, and out again so that transformers loads them.

    >>> from gptlab.model import GPT
    >>> model = GPT.from_pretrained("models/gpt2")    # a folder with config.json and model.safetensors
    >>> model.save_pretrained("models/mine")

Read are a folder with config.json and safetensors (one file, or several with their index), with names that begin with
`transformer.` or not and with or without a tied head and mask buffers, which older files have; and nanoGPT's ckpt.pt,
whose names may carry what DDP and compile put before them, in either order. The published layout keeps the weights of
`c_attn c_proj c_fc` transposed. GPT-2 is written in that layout, and a GPT with switches that it lacks in our own.

Files are data: shapes are held against the config before a model is made, and nothing but tensors and plain values is
unpickled. torch is imported when tensors are: a config can be read without.

Left out on purpose: the network (`model.py`), a run's own checkpoints (`checkpoint.py`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlab.config import ConfigError, GPTConfig
from gptlab.counts import shapes
from gptlab.given import read_object
from gptlab.jsonfile import replacing, write_json

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu2": "relu2"}
"""transformers' names of what our MLPs can be; its `gelu` is another function."""
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
"""Kept as (in, out) by the published code, whose Conv1D multiplies from the other side."""
BUFFERS = (".attn.bias", ".attn.masked_bias")
"""Masks that older versions saved among the weights."""
CONFIG = "the config.json that came with the weights"
"""What a file that cannot be read is called."""
_FIXED = {
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
"""Fields of transformers' GPT-2 that change the function, with the only value that ours has, which is their default."""


def read_config(path: str | os.PathLike[str]) -> GPTConfig | None:
    """The shape of a folder's GPT, without torch; None for a ckpt.pt, which has to be loaded to know.

    Raises:
        ConfigError: nothing there, or something else.
    """
    folder = Path(path).expanduser()
    if folder.is_file():
        return None
    if not folder.is_dir():
        raise ConfigError(f"There are no weights at {path}: give a folder with config.json and model.safetensors.")
    return _config_of(read_object(folder / "config.json", CONFIG), folder)


def read(
    path: str | os.PathLike[str], *, block_size: int | None = None, dropout: float = 0.0, also: Collection[str] = ()
) -> tuple[GPTConfig, dict[str, Tensor]]:
    """A config and the weights of `GPT(config)` by parameter name, float32 on the CPU, with rows of zeros past the
    vocabulary.

    Args:
        path: a folder, or a ckpt.pt of nanoGPT.
        block_size: a shorter context: learned positions past it are cut off; rotary ones allow a longer one too.
        dropout: of the config; files say what they were trained with, which need not be wanted again.
        also: names of further tensors, handed over as they are.

    Raises:
        ConfigError: a file that is missing, damaged, or holds anything else than the model that its config names.
    """
    import torch

    source = Path(path).expanduser()
    config = read_config(source)
    if config is None:
        config, tensors = _read_nanogpt(source)
    else:
        tensors = _read_folder(source, config)
    tensors = _plain_names(tensors)
    if config.tie_head:
        tensors.pop("lm_head.weight", None)
    extra = {name: tensors.pop(name) for name in also if name in tensors}
    tensors = {name: tensor for name, tensor in tensors.items() if name != "score.weight"}
    _check(tensors, {name: cropped(name, shape, config) for name, shape in shapes(config).items()}, source)
    values = config.to_dict() | {"dropout": dropout}
    if block_size is not None and block_size != config.block_size:
        if block_size > config.block_size and not config.rope:
            raise ConfigError(
                f"block_size {block_size} is more than the {config.block_size} positions that {source} has: "
                f"use at most {config.block_size}."
            )
        values["block_size"] = block_size
        if not config.rope:
            tensors["wpe.weight"] = tensors["wpe.weight"][:block_size].clone()
    config = GPTConfig.from_dict(values)
    wanted = shapes(config)
    tensors = {name: tensors[name].float() for name in wanted}
    for name, tensor in tensors.items():
        if missing := wanted[name][0] - tensor.size(0):
            tensors[name] = torch.cat([tensor, tensor.new_zeros(missing, tensor.size(1))])
    return config, tensors | {name: tensor.float() for name, tensor in extra.items()}


def write(
    path: str | os.PathLike[str],
    config: GPTConfig,
    tensors: Mapping[str, Tensor],
    *,
    also: Mapping[str, Tensor] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Writes config.json and model.safetensors into a folder, each replaced at once.

    GPT-2's layout always has biases: where the model has none, zeros stand for them, which is the same function.

    Args:
        tensors: the weights of `GPT(config)` by parameter name.
        also: further tensors.
        settings: further entries of config.json.
    """
    import torch
    from safetensors.torch import save_file

    folder = Path(path).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    out: dict[str, Tensor] = {}
    theirs = _is_gpt2(config)
    full = GPTConfig.from_dict(config.to_dict() | {"bias": True}) if theirs else config
    for name, shape in shapes(full).items():
        tensor = tensors[name].detach().cpu() if name in tensors else torch.zeros(shape)
        tensor = tensor[: cropped(name, shape, config)[0]]
        if theirs:
            tensor = tensor.t() if name.endswith(TRANSPOSED) else tensor
            name = name if name.startswith("lm_head") else f"transformer.{name}"
        out[name] = tensor.contiguous()
    for name, tensor in (also or {}).items():
        out[name] = tensor.detach().cpu().contiguous()
    with replacing(folder / "model.safetensors") as beside:
        save_file(out, beside, metadata={"format": "pt"})  # transformers refuses files that don't say so
    values = _their_config(config) if theirs else {"model_type": "gptlab", "gptlab": config.shape().to_dict()}
    write_json(folder / "config.json", values | dict(settings or {}))


def cropped(name: str, shape: tuple[int, ...], config: GPTConfig) -> tuple[int, ...]:
    """A parameter's shape in a file: the embedding and the head have no rows past the vocabulary there."""
    return (config.vocab_size, *shape[1:]) if name in ("wte.weight", "lm_head.weight") else shape


def _is_gpt2(config: GPTConfig) -> bool:
    """Whether transformers' GPT-2 can be this one."""
    switched = config.rope, config.rmsnorm, config.qk_norm, config.logit_softcap, config.mask_documents
    windowed = 0 < config.sliding_window < config.block_size
    return not any(switched) and not windowed and config.kv_heads == config.n_head and config.mlp != "swiglu"


def _their_config(config: GPTConfig) -> dict[str, Any]:
    """config.json of transformers' GPT-2."""
    end = 50256 if config.vocab_size == 50257 else None  # other vocabularies end a text with another id, or none
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": config.n_layer, "n_head": config.n_head,
        "n_embd": config.n_embd, "n_positions": config.block_size, "vocab_size": config.vocab_size,
        "activation_function": {"gelu": "gelu_new", "relu2": "relu2"}[config.mlp], "layer_norm_epsilon": 1e-5,
        "resid_pdrop": config.dropout, "embd_pdrop": config.dropout, "attn_pdrop": config.dropout,
        "tie_word_embeddings": config.tie_head, "bos_token_id": end, "eos_token_id": end, "dtype": "float32",
    }  # fmt: skip


def _config_of(values: dict[str, Any], folder: Path) -> GPTConfig:
    """The config that a config.json means."""
    kind = values.get("model_type")
    if kind == "gptlab" and isinstance(values.get("gptlab"), dict):
        return _known_vocabulary(values["gptlab"], folder)
    if kind != "gpt2":
        raise ConfigError(f"{folder}/config.json is of a model of type {kind!r}, not 'gpt2': choose a GPT-2.")
    width = values.get("n_embd")
    legal: dict[str, tuple[Any, ...]] = _FIXED | {"n_inner": (None, 4 * width if isinstance(width, int) else None)}
    for name, allowed in legal.items():
        if values.get(name, allowed[0]) not in allowed:
            raise ConfigError(
                f"{folder}/config.json has {name} {values[name]!r}, which GPT-2 as published does not: choose one with "
                f"{allowed[-1]!r}."
            )
    activation = values.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ConfigError(
            f"{folder}/config.json has activation_function {activation!r}: choose a GPT-2 with one of "
            f"{', '.join(ACTIVATIONS)}."
        )
    wanted = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "block_size": "n_positions"}
    missing = [name for name in (*wanted.values(), "vocab_size") if name not in values]
    if missing:
        raise ConfigError(f"{folder}/config.json has no {missing[0]}: give the one that came with the weights.")
    shape = {ours: values[theirs] for ours, theirs in wanted.items()}
    tied = values.get("tie_word_embeddings", True)
    return _known_vocabulary(
        shape | {"vocab_size": values["vocab_size"], "mlp": ACTIVATIONS[activation], "tie_head": tied}, folder
    )


def _known_vocabulary(values: dict[str, Any], source: Path) -> GPTConfig:
    config = GPTConfig.from_dict(values)
    if config.vocab_size == 0:
        raise ConfigError(f"{source} has a vocab_size of 0: give weights with a vocabulary.")
    return config


def _read_folder(folder: Path, config: GPTConfig) -> dict[str, Tensor]:
    """The tensors of a folder, as our linear layers have them."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    names = ["model.safetensors"]
    if not (folder / names[0]).exists():
        index = folder / "model.safetensors.index.json"
        if not index.exists():
            pickled = sorted(path.name for path in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt"))
            hint = f"{pickled[0]} is a pickle, which may hold code" if pickled else "there is no other form of them"
            raise ConfigError(
                f"There is no model.safetensors in {folder}, and {hint}: save the weights as safetensors."
            )
        files = read_object(index, "the index that came with the weights").get("weight_map")
        names = sorted(set(map(str, files.values()))) if isinstance(files, dict) else []
    tensors: dict[str, Tensor] = {}
    for name in names:
        path = folder / Path(name).name  # an index that points elsewhere is not followed
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as safetensors ({error}): save the weights anew.") from None
    if not _is_gpt2(config):
        return tensors
    return {
        name: t.t().contiguous() if name.endswith(TRANSPOSED) and t.dim() == 2 else t for name, t in tensors.items()
    }


def _read_nanogpt(path: Path) -> tuple[GPTConfig, dict[str, Tensor]]:
    """nanoGPT's checkpoint: its `model` by `model_args`; the optimizer's state stays on the disk."""
    import pickle

    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise ConfigError(
            f"{path} holds more than tensors and plain values, which could be code: it is not read."
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a checkpoint of torch ({str(error).splitlines()[0]}): choose another."
        ) from None
    arguments = found.get("model_args") if isinstance(found, dict) else None
    tensors = found.get("model") if isinstance(found, dict) else None
    if not isinstance(arguments, dict) or not isinstance(tensors, dict):
        raise ConfigError(f"{path} has no model_args and model, as nanoGPT's checkpoints do: choose another.")
    if not all(isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in tensors.items()):
        raise ConfigError(f"{path} has something else than tensors in its model: choose another.")
    names = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")
    missing = [name for name in names if name not in arguments]
    if missing:
        raise ConfigError(f"{path} has no {missing[0]} in its model_args: choose a checkpoint that nanoGPT wrote.")
    return _known_vocabulary({name: arguments[name] for name in names}, path), tensors


def _plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by our parameters' names: without what wrappers put before them, and without masks."""
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith(BUFFERS):
            while name.startswith(("module.", "_orig_mod.", "transformer.")):
                name = name.partition(".")[2]
            plain[name] = tensor
    return plain


def _check(tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]], source: Path) -> None:
    """Refuses missing, unknown and misshapen tensors, by name."""
    missing = [name for name in wanted if name not in tensors]
    if missing:
        others = f" and {len(missing) - 1} other tensors" if len(missing) > 1 else ""
        raise ConfigError(f"{source} lacks {missing[0]}{others}: choose weights that fit their config.")
    if unknown := sorted(tensors.keys() - wanted.keys()):
        raise ConfigError(
            f"{source} has {unknown[0]}, which its config leaves no place for: choose weights that fit it."
        )
    for name, shape in wanted.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ConfigError(
                f"{source} has {name} as {kind} {tuple(tensor.shape)}, and its config asks for floating point {shape}: "
                "choose weights that fit their config."
            )
