"""What is benched: a model, how it is computed, and what against; a grid of them from axes with several values.

    >>> from gptlab.benchmark.cells import Plan, grid
    >>> [cell.label for cell in grid(Plan("train", "tiny"), {"backend": ["eager", "inductor"], "nproc": [1, 2]})[0]]
    ['train tiny eager', 'train tiny eager nproc=2', 'train tiny inductor', 'train tiny inductor nproc=2']

A cell is plain values: the process that runs it gets it as JSON. Left out on purpose: running it (`isolation.py`,
`cell.py`), the command line of the upstream harness (`upstream.py`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptlab import initial, tasks, weights
from gptlab.config import ALONE, ConfigError, TrainConfig, did_you_mean
from gptlab.given import read_object
from gptlab.presets import PRESETS, preset
from gptlab.runs import Run

BACKENDS: dict[str, dict[str, Any]] = {
    "config": {},
    "eager": {"kernels": "torch", "compile": "off"},
    "inductor": {"kernels": "torch", "compile": "model"},
    "inductor_step": {"kernels": "torch", "compile": "step"},
    "aot_eager": {"kernels": "torch", "compile": "model"},
    "cudagraphs": {"kernels": "torch", "compile": "model"},
    "native": {"kernels": "native", "compile": "off"},
}
"""Ways to compute, and the config's fields that ask for them; `config` leaves them as the model's config has them."""
KINDS = {"train": ("train",), "generate": ("generate",), "all": ("train", "generate")}
AGAINST = {"train": ("plain", "eager", "transformers"), "generate": ("nocache", "eager", "transformers")}
"""Opponents by kind, the default first; where a backend is named, `eager` is the default."""
AXES = ("backend", "dtype", "attention", "nproc", "strategy", "global_batch_size", "block_size")
"""What a grid can have several values of, the first slowest."""
SAMPLE_TOKENS = 8192
"""Tokens of a benched step where no batch size is given, at least a sequence: a larger batch only repeats them."""
TORCHBENCH = {
    "n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304, "tokenizer": "gpt2",
    "learning_rate": 6e-4, "global_batch_size": 1,
}  # fmt: skip
"""The model and optimizer of the nanogpt folder in pytorch/benchmark; its vocabulary is padded already."""
TORCHBENCH_TOKENS = {"prompt": 64, "new_tokens": 32}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row of a bench."""

    kind: str
    """train or generate."""
    model: str
    """As it was named."""
    backend: str
    against: str
    config: TrainConfig
    """Of the benched side."""
    opponent: TrainConfig
    """Of the other side; the same, unless ours was tuned."""
    new_tokens: int = 128
    prompt: int = 16
    recipe: str = ""
    """`torchbench` trains on the mean of the last position's logits, and samples as that folder does."""
    accuracy: bool = True
    performance: bool = True
    force: bool = False
    """Race it even where it is not right."""
    memory: bool = True
    """Measure each side's peak memory, in processes of their own."""
    pairs: int = 30
    """The most timed turns of each side."""
    budget_s: float = 30.0
    """Seconds of timed turns after which a race ends, tight or not."""
    limit_s: float = 600.0
    """Seconds that each of the cell's processes may take."""
    outputs: str | None = None
    """Folder that gets the compared tensors."""

    @property
    def label(self) -> str:
        """For people: what differs from the plainest cell."""
        parts = [self.kind, self.model, self.backend]
        for name, plain in (("dtype", "auto"), ("attention", "auto"), ("nproc", 1), ("strategy", "ddp")):
            if getattr(self.config, name, plain) != plain:
                parts.append(f"{name}={getattr(self.config, name)}" if name == "nproc" else getattr(self.config, name))
        return " ".join(map(str, parts))

    @property
    def tokens(self) -> int:
        """Tokens of a turn, over all processes: seen in training, made in sampling."""
        length = self.length if self.kind == "train" else self.new_tokens
        return self.config.global_batch_size * length

    @property
    def length(self) -> int:
        """Tokens of a training sequence."""
        return self.prompt if self.recipe else self.config.block_size

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return vars(self) | {"config": self.config.to_dict(), "opponent": self.opponent.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Cell:
        """What `to_dict` gave."""
        configs = {name: TrainConfig.from_dict(values[name]) for name in ("config", "opponent")}
        return cls(**(values | configs))


def config_of_model(name: str, runs_dir: str | None = None, **changes: Any) -> TrainConfig:
    """The config of a preset, a shape such as 4/4/128 (layers, heads, width), a JSON file of fields, a folder as
    transformers saves it (with its weights), or a run (with its weights, once it has some)."""
    if name in PRESETS:
        return preset(name, **changes)
    if name == "torchbench":
        return TrainConfig.from_dict(TORCHBENCH | changes)
    if shape := re.fullmatch(r"(\d+)/(\d+)/(\d+)", name):
        n_layer, n_head, n_embd = map(int, shape.groups())
        return TrainConfig.from_dict({"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd} | changes)
    path = Path(name).expanduser()
    if path.suffix == ".json":
        return TrainConfig.from_dict(read_object(path, "a config") | changes)
    if (path / "config.json").is_file():
        found = weights.read_config(path)
        vocabulary = {"vocab_size": found.vocab_size} if found else {}
        return TrainConfig.from_dict(initial.shape_of(path) | vocabulary | {"init_from": str(path.resolve())} | changes)
    run = Run.open(name, runs_dir)
    values = run.config.to_dict() | {"init_from": None}
    if any((run.path / "checkpoints").glob("step-*")):
        values["init_from"] = str(run.path.resolve())
    return TrainConfig.from_dict(values | changes)


@dataclass(frozen=True)
class Plan:
    """What all cells of a bench have in common."""

    kind: str
    model: str
    against: str = ""
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the config."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the cells."""
    runs_dir: str | None = None


def grid(plan: Plan, axes: Mapping[str, Sequence[Any]]) -> tuple[list[Cell], list[str]]:
    """Every combination of the axes' values, the first axis slowest; and what there is to say about them.

    Raises:
        ConfigError: what is not there to bench, or cannot be.
    """
    if plan.kind not in KINDS:
        raise ConfigError(f"bench cannot {plan.kind!r}{did_you_mean(plan.kind, KINDS)}: choose train, generate or all.")
    for value in axes.get("backend", ()):
        if value not in BACKENDS:
            hint = did_you_mean(value, BACKENDS)
            raise ConfigError(f"There is no backend {value!r}{hint}: choose one of {', '.join(BACKENDS)}.")
    cells: list[Cell] = []
    notes: list[str] = []
    for kind in KINDS[plan.kind]:
        kept = {name: list(dict.fromkeys(axes[name])) for name in AXES if axes.get(name)}
        if kind == "generate":
            dropped = [name for name in ("nproc", "strategy") if kept.pop(name, [1]) not in ([1], ["ddp"])]
            notes += [f"generate runs in one process: its rows have no {name}." for name in dropped]
            if plan.options.get("outputs"):
                notes.append("generate compares as it goes and keeps nothing: --collect-outputs is for train.")
        for values in itertools.product(*kept.values()):
            cells.append(_cell(plan, kind, dict(zip(kept, values, strict=True))))
    return cells, notes


def _cell(plan: Plan, kind: str, values: dict[str, Any]) -> Cell:
    named = values.pop("backend", None)
    backend = named or "config"
    against = plan.against or ("eager" if named else AGAINST[kind][0])
    if against not in AGAINST[kind]:
        raise ConfigError(f"bench {kind} cannot race {against!r}: choose {' or '.join(AGAINST[kind])}.")
    recipe = "torchbench" if plan.model == "torchbench" else ""
    changes = {**plan.changes, **values, **BACKENDS[backend]}
    if kind == "generate":
        changes = {"global_batch_size": 1, "micro_batch_size": 0} | changes | ALONE
    nproc = changes.get("nproc", 1)
    if recipe and kind == "train" and "global_batch_size" not in changes:
        changes["global_batch_size"] = nproc  # one sequence a process, as upstream's ddp has it
    if "global_batch_size" not in changes:  # the presets' batches are for training runs
        model = config_of_model(plan.model, plan.runs_dir, **changes | ALONE | {"micro_batch_size": 0})
        most = max(SAMPLE_TOKENS // model.block_size, changes.get("micro_batch_size", 0), 1) * nproc
        changes["global_batch_size"] = min(model.global_batch_size, most)
    config = config_of_model(plan.model, plan.runs_dir, **changes | {"nproc": nproc})
    if not config.vocab_size:
        from gptlab import corpus

        config = config.replace(vocab_size=corpus.ensure(config.data, config.tokenizer).vocab_size)
    # Both sides take the same steps: one learning rate from the first on.
    config = config.replace(warmup_iters=0, min_lr=config.learning_rate)
    options: dict[str, Any] = {**(TORCHBENCH_TOKENS if recipe else {}), **plan.options}
    if kind == "generate" and "new_tokens" not in options:
        options["new_tokens"] = max(1, min(Cell.new_tokens, config.block_size - options.get("prompt", Cell.prompt)))
    cell = Cell(
        kind=kind, model=plan.model, backend=backend, against=against, config=config, opponent=config, recipe=recipe,
        **options,
    )  # fmt: skip
    _check(cell)
    return cell


def _check(cell: Cell) -> None:
    """Refuses what cannot be timed."""
    tasks.check_measured(cell.config, "benched", "take another run")
    if cell.pairs < 1:
        raise ConfigError(f"pairs {cell.pairs} is too few: give 1 or more.")
    if cell.against == "transformers" and importlib.util.find_spec("transformers") is None:
        raise ConfigError("transformers is not installed: pip install 'gptlab[huggingface]', or race plain or nocache.")
    if cell.kind == "train":
        if cell.recipe and cell.against == "transformers":
            raise ConfigError("torchbench's step is raced against plain or eager: choose one of them.")
        return
    if cell.new_tokens < 1 or cell.prompt < 1:
        raise ConfigError("bench generate needs a prompt and new tokens: give 1 or more of each.")
    if cell.config.dtype not in ("auto", "float32", "bfloat16"):
        raise ConfigError(f"bench generate has no dtype {cell.config.dtype!r}: choose float32 or bfloat16.")
    if cell.prompt + cell.new_tokens > cell.config.block_size:
        raise ConfigError(
            f"{cell.prompt} and {cell.new_tokens} tokens are more than block_size {cell.config.block_size}: use fewer."
        )
