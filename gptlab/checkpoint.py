"""Checkpoints: complete or absent, checked before they are believed, and plain data throughout.

    checkpoints/step-00000120/
      model.safetensors       the plain model's weights, by parameter name
      optimizer.safetensors   the optimizer's tensors, as PARAMETER.exp_avg and so on
      state.json              step, time, validation loss, the model's config, the tokenizer
      manifest.json           size and SHA-256 of each file

A checkpoint is written beside its place, flushed to the disk, read back from there, and renamed: a kill at any moment
leaves the old ones and no half of the new one. Neither torch nor safetensors notices a flipped byte, so a checkpoint is
read only when its manifest holds; else the next older one is taken and the reason is said. Nothing is unpickled, no
link is followed, and no name in a manifest leads out of its folder.

Every strategy writes the same files: a state that lies over several processes is gathered to the main one first. So a
checkpoint goes on under any other strategy and number of processes, one manifest guards the whole of it, and nothing
is pickled, which torch's own sharded format (`torch.distributed.checkpoint`) does with its metadata. The price is that
one process holds weights and moments as a whole while it writes.

    >>> from gptlab.checkpoint import load_model
    >>> model, state = load_model("runs/first/checkpoints/step-00002000")

Left out on purpose: when to save (`training.py`), and saving while training goes on (`saving.py`).
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gptlab import huggingface
from gptlab.config import ConfigError, GPTConfig
from gptlab.heads import SequenceClassifier
from gptlab.manifest import FORMAT, MANIFEST, MODEL, OPTIMIZER, STATE, sha256
from gptlab.manifest import fault as fault
from gptlab.model import GPT
from gptlab.runs import Run, read_json, write_json
from gptlab.tokenizer import from_meta


class CheckpointError(RuntimeError):
    """No checkpoint can be trusted, or one cannot be written. Going on regardless would lose the run silently."""


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """All that a checkpoint holds of the plain model and its optimizer: by file, then by name. No copies."""
    state = {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    return {MODEL: dict(model.state_dict()), OPTIMIZER: state}


def write(
    folder: Path,
    step: int,
    files: Mapping[str, Mapping[str, Tensor]],
    state: dict[str, Any],
    *,
    keep: int,
    may_write: Callable[[], None] = lambda: None,
) -> Path:
    """Writes a checkpoint, then removes all but the newest `keep` and the one with the lowest `val_loss`.

    Args:
        folder: the run's `checkpoints`.
        files: tensors by file, as `tensors` gives them; nobody may change them meanwhile.
        state: plain values for state.json; `val_loss` is the validation loss at this very step, where it is known.
        may_write: called before the checkpoint takes its place; raises if another attempt owns the run.

    Raises:
        CheckpointError: the disk is full, refuses, or does not give back what was written. The older ones are whole.
    """
    beside = folder / f".step-{step:08d}.{os.getpid()}"
    try:
        folder.mkdir(exist_ok=True)
        for half in folder.glob(".step-*"):
            shutil.rmtree(half, ignore_errors=True)
        beside.mkdir()
        try:
            _fill(beside, files, {"format": FORMAT, "step": step, **state})
            may_write()
            final = _take_place(beside, folder / f"step-{step:08d}")
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written ({error}): those before it in {folder} are whole, "
            "and the run can be resumed from there"
        ) from error
    _prune(folder, step, keep)
    return final


def _fill(beside: Path, files: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any]) -> None:
    """Writes the files, and believes the disk only once it has given them back."""
    for name, named in files.items():
        save_file({key: value.contiguous() for key, value in named.items()}, beside / name)
    write_json(beside / STATE, state)
    entries = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in sorted(beside.iterdir())}
    write_json(beside / MANIFEST, {"format": FORMAT, "files": entries})
    for path in beside.iterdir():
        _fsync(path)
    _fsync(beside)
    if wrong := fault(beside):
        raise OSError(f"what was written does not come back: {wrong}")


def _take_place(beside: Path, final: Path) -> Path:
    if final.exists():  # a step that is done again after a bad checkpoint
        _remove(final)
    os.rename(beside, final)
    _fsync(final.parent)
    return final


def _prune(folder: Path, step: int, keep: int) -> None:
    """Removes all checkpoints but the newest `keep` up to `step` and the best of these.

    Those past `step` were passed over as bad when the run was resumed before them.
    """
    found = sorted(folder.glob("step-*"))
    behind = [path for path in found if path.name <= f"step-{step:08d}"]
    kept = {*behind[-keep:], *_by_val_loss(behind)[:1]}
    for path in found:
        if path not in kept:
            with contextlib.suppress(OSError):
                _remove(path)


def _remove(checkpoint: Path) -> None:
    """Out of sight at once, then off the disk: a kill in between leaves no half of it in sight."""
    gone = checkpoint.with_name(f".{checkpoint.name}.{os.getpid()}.gone")
    os.rename(checkpoint, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _by_val_loss(checkpoints: list[Path]) -> list[Path]:
    """Those whose validation loss is known, the lowest first; of equal ones the earlier."""
    losses = {path: (read_json(path / STATE) or {}).get("val_loss") for path in checkpoints}
    known = {path: loss for path, loss in losses.items() if isinstance(loss, float) and math.isfinite(loss)}
    return sorted(known, key=lambda path: (known[path], path.name))


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


def newest_of(run: Run, say: Callable[[str], None] = lambda _: None) -> Path:
    """The newest checkpoint of a run that can be trusted, for who wants to use its model.

    Args:
        say: is told of each one that is passed over, and why.

    Raises:
        ConfigError: there is none.
    """
    try:
        newest = newest_good(run.path / "checkpoints", say)
    except CheckpointError as error:
        said = str(error)
        raise ConfigError(f"{said[0].upper()}{said[1:]}: bring one back, or choose another run.") from None
    if newest is None:
        raise ConfigError(f"The run {run.name!r} has no checkpoint yet: wait for its first, or train it to the end.")
    return newest


def read(checkpoint: Path, shapes: Mapping[str, torch.Size]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """A checked checkpoint's tensors, by file and name, on the CPU, and its state.json. Whoever loads them takes to its
    device what it needs: a GPU may have no room for the whole beside what trains there.

    Args:
        shapes: of the parameters that it is to have, by name.

    Raises:
        ConfigError: it is of another model.
    """
    weights, moments = load_file(checkpoint / MODEL), load_file(checkpoint / OPTIMIZER)
    _check_shapes(checkpoint, shapes, weights)
    owners = {name: name.rpartition(".")[0] for name in moments}  # PARAMETER.KEY
    wanted = {name: shapes[owners[name]] for name in moments if owners[name] in shapes}
    # A count of steps has no dimensions; the rest has its parameter's.
    _check_shapes(checkpoint, wanted, {name: value for name, value in moments.items() if value.dim()}, some=True)
    return {MODEL: weights, OPTIMIZER: moments}, read_json(checkpoint / STATE) or {}


def load_tensors(files: Mapping[str, Mapping[str, Tensor]], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gives a plain model and its optimizer what `tensors` gave, or weights alone.

    The learning rate, decay and fused flag stay those of the optimizer as it was built.
    """
    model.load_state_dict(files[MODEL])
    parameters = dict(model.named_parameters())
    for name, value in files.get(OPTIMIZER, {}).items():
        owner, _, key = name.rpartition(".")
        p = parameters[owner]
        optimizer.state[p][key] = value.to(p.device, copy=True)  # of its own, wherever the file's bytes lie


