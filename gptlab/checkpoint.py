"""Checkpoints: complete or absent, checked before they are believed, and plain data throughout.

    checkpoints/step-00000120/
      model.safetensors       the plain model's weights, by parameter name
      optimizer.safetensors   AdamW's state, as PARAMETER.exp_avg and so on
      state.json              step, tokens, time, the model's config, the tokenizer
      manifest.json           size and SHA-256 of each file

A checkpoint is written beside its place, flushed to the disk, and renamed: a kill at any moment leaves the old ones and
no half of the new one. Neither torch nor safetensors notices a flipped byte, so a checkpoint is read only when its
manifest holds; else the next older one is taken and the reason is said. Nothing is unpickled.

    >>> from gptlab.checkpoint import load_model
    >>> model, state = load_model("runs/first/checkpoints/step-00002000")

Left out on purpose: when to save (`training.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gptlab.config import ConfigError, GPTConfig
from gptlab.model import GPT
from gptlab.runs import read_json, write_json

FORMAT = 1
"""Version of the layout, in state.json."""


class CheckpointError(RuntimeError):
    """No checkpoint can be trusted. Starting from step 0 instead would lose the run silently, so nobody does."""


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors by PARAMETER.KEY."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}.{key}"] = value
    return tensors


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Puts the tensors back. The learning rate, decay and fused flag stay those of the optimizer as it was built."""
    for name, parameter in model.named_parameters():
        keys = [key for key in tensors if key.startswith(f"{name}.") and "." not in key[len(name) + 1 :]]
        if keys:
            optimizer.state[parameter] = {key[len(name) + 1 :]: tensors[key].clone() for key in keys}


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    *,
    keep: int,
    may_write: Callable[[], None] = lambda: None,
) -> Path:
    """Writes a checkpoint of the plain model and removes all but the newest `keep`.

    Args:
        folder: the run's `checkpoints`.
        state: plain values for state.json.
        may_write: called before the checkpoint takes its place; raises if another attempt owns the run.
    """
    folder.mkdir(exist_ok=True)
    for half in folder.glob(".step-*"):
        shutil.rmtree(half, ignore_errors=True)
    final = folder / f"step-{step:08d}"
    beside = folder / f".step-{step:08d}.{os.getpid()}"
    beside.mkdir()
    try:
        save_file(
            {name: value.contiguous() for name, value in model.state_dict().items()}, beside / "model.safetensors"
        )
        save_file(optimizer_state(model, optimizer), beside / "optimizer.safetensors")
        write_json(beside / "state.json", {"format": FORMAT, "step": step, **state})
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(beside.iterdir())
        }
        write_json(beside / "manifest.json", {"format": FORMAT, "files": files})
        for path in beside.iterdir():
            _fsync(path)
        _fsync(beside)
        may_write()
        if final.exists():  # a step that is done again after a bad checkpoint
            shutil.rmtree(final)
        os.rename(beside, final)
        _fsync(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    for old in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def fault(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None if its manifest holds."""
    manifest = read_json(checkpoint / "manifest.json")
    if manifest is None:
        return "manifest.json is missing or unreadable"
    if manifest.get("format") != FORMAT:
        return f"its format is {manifest.get('format')!r}, not {FORMAT}"
    for name, entry in manifest["files"].items():
        path = checkpoint / Path(name).name
        if not path.is_file() or path.is_symlink():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {entry['bytes']}"
        if _sha256(path) != entry["sha256"]:
            return f"{name} does not have its checksum"
    missing = {"model.safetensors", "optimizer.safetensors", "state.json"} - set(manifest["files"])
    return f"{min(missing)} is not in its manifest" if missing else None


def newest_good(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that can be trusted; None where none was ever written.

    Args:
        say: is told of each one that is passed over, and why.

    Raises:
        CheckpointError: there are checkpoints, and all are bad.
    """
    faults = []
    for checkpoint in sorted(folder.glob("step-*"), reverse=True):
        wrong = fault(checkpoint)
        if wrong is None:
            return checkpoint
        faults.append(f"{checkpoint.name}: {wrong}")
        say(f"checkpoint {checkpoint.name} is passed over: {wrong}")
    if faults:
        raise CheckpointError(f"no checkpoint in {folder} can be trusted ({'; '.join(faults)})")
    return None


def restore(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[str, Any]:
    """Loads a checked checkpoint into a model and its optimizer; returns state.json."""
    model.load_state_dict(load_file(checkpoint / "model.safetensors", device=str(device)))
    restore_optimizer(model, optimizer, load_file(checkpoint / "optimizer.safetensors", device=str(device)))
    return json.loads((checkpoint / "state.json").read_text())


def load_model(checkpoint: str | os.PathLike[str], *, device: str = "cpu") -> tuple[GPT, dict[str, Any]]:
    """A model and its state.json from a checkpoint, in eval mode.

    Raises:
        ConfigError: the checkpoint is incomplete or damaged.
    """
    folder = Path(checkpoint)
    wrong = fault(folder)
    if wrong:
        raise ConfigError(f"The checkpoint {folder} cannot be read ({wrong}): choose another one.")
    state = read_json(folder / "state.json") or {}
    try:
        with torch.device("meta"):
            model = GPT(GPTConfig.from_dict(state["model"]))
        weights = load_file(folder / "model.safetensors", device=device)
        model.load_state_dict(weights, assign=True)
    except (KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"The checkpoint {folder} does not hold the model that it names ({error}).") from None
    return model.eval(), state


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
