"""Logs of nanoGPT's train.py as runs: someone's old curves in the same plots and tables.

    $ gptlab runs import old.log --name old
    >>> from gptlab.foreign import import_log
    >>> import_log(Path("old.log"), name="old", runs_dir=Path("runs")).frame()

Read are the config that train.py echoes, the tokens an iteration, `iter` and `step` lines, and the same lines as
DLRover's example prints them. What the log does not say is nanoGPT's default, and the number of parameters it prints is
held against the shape. nanoGPT's MFU is that of an A100 whatever the device, so it is kept under another name. Text is
data: values are literals, nothing is executed.

Left out on purpose: its checkpoints (`init_from` reads those).
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptlab.config import ConfigError, TrainConfig
from gptlab.given import check_input
from gptlab.recording import Claim, RunWriter, check_name, create_run
from gptlab.runs import Run

# nanoGPT, train.py, as of 2023 to 2025: what a log that echoes nothing was trained with.
_DEFAULTS: dict[str, Any] = {
    "n_layer": 12, "n_head": 12, "n_embd": 768, "dropout": 0.0, "bias": False, "block_size": 1024, "batch_size": 12,
    "gradient_accumulation_steps": 40, "max_iters": 600_000, "learning_rate": 6e-4, "min_lr": 6e-5,
    "warmup_iters": 2000, "lr_decay_iters": 600_000, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95,
    "grad_clip": 1.0, "eval_interval": 2000, "eval_iters": 200, "log_interval": 1, "dataset": "openwebtext",
}  # fmt: skip
_SAME = (
    "n_layer", "n_head", "n_embd", "dropout", "bias", "block_size", "max_iters", "learning_rate", "min_lr",
    "warmup_iters", "lr_decay_iters", "weight_decay", "beta1", "beta2", "grad_clip", "eval_interval", "eval_iters",
    "log_interval",
)  # fmt: skip
_NUMBER = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))"
_ITER = re.compile(
    rf"^iter (\d{{1,12}}): loss {_NUMBER}, time {_NUMBER} ?ms(?:, mfu {_NUMBER}%)?(?:, lr {_NUMBER})?"
    rf"(?:, total time {_NUMBER}s)?"
)
_STEP = re.compile(rf"^step (\d{{1,12}}): train loss {_NUMBER}, val loss {_NUMBER}")
_SETTING = re.compile(r"^(?:Overriding: )?(\w+) = ([^#]+)")
_DEFAULT_VOCAB = 50304
"""nanoGPT's vocabulary where the data has no meta.pkl: GPT-2's, padded."""


NO_LITERAL = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)
"""What `ast.literal_eval` raises of a text that is no literal."""


def import_log(path: Path, *, name: str, runs_dir: Path, given: Mapping[str, Any] | None = None) -> Run:
    """Makes a run directory of a log.

    Args:
        given: fields of the config that the log does not say, or says wrong.

    Raises:
        ConfigError: no log of nanoGPT, or a shape that does not have the parameters that the log counts.
    """
    check_name(name)
    check_input(path, "a log of nanoGPT's train.py")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    values, parameters = _settings(lines)
    config = _config(values, dict(given or {}))
    rows = _rows(lines, config)
    if not any("loss" in row for row in rows):
        raise ConfigError(f"{path} has no line like `iter 10: loss 3.1321, time 290.27ms`: give nanoGPT's output.")
    _check_parameters(config, parameters, path)
    run = create_run(config, name, runs_dir, imported={"from": str(path.resolve()), "format": "nanoGPT"})
    with Claim(run.path) as claim:
        writer = RunWriter(run.path, claim.new_attempt())
        for row in rows:
            writer.log(row)
        last = max(row["step"] for row in rows)
        val_loss = next((row["val_loss"] for row in reversed(rows) if row.get("val_loss") is not None), None)
        status = "finished" if last >= config.max_iters else "stopped"
        tokens = last * config.global_batch_size * config.block_size
        time_s = next((row["time_s"] for row in reversed(rows) if "time_s" in row), None)
        writer.result(status, step=last, val_loss=val_loss, tokens=tokens, time_s=time_s)
        writer.status(status, step=last, max_iters=config.max_iters, world_size=1, pids=[], heartbeats=[])
    return run


def _settings(lines: list[str]) -> tuple[dict[str, Any], float | None]:
    """What the lines before the first iteration set, and the number of parameters they print."""
    values, parameters = dict(_DEFAULTS), None
    for line in lines:
        if _ITER.match(line):
            break
        if found := re.match(r"^tokens per iteration will be: (\d[\d,]{,30})", line):
            values["tokens"] = int(found[1].replace(",", ""))
        elif found := re.match(r"^found vocab_size = (\d{1,30})", line):
            values["vocab_size"] = int(found[1])
        elif found := re.match(r"^number of parameters: (\d+\.?\d*)M", line):
            parameters = 1e6 * float(found[1])
        elif found := _SETTING.match(line):
            try:
                value = ast.literal_eval(found[2].strip())
            except NO_LITERAL:
                continue  # an expression: prose, or a setting that no curve needs
            numeric = type(_DEFAULTS.get(found[1])) in (int, float)
            if numeric and (type(value) not in (int, float) or not 0 <= value < math.inf):
                raise ConfigError(f"The log sets {found[1]} to {value!r}, which is no number: mend that line.")
            values[found[1]] = value
    return values, parameters


def _config(values: dict[str, Any], given: dict[str, Any]) -> TrainConfig:
    fields = {name: values[name] for name in _SAME}
    sequences = values["batch_size"] * values["gradient_accumulation_steps"]
    if "tokens" in values:
        shape = TrainConfig.from_dict({"block_size": given.get("block_size", fields["block_size"])})
        sequences = max(1, values["tokens"] // shape.block_size)
    fields["min_lr"] = min(fields["min_lr"], fields["learning_rate"])
    known = "vocab_size" in values
    fields |= {
        "global_batch_size": sequences, "micro_batch_size": min(values["batch_size"], sequences),
        "vocab_size": values["vocab_size"] if known else _DEFAULT_VOCAB, "tokenizer": "char" if known else "gpt2",
        "data": str(values["dataset"]),
    }  # fmt: skip
    return TrainConfig.from_dict(fields | given)


def _rows(lines: list[str], config: TrainConfig) -> list[dict[str, Any]]:
    """A row for each iteration and each look at the validation loss.

    nanoGPT counts iterations from 0 and prints the loss before the update; a run counts the steps that were taken.
    """
    tokens = config.global_batch_size * config.block_size
    rows: list[dict[str, Any]] = []
    seconds, before = 0.0, -1
    for line in lines:
        if found := _STEP.match(line):
            rows.append({"step": int(found[1]), "val_loss": _plain(found[3]), "train_loss": _plain(found[2])})
        elif found := _ITER.match(line):
            iteration, step_s = int(found[1]), max(float(found[3]), 1e-3) / 1000
            if not math.isfinite(step_s):
                continue
            seconds = float(found[6]) if found[6] else seconds + step_s * max(1, iteration - before)
            before = iteration
            row = {
                "step": iteration + 1, "tokens": (iteration + 1) * tokens, "loss": _plain(found[2]), "step_s": step_s,
                "tokens_per_s": tokens / step_s, "mfu": None, "time_s": seconds,
            }  # fmt: skip
            if found[4] and float(found[4]) >= 0:
                row["mfu_of_an_a100"] = float(found[4]) / 100
            if found[5]:
                row["lr"] = float(found[5])
            rows.append(row)
    return rows


def _check_parameters(config: TrainConfig, printed: float | None, path: Path) -> None:
    """nanoGPT prints the parameters without the position embedding, in millions with two digits."""
    from gptlab import costs

    count = costs.parameters(config)
    ours = count.total - count.position_embedding
    if printed is not None and abs(ours - printed) > 0.01 * printed + 5000:
        raise ConfigError(
            f"{path} counts {printed / 1e6:.2f}M parameters, and {config.n_layer} layers of width {config.n_embd} with "
            f"{config.vocab_size} tokens have {ours / 1e6:.2f}M: say the shape, as in --set n_layer=6."
        )


def _plain(text: str) -> float | None:
    """A number that JSON knows, or None."""
    value = float(text)
    return value if math.isfinite(value) else None