def _check_shapes(
    checkpoint: Path, wanted: Mapping[str, torch.Size], found: Mapping[str, Tensor], *, some: bool = False
) -> None:
    """Refuses tensors that are not those of the model, and says which.

    Args:
        some: whether tensors may be lacking.
    """
    names = [name for name in wanted if name in found or not some] + [name for name in found if name not in wanted]
    wrong = []
    for name in names:
        there = _shape(found[name].shape) if name in found else "absent"
        here = _shape(wanted[name]) if name in wanted else "absent"
        if there != here:
            wrong.append(f"{name} is {there} there and {here} here")
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ConfigError(
            f"The checkpoint {checkpoint} is of another model ({'; '.join(wrong[:3])}{more}): "
            "use the config that it was made with, or start a new run."
        )


def _shape(size: torch.Size) -> str:
    return " x ".join(map(str, size)) or "a number"


def load_model(checkpoint: str | os.PathLike[str], *, device: str = "cpu") -> tuple[GPT, dict[str, Any]]:
    """A GPT and its state.json from a checkpoint, in eval mode.

    Raises:
        ConfigError: the checkpoint is incomplete or damaged, or a classifier's.
    """
    model, state = load_any(checkpoint, device=device)
    if not isinstance(model, GPT):
        raise ConfigError(f"The checkpoint {checkpoint} is a classifier's, which writes no text: choose another run.")
    return model, state


def load_any(
    checkpoint: str | os.PathLike[str], *, device: str = "cpu"
) -> tuple[GPT | SequenceClassifier, dict[str, Any]]:
    """The same for either: a GPT, or a classifier, whose classes are in state.json."""
    folder = Path(checkpoint)
    wrong = fault(folder)
    if wrong:
        raise ConfigError(f"The checkpoint {folder} cannot be read ({wrong}): choose another one.")
    state = read_json(folder / STATE) or {}
    try:
        with torch.device("meta"):
            model = _empty(state)
        weights = load_file(folder / MODEL, device=device)
        if state.get("origin") == "huggingface":
            weights = huggingface.ours(weights, GPTConfig.from_dict(state["model"]))
        _check_shapes(folder, {name: value.shape for name, value in model.state_dict().items()}, weights)
        model.load_state_dict(weights, assign=True)
    except (AttributeError, KeyError, OSError, RuntimeError, SafetensorError, TypeError) as error:
        raise ConfigError(
            f"The checkpoint {folder} does not hold the model that it names ({error}): choose another one."
        ) from None
    return model.eval(), state


def _empty(state: dict[str, Any]) -> GPT | SequenceClassifier:
    """The model that a state.json is of, on the meta device."""
    config = GPTConfig.from_dict(state["model"])
    if names := state.get("classes"):
        return SequenceClassifier(config, len(names), pad_id=from_meta(state["tokenizer"]).eot)
    return GPT(config)


def _fsync(path: Path) -> None:
    """To the disk; and out of the system's memory, so that whoever reads it next reads the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
