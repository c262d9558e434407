"""What a run is asked to be: the shape of the GPT and how it is trained.

One source for everything that names a setting: command-line flags, widgets, `run.json`, help and docs are derived
from the fields below and from the docstring under each. A config is frozen and checked when it is built, so one
that exists can be trusted; `ConfigError` names the value, the limit and the mend.

    >>> from gptlab.config import TrainConfig
    >>> TrainConfig(n_layer=4, n_embd=256, n_head=4).head_dim
    64

Left out on purpose: configs by size (`presets.py`), what a config costs (`costs.py`), where a run is written
(`runs.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from gptlab import spread, tasks
from gptlab.fields import ConfigError, check_fields, did_you_mean, field_docs, field_types

__all__ = ["LIMITS", "ConfigError", "GPTConfig", "TrainConfig", "did_you_mean", "field_docs", "field_types"]

BYTE_VOCAB = 257
"""256 byte values and the end-of-text id."""
GPT2_VOCAB = 50257
"""50,000 merges, 256 bytes and the end-of-text id (Radford et al. 2019)."""

LIMITS: dict[str, tuple[float, float]] = {
    "n_layer": (1, 1000), "n_head": (1, 1000), "n_embd": (1, 100_000), "block_size": (1, 1_000_000),
    "vocab_size": (0, 10_000_000), "dropout": (0.0, 0.999), "n_kv_head": (0, 1000), "sliding_window": (0, 1_000_000),
    "logit_softcap": (0.0, 1e6), "global_batch_size": (1, 1_000_000),
    "micro_batch_size": (0, 1_000_000), "max_iters": (1, 10**12), "learning_rate": (0.0, 1e3), "min_lr": (0.0, 1e3),
    "warmup_iters": (0, 10**12), "lr_decay_iters": (0, 10**12), "cooldown_iters": (0, 10**12),
    "muon_momentum": (0.0, 0.999999), "weight_decay": (0.0, 1e3), "beta1": (0.0, 0.999999),
    "beta2": (0.0, 0.999999), "grad_clip": (0.0, 1e6), "eval_interval": (1, 10**12), "eval_iters": (1, 10**9),
    "log_interval": (1, 10**9), "checkpoint_interval": (1, 10**12), "keep_checkpoints": (1, 10**6),
    "max_bad_steps": (1, 10**6), "seed": (0, 2**63 - 1), "nproc": (1, 4096), "threads": (0, 4096),
    "hang_timeout_s": (0.0, 1e6),
    "stages": (0, 4096), "stages_per_process": (0, 1000), "pipeline_micro_batches": (0, 1_000_000),
}  # fmt: skip
"""Least and greatest legal value of each number, both included; widgets take their bounds from here."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners")."""

    n_layer: int = 12
    """Transformer blocks."""
    n_head: int = 12
    """Attention heads a block; must divide n_embd."""
    n_embd: int = 768
    """Width: features of a token between blocks."""
    block_size: int = 1024
    """Context: the most tokens that a position can look back on, itself included."""
    vocab_size: int = GPT2_VOCAB
    """Token ids the model knows; the weights are padded to a multiple of 64, the logits are not."""
    dropout: float = 0.0
    """Share of activations dropped while training (0 for pretraining; 0.1 and more for small data)."""
    bias: bool = True
    """Biases in linear layers and LayerNorms, as GPT-2 has them."""
    rope: bool = False
    """Rotary positions in place of learned ones (Su et al. 2021): queries and keys are turned by their place."""
    rmsnorm: bool = False
    """RMSNorm in place of LayerNorm (Zhang & Sennrich 2019): no mean taken away, no bias."""
    qk_norm: bool = False
    """RMSNorm over each head's queries and keys (Henry et al. 2020; Dehghani et al. 2023): scores cannot explode."""
    mlp: Literal["gelu", "swiglu", "relu2"] = "gelu"
    """swiglu is gated, two thirds as wide for equal weights (Shazeer 2020); relu2 is ReLU squared (So et al. 2021)."""
    n_kv_head: int = 0
    """Heads that keys and values have, each shared by several queries (grouped, Ainslie et al. 2023); 0 is n_head."""
    tie_head: bool = True
    """The head is the token embedding (Press & Wolf 2017), as in GPT-2; otherwise it has weights of its own."""
    logit_softcap: float = 0.0
    """Logits are bent to stay below this, cap * tanh(logits / cap) (Gemma Team 2024, "Gemma 2"); 0 leaves them."""
    sliding_window: int = 0
    """Nearest tokens that attention sees, itself included (Beltagy et al. 2020; Jiang et al. 2023); 0 is all."""
    mask_documents: bool = False
    """Attention does not reach back over end-of-text, the vocabulary's last id (Dubey et al. 2024, section 3.2)."""

    def __post_init__(self) -> None:
        check_fields(self, LIMITS)
        if self.n_embd % self.n_head:
            near = [h for h in range(1, self.n_embd + 1) if self.n_embd % h == 0]
            near = sorted(sorted(near, key=lambda h: abs(h - self.n_head))[:4])
            raise ConfigError(
                f"n_embd {self.n_embd} cannot be split over n_head {self.n_head}: choose an n_head that divides it, "
                f"such as {', '.join(map(str, near))}."
            )
        if self.n_head % self.kv_heads:
            legal = [h for h in range(1, self.n_head + 1) if self.n_head % h == 0]
            raise ConfigError(
                f"n_kv_head {self.n_kv_head} cannot be shared evenly by n_head {self.n_head}: "
                f"choose one of {', '.join(map(str, legal))}, or 0 for as many."
            )
        if self.rope and self.head_dim % 2:
            raise ConfigError(
                f"rope turns pairs of features, and n_embd {self.n_embd} over n_head {self.n_head} leaves a head "
                f"{self.head_dim}: choose an n_embd or n_head that gives it an even number."
            )

    @property
    def head_dim(self) -> int:
        """Features of one head, D = C / H."""
        return self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        """Heads that keys and values have."""
        return self.n_kv_head or self.n_head

    @property
    def mlp_width(self) -> int:
        """Features inside an MLP: 4 C, and for swiglu's three matrices 8 C / 3, rounded up to a multiple of 8."""
        return -(-self.n_embd // 3) * 8 if self.mlp == "swiglu" else 4 * self.n_embd

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: vocab_size rounded up to a multiple of 64, which matrix units like."""
        return (self.vocab_size + 63) // 64 * 64

    def shape(self) -> GPTConfig:
        """The model's part alone, which is what a checkpoint needs to rebuild it."""
        return GPTConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(GPTConfig)})

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The config that `to_dict` gave; unknown names are refused with the nearest known one."""
        names = [f.name for f in dataclasses.fields(cls)]
        if not isinstance(values, Mapping):
            raise ConfigError(f"{str(values)[:60]!r} is no config: give settings by their names.")
        for name in values:
            if name not in names:
                raise ConfigError(
                    f"There is no setting {name!r}{did_you_mean(str(name), names)}: leave it out, or mend its name."
                )
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(GPTConfig):
    """A GPT and how to train it: data, batch, schedule, and the processes that do it."""

    n_layer: int = 6
    """Transformer blocks."""
    n_head: int = 6
    """Attention heads a block; must divide n_embd."""
    n_embd: int = 384
    """Width: features of a token between blocks."""
    block_size: int = 256
    """Context: the most tokens that a position can look back on, itself included."""
    vocab_size: int = 0
    """Token ids the model knows. 0 takes the tokenizer's: byte 257, gpt2 50257, char as many as the text has."""
    init_from: str | None = None
    """Weights to begin with: a folder as transformers saves it, nanoGPT's ckpt.pt, a run's folder; none begins anew."""
    task: Literal["lm", "classify"] = "lm"
    """lm predicts each next token; classify gives a document its class, and takes labelled data: a folder with one
    subfolder a class, or a .jsonl file of {"text": ..., "label": ...}."""
    model: Literal["gptlab", "huggingface"] = "gptlab"
    """Whose GPT-2 is trained: our own, or the module of Hugging Face's transformers, begun with the same weights."""
    data: str = "pysrc"
    """What to train on: a source (pysrc, shakespeare), a prepared corpus or its name, a text file or a folder."""
    tokenizer: Literal["byte", "char", "gpt2"] = "byte"
    """How text becomes ids: UTF-8 bytes, the characters the text has, or GPT-2's byte-pair encoding."""
    data_order: Literal["random", "epoch"] = "random"
    """random draws windows anew each step, as nanoGPT does; epoch shows each window once before any comes again."""
    global_batch_size: int = 12
    """Sequences an optimizer step sees, over all processes."""
    micro_batch_size: int = 0
    """Sequences a forward pass sees; accumulation follows from it. 0 takes the largest that fits."""
    max_iters: int = 2000
    """Optimizer steps of the run."""
    learning_rate: float = 1e-3
    """Highest learning rate, reached at the end of the warm-up."""
    min_lr: float | None = None
    """Learning rate after the decay; none takes a tenth of learning_rate."""
    warmup_iters: int = 100
    """Steps over which the learning rate rises linearly."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up: cosine falls from there on; wsd stays and falls in the last cooldown_iters steps."""
    lr_decay_iters: int | None = None
    """Step at which the decay ends; none takes max_iters."""
    cooldown_iters: int | None = None
    """Steps in which wsd falls; none takes a fifth of the way to lr_decay_iters, 0 does not fall."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon is for the blocks' matrices, with AdamW for the rest."""
    muon_momentum: float = 0.95
    """Muon's memory of the gradient."""
    weight_decay: float = 0.1
    """Decoupled decay, on matrices alone; biases, gains are not decayed."""
    beta1: float = 0.9
    """AdamW's memory of the gradient."""
    beta2: float = 0.99
    """AdamW's memory of the squared gradient."""
    grad_clip: float = 1.0
    """Largest norm of the whole gradient; 0 does not clip."""
    eval_interval: int = 250
    """Steps between two looks at the validation loss."""
    eval_iters: int = 20
    """Batches of global_batch_size windows, always the same ones, that such a look takes."""
    log_interval: int = 10
    """Steps between two printed lines; metrics.jsonl has every step."""
    checkpoint_interval: int = 250
    """Steps between two checkpoints; a run that loses a worker goes on from the last. A new best val_loss adds one."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints are kept; the one with the lowest validation loss is kept besides."""
    max_bad_steps: int = 5
    """Steps in a row with a non-finite loss or gradient, each skipped, after which the run ends as diverged."""
    seed: int = 1337
    """Decides initial weights, windows and dropout."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to train; auto takes cuda, then mps, then cpu."""
    dtype: Literal["auto", "float32", "tfloat32", "bfloat16", "float16"] = "auto"
    """Precision of the matrix products; weights stay float32. auto chooses by the device and the width."""
    attention: Literal["auto", "sdpa", "flash", "efficient", "cudnn", "flex", "math"] = "auto"
    """Kernel of attention: sdpa leaves the choice to torch, flash, efficient and cudnn are what it chooses from, flex
    (GPUs) skips what a mask hides, math writes the scores out. auto is flex where a mask hides much, else sdpa."""
    kernels: Literal["auto", "torch", "native"] = "auto"
    """What computes loss and gradients: torch, or on CPUs with AVX-512 (for bfloat16 AMX too) a kernel of our own,
    compiled once. auto takes ours where it serves."""
    compile: Literal["off", "model", "step"] = "off"
    """What torch.compile works on: the model (forward and backward), or step, with clipping and the optimizer too."""
    deterministic: bool = False
    """Demand bit-equal repeats on CUDA, at some speed; a CPU repeats bit for bit anyway."""
    nproc: int = 1
    """Processes that train together."""
    strategy: Literal["ddp", "fsdp", "pp", "pp+ddp", "pp+fsdp"] = "ddp"
    """How they share the work: ddp, each has the whole model and its part of the batch; fsdp, weights, gradients and
    optimizer state are spread over them too; pp, a pipeline of stages; the last two, replicas of such a pipeline."""
    stages: int = 0
    """Parts that a pipeline cuts the model into, balanced by cost; 0 is as many as the processes hold."""
    split: str | Mapping[str, str] | None = None
    """Where a pipeline is cut by hand: right before or right after a block (h.4=beginning,h.8=end)."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zero_bubble", "zbv", "dualpipev"] = (
        "1f1b"
    )
    """In which order a pipeline's stages work on their micro-batches."""
    stages_per_process: int = 0
    """Stages of a pipeline that a process holds; 0 is the usual: 2 where they come round again or turn back, else 1."""
    pipeline_micro_batches: int = 0
    """Micro-batches that go through a pipeline together, some times a step; 0 is all of a step's at once."""
    threads: int = 0
    """CPU threads a process; 0 divides the cores over the processes of this machine."""
    hang_timeout_s: float = 60.0
    """Seconds without a sign of progress after which a worker counts as hung and is replaced, ten times that while it
    starts or saves; 0 waits for ever."""
    share_gpu: bool = False
    """Let several processes use one GPU (over gloo); otherwise more processes than GPUs are refused."""

    def __post_init__(self) -> None:
        if self.vocab_size == 0 and isinstance(self.tokenizer, str):
            known = {"byte": BYTE_VOCAB, "gpt2": GPT2_VOCAB}.get(self.tokenizer, 0)
            object.__setattr__(self, "vocab_size", known)
        if isinstance(self.split, Mapping):
            object.__setattr__(self, "split", spread.split_text(self.split))
        super().__post_init__()
        tasks.check(self)
        if self.micro_batch_size > self.global_batch_size:
            raise ConfigError(
                f"micro_batch_size {self.micro_batch_size} is larger than global_batch_size {self.global_batch_size}: "
                f"use at most {self.global_batch_size}, or 0 to have it chosen."
            )
        if self.min_lr is not None and self.min_lr > self.learning_rate:
            raise ConfigError(
                f"min_lr {self.min_lr:g} is above learning_rate {self.learning_rate:g}: "
                f"use at most {self.learning_rate:g}."
            )
        spread.check(self)

    def alone(self) -> Self:
        """The same training by one process with the whole model."""
        return self.replace(**ALONE)

    def replace(self, **changes: Any) -> Self:
        """This config with some fields changed; another text or tokenizer brings its own vocabulary."""
        if ("tokenizer" in changes or "data" in changes) and "vocab_size" not in changes:
            changes["vocab_size"] = 0
        return self.from_dict(self.to_dict() | changes)


_SHARING = ("nproc", "strategy", "stages", "split", "pipeline_schedule", "stages_per_process", "pipeline_micro_batches")
ALONE: dict[str, Any] = {name: getattr(TrainConfig, name) for name in _SHARING}
"""The fields that say how processes share a training, each as it is where nothing is shared."""
