"""How good a model is on a text: exact loss, perplexity and bits per byte.

    >>> from gptlab.evaluation import evaluate
    >>> evaluate(Run("runs/first"))["bits_per_byte"]    # of the whole validation split

A text is cut into windows of block_size; each token but the first is predicted once, from what stands before it in its
window. Bits per byte are the nats of all predictions over ln 2 and over the bytes that the predicted tokens stand for,
so that models with different tokenizers compare; predicting an end of text costs bits and stands for no byte.

Looks during training take a fixed set of windows, the same for every run on that text with that context. It has a hash,
which run.json keeps: losses whose hashes differ do not compare. Left out on purpose: windows that overlap, which
would give each token more context, and tasks with answers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gptlab import corpus, hardware, sources
from gptlab.batches import Tokens, share, stream_seed
from gptlab.checkpoint import load_any, newest_of
from gptlab.config import ConfigError
from gptlab.documents import Documents
from gptlab.heads import tally
from gptlab.loss import IGNORED
from gptlab.parallel.strategy import Scorer
from gptlab.parallel.world import World
from gptlab.precision import allow_tfloat32, precision
from gptlab.runs import Run
from gptlab.tokenizer import Tokenizer, from_meta

Starts = npt.NDArray[np.int64]
"""Where windows begin, (n,)."""

Text = Tokens | Documents
"""What can be scored: a text, or labelled documents."""


@dataclass(frozen=True)
class Score:
    """What a model made of a text."""

    nats: float
    """Sum over the predicted tokens."""
    tokens: int
    """How many were predicted."""
    bytes: int | None = None
    """What they stand for; None where that is not known."""
    right: int | None = None
    """Of documents, whose classes take the tokens' place, how many were classed rightly."""

    @property
    def loss(self) -> float:
        """Mean nats a token."""
        return self.nats / self.tokens

    @property
    def accuracy(self) -> float | None:
        """Share of documents that were classed rightly; None where tokens were predicted."""
        return None if self.right is None else self.right / self.tokens

    @property
    def perplexity(self) -> float:
        """exp of the loss."""
        return math.exp(min(self.loss, 700.0))  # what a float holds

    @property
    def bits_per_byte(self) -> float | None:
        """Bits of information for each byte of the text."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None


def covering_windows(tokens: Text, block_size: int) -> Starts:
    """Starts of the windows that predict every token but the first once; the last may be shorter. Of documents all."""
    if isinstance(tokens, Documents):
        return np.arange(len(tokens), dtype=np.int64)
    return np.arange(0, len(tokens) - 1, block_size, dtype=np.int64)


def fixed_windows(tokens: Text, count: int, block_size: int) -> Starts:
    """Starts of `count` whole windows that do not overlap, in order: the same at each look and in each run. All of them
    where there are not so many."""
    if isinstance(tokens, Documents):
        return tokens.fixed(count)
    whole = (len(tokens) - 1) // block_size
    generator = np.random.Generator(np.random.Philox(key=stream_seed("eval")))
    return np.sort(generator.permutation(whole)[:count]).astype(np.int64) * block_size


def windows_hash(tokens: Text, starts: Starts, block_size: int) -> str:
    """Hex SHA-256 of the ids in windows, each with the one after it, in order, as little-endian uint32."""
    if isinstance(tokens, Documents):
        return tokens.hash(starts, block_size)
    digest = hashlib.sha256()
    for start in starts:
        digest.update(np.asarray(tokens[start : start + block_size + 1], dtype="<u4").tobytes())
    return digest.hexdigest()


def padded_windows(tokens: Tokens, starts: Starts, block_size: int) -> tuple[Tensor, Tensor]:
    """Ids and targets of windows, each (len(starts), T) int64; what is past the text is id 0 with no target, which
    changes nothing before it. T is block_size, or less where the whole text is shorter."""
    T = min(block_size, len(tokens) - 1)
    ids = torch.zeros(len(starts), T, dtype=torch.int64)
    targets = torch.full_like(ids, IGNORED)
    for row, start in enumerate(starts):
        piece = torch.from_numpy(tokens[start : start + T + 1].astype(np.int64))  # (<= T + 1,)
        ids[row, : len(piece) - 1], targets[row, : len(piece) - 1] = piece[:-1], piece[1:]
    return ids, targets


@dataclass(frozen=True)
class Plain:
    """A `Scorer` over a model that nobody spreads.

    Args:
        part: called with (ids, targets, reduction="sum"), or of a classifier with ids.
        score_rows: sequences that it takes at a time.
    """

    part: nn.Module
    score_rows: int
    dtype: str = "float32"
    collective_score: bool = False

    @torch.no_grad()
    def score(self, ids: Tensor, targets: Tensor) -> Tensor:
        """`tally` of sequences, without gradients."""
        with precision(ids.device, self.dtype):
            return tally(self.part, ids, targets)


def score(
    scorer: Scorer, tokens: Text, starts: Starts, block_size: int, *, world: World, size: int | None = None,
    after_each: Callable[[float], None] = lambda share: None,
) -> Score:  # fmt: skip
    """The model's score on windows, or on documents by number. Collective; leaves the model in the mode it was in.

    Args:
        size: bytes that the predicted tokens stand for.
        after_each: is told after each call of the scorer which share of this process's is done.
    """
    mode, rows = scorer.part.training, scorer.score_rows
    scorer.part.eval()
    sums, count = [0.0, 0.0], 0
    pieces = -(-len(starts) // rows)
    mine = share(pieces, world.replica, world.replicas)
    calls = -(-pieces // world.replicas) if scorer.collective_score else len(mine)
    for call in range(calls):
        at = mine.start + call
        windows = starts[at * rows : (at + 1) * rows] if call < len(mine) else starts[:0]
        take = tokens.rows if isinstance(tokens, Documents) else functools.partial(padded_windows, tokens)
        ids, targets = take(windows, block_size)
        if scorer.collective_score and len(windows) < rows:
            lacking = rows - len(windows)
            ids = torch.cat([ids, ids.new_zeros(lacking, *ids.shape[1:])])
            targets = torch.cat([targets, targets.new_full((lacking, *targets.shape[1:]), IGNORED)])
        found = scorer.score(ids.to(world.device), targets.to(world.device)).tolist()
        sums = [total + new for total, new in zip(sums, [*found, 0.0], strict=False)]
        if world.stage == 0:  # each token counts once in a pipeline
            count += int((targets != IGNORED).sum())
        after_each((call + 1) / calls)
    scorer.part.train(mode)
    nats, right, all_count = world.sum([*sums, count])
    return Score(nats, int(all_count), size, int(right) if isinstance(tokens, Documents) else None)


def split_bytes(text: corpus.Corpus, split: Literal["train", "val"]) -> int:
    """Bytes that the tokens of a split stand for, without the first, which nothing predicts."""
    known, tokens = text.meta.get(split, {}).get("bytes"), text.split(split)
    if known is None:  # nanoGPT's files do not say
        return sum(_bytes(text.tokenizer, tokens[at : at + (1 << 20)]) for at in range(1, len(tokens), 1 << 20))
    return int(known) - _bytes(text.tokenizer, tokens[:1])


def _bytes(tokenizer: Tokenizer, ids: Tokens) -> int:
    """Bytes of the text of ids; an end of text has none."""
    return len(tokenizer.decode_bytes(ids if tokenizer.eot is None else ids[ids != tokenizer.eot]))


def _text_of(run: Run, progress: Callable[[float, str], None]) -> corpus.Corpus:
    """The text that a run trains on, from whatever folder it is asked for: as it was prepared for the run, or else
    prepared anew."""
    config, info = run.config, run.info
    cwd = Path(info.get("cwd") or ".")
    with contextlib.suppress(ConfigError):  # gone, or damaged
        return corpus.open_corpus(cwd / str(info["data"].get("path")))
    return corpus.ensure(corpus.seen_from(cwd, config.data), config.tokenizer, progress, config.task)


def read_text(path: Path, tokenizer: Tokenizer) -> tuple[Tokens, int]:
    """A text file's ids (n,), and the bytes that all but the first stand for.

    Raises:
        ConfigError: it is missing, not UTF-8, has characters that the vocabulary lacks, or fewer than two tokens.
    """
    if not path.is_file():
        raise ConfigError(f"There is no file {path}: give a text file.")
    documents = sources.source(str(path.resolve())).documents()
    pieces = tokenizer.segments(chunk for document in documents for chunk in document.chunks())
    parts = list(tokenizer.encode_stream(pieces))
    ids = np.concatenate(parts) if parts else np.zeros(0, tokenizer.dtype)
    if len(ids) < 2:
        raise ConfigError(f"{path} has {len(ids)} tokens, and the first is not predicted: give a longer text.")
    return ids, _bytes(tokenizer, ids[1:])


def evaluate(
    run: Run, *, split: Literal["train", "val"] = "val", file: Path | None = None, dtype: str | None = None,
    progress: Callable[[float, str], None] = lambda share, message: None,
) -> dict[str, Any]:  # fmt: skip
    """Scores a run's newest checkpoint on a whole split of its text, or on a text file.

    Of a classifier it scores the split's documents; loss is then nats a document.

    Args:
        dtype: precision; None takes the run's own, as far as this machine has it.

    Returns:
        Plain values: what was evaluated and how, loss (nats a token), perplexity, bits_per_byte, tokens,
        bytes; accuracy and documents of a classifier. What does not apply is None.

    Raises:
        ConfigError: no checkpoint yet, another text than the run began on, or a file that cannot be scored.
    """
    newest = newest_of(run)
    config, info = run.config, run.info
    if "setting" not in info or "data" not in info:
        raise ConfigError(f"{run.path / 'run.json'} does not say how the run was trained: bring the file back.")
    kind, _ = hardware.resolve_device("auto")
    dtype, reason = hardware.resolve_dtype(dtype or info["setting"]["dtype"], kind, config)
    model, state = load_any(newest, device=kind)
    tokens: Text
    size: int | None
    classifies = config.task == "classify"
    if file is not None:
        if classifies:
            raise ConfigError(f"{run.name!r} classifies documents, and {file} is read as one text: leave out --file.")
        tokens, size = read_text(file, from_meta(state.get("tokenizer")))
        what = {"file": str(file)}
    else:
        text = _text_of(run, progress)
        if text.sha256 != info["data"].get("sha256"):
            raise ConfigError(f"{config.data} is no longer the text that {run.name!r} began on: give it with --file.")
        tokens, size = text.split(split), None if classifies else split_bytes(text, split)
        if classifies:
            tokens = text.documents(split)
        what = {"split": split}
    allow_tfloat32(dtype)
    found = score(
        Plain(model, info["setting"]["micro_batch_size"], dtype), tokens, covering_windows(tokens, config.block_size),
        config.block_size, world=World(0, 1, torch.device(kind)), size=size,
        after_each=lambda share: progress(share, f"reading {what.get('file', split)}"),
    )  # fmt: skip
    return {
        "run": run.name, "checkpoint": str(newest), "step": state["step"], **what, "device": kind, "dtype": dtype,
        "dtype_reason": reason, "loss": found.loss, "perplexity": None if classifies else found.perplexity,
        "bits_per_byte": found.bits_per_byte, "tokens": None if classifies else found.tokens, "bytes": found.bytes,
        "accuracy": found.accuracy, "documents": found.tokens if classifies else None,
    }  # fmt: skip
