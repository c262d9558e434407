"""How a pipeline is laid over a run's processes: stages, processes, replicas, micro-batches, and what fits together.

    >>> from gptlab.config import TrainConfig
    >>> from gptlab.spread import layout
    >>> config = TrainConfig(strategy="pp+ddp", nproc=4, stages=2, global_batch_size=16, micro_batch_size=2)
    >>> layout(config, 4)
    Layout(stages=2, per_process=1, processes=2, replicas=2)

A pipeline's `stages` are the parts that the model is cut into. Its `processes` hold `per_process` of them each: one
under gpipe and 1f1b; under the interleaved schedules those that come round again (0 and 2, 1 and 3), under the V-shaped
ones the ends towards each other (0 and 3, 1 and 2). The rest of the world are further replicas of the pipeline.

All is arithmetic, so that what cannot work is refused before anything starts. Left out on purpose: where the model is
cut (`cuts.py`) and what a schedule does (`parallel/pipeline/schedules.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptlab import tasks
from gptlab.fields import ConfigError, did_you_mean

if TYPE_CHECKING:
    from gptlab.config import TrainConfig

PIPELINES = ("pp", "pp+ddp", "pp+fsdp")
"""Strategies with a pipeline."""
MICRO_BATCH_RULE = (
    "the largest that leaves a pipeline twice as many micro-batches as stages and that the memory holds; where none "
    "does, the smallest that its schedule can run"
)
"""How `pipeline_micro_batch` chooses, in words for run.json."""


@dataclass(frozen=True)
class Schedule:
    """What a schedule asks for."""

    torch_name: str
    """Its class in torch.distributed.pipelining."""
    per_process: int
    """Stages a process holds where nothing else is said."""
    fixed: bool = False
    """Whether it can hold no other number."""
    v_shaped: bool = False
    """Whether a process holds stages i and S - 1 - i."""
    splits: bool = False
    """Whether the backward of inputs and that of weights are apart."""


SCHEDULES = {
    "gpipe": Schedule("ScheduleGPipe", 1, fixed=True),
    "1f1b": Schedule("Schedule1F1B", 1, fixed=True),
    "interleaved_1f1b": Schedule("ScheduleInterleaved1F1B", 2),
    "looped_bfs": Schedule("ScheduleLoopedBFS", 2),
    "zero_bubble": Schedule("ScheduleInterleavedZeroBubble", 1, splits=True),
    "zbv": Schedule("ScheduleZBVZeroBubble", 2, fixed=True, v_shaped=True, splits=True),
    "dualpipev": Schedule("ScheduleDualPipeV", 2, fixed=True, v_shaped=True, splits=True),
}
"""By their name in a config: Huang et al. 2019 (GPipe), Narayanan et al. 2021 (1F1B, interleaved), Lamy-Poirier 2023
(breadth first), Qi et al. 2024 (zero bubble, ZBV), DeepSeek-AI 2024 (DualPipe, cut in half by Sea AI Lab)."""


@dataclass(frozen=True)
class Layout:
    """Where a pipeline's stages are."""

    stages: int
    """Parts of the model."""
    per_process: int
    """Of these on a process."""
    processes: int
    """Of one pipeline."""
    replicas: int
    """Pipelines that share the global batch."""


def split_text(points: Mapping[str, str]) -> str:
    """Split points as a config keeps them: `h.4=beginning,h.8=end`."""
    return ",".join(f"{name}={side}" for name, side in points.items())


def split_points(text: str) -> dict[str, str]:
    """Split points from their text, by submodule.

    Raises:
        ConfigError: no such text, or a submodule named twice.
    """
    points: dict[str, str] = {}
    for piece in filter(None, (part.strip() for part in text.split(","))):
        name, equals, side = (word.strip() for word in piece.partition("="))
        if not equals or side not in ("beginning", "end"):
            raise ConfigError(
                f"split {piece!r} is no split point: give a submodule and its side, h.4=beginning (right before) or "
                "h.4=end (right after), with commas between several."
            )
        if name in points:
            raise ConfigError(f"split names {name} twice: cut at one side of it, or name a neighbour.")
        points[name] = side
    if not points:
        raise ConfigError("split has no split point: give one, such as h.4=beginning, or give stages alone.")
    return points


def cut_places(points: Mapping[str, str], n_layer: int) -> list[int]:
    """Blocks before each cut, rising: `h.4=beginning` is 4, `h.4=end` is 5.

    Raises:
        ConfigError: a submodule between whose neighbours our GPT cannot be cut, or two names of one place.
    """
    legal = {f"h.{layer}": layer for layer in range(n_layer)}
    places: dict[int, str] = {}
    for given, side in points.items():
        name = given.removeprefix("transformer.")  # what a classifier has before its GPT's names
        if name not in legal:
            raise ConfigError(
                f"split {given!r} is no block of this GPT{did_you_mean(name, legal)}: choose from h.0 to "
                f"h.{n_layer - 1}, each at its beginning or its end."
            )
        place = legal[name] + (side == "end")
        if place in places:
            raise ConfigError(f"split cuts at {places[place]} and at {name}={side}, the same place: leave one out.")
        places[place] = f"{name}={side}"
    return sorted(places)


def layout(config: TrainConfig, size: int) -> Layout:
    """The layout of a config's pipeline over `size` processes; of a strategy without one, one stage a replica.

    Raises:
        ConfigError: stages that do not fit the processes, the schedule or the model, with the numbers that do.
    """
    if config.strategy not in PIPELINES:
        return Layout(1, 1, 1, size)
    name, alone = config.pipeline_schedule, config.strategy == "pp"
    schedule = SCHEDULES[name]
    if size < 2:
        raise ConfigError(f"strategy {config.strategy} needs several processes, not {size}: use nproc 2, or ddp.")
    stages = config.stages
    if config.split is not None:
        stages = len(split_points(str(config.split))) + 1
        if config.stages not in (0, stages):
            raise ConfigError(f"split makes {stages} stages, and stages is {config.stages}: give one of them.")
    per_process = config.stages_per_process or schedule.per_process
    if alone and not config.stages_per_process and stages and stages % size == 0:
        per_process = stages // size
    if schedule.fixed and per_process != schedule.per_process:
        wanted = f"{schedule.per_process} stage{'s' if schedule.per_process > 1 else ''}"
        raise ConfigError(
            f"pipeline_schedule {name} has {wanted} on a process, not {per_process}: use "
            f"{schedule.per_process * (size if alone else 2)} stages{'' if alone else ' for two processes'}, or a "
            "schedule that leaves it open, such as interleaved_1f1b."
        )
    if not stages:
        if not alone:
            raise ConfigError(
                f"strategy {config.strategy} leaves open how many of the {size} processes are a pipeline: give stages, "
                f"such as {2 * per_process}, or split."
            )
        stages = per_process * size
    processes, left = divmod(stages, per_process)
    fits = [size] if alone else [count for count in range(2, size + 1) if size % count == 0]
    if left or processes not in fits:
        legal = ", ".join(str(count * per_process) for count in fits)
        raise ConfigError(
            f"stages {stages}, {per_process} on a process, do not fit nproc {size} with strategy {config.strategy}: "
            f"use {'one of ' if len(fits) > 1 else ''}{legal} stages."
        )
    if stages > config.n_layer + 2:
        raise ConfigError(
            f"stages {stages} are more than a GPT of n_layer {config.n_layer} can be cut into: use at most "
            f"{config.n_layer + 2}, the embedding and the head alone."
        )
    return Layout(stages, per_process, processes, size // processes)


def held(name: str, place: Layout, process: int) -> list[int]:
    """The stages of a process of a pipeline, rising."""
    if SCHEDULES[name].v_shaped:
        return [process, place.stages - 1 - process]
    return list(range(process, place.stages, place.processes))


def owners(name: str, place: Layout) -> list[int]:
    """The process that holds each stage."""
    where = {stage: process for process in range(place.processes) for stage in held(name, place, process)}
    return [where[stage] for stage in range(place.stages)]


def trouble(name: str, count: int, place: Layout) -> str | None:
    """Why a schedule cannot run `count` micro-batches in one pass; None where it can."""
    rounds = max(1, count // place.processes)
    if name in ("1f1b", "dualpipev") and count < place.stages:
        return f"{name} needs at least as many micro-batches as stages, {place.stages}"
    if name in ("interleaved_1f1b", "zero_bubble") and count % rounds:
        return f"{name} takes micro-batches in rounds, and {count} over {place.processes} processes make {rounds}"
    return None


def passes(config: TrainConfig, micro_batch_size: int, place: Layout) -> int:
    """How often a step goes through the pipeline, with how many micro-batches each time: all of a replica's at once,
    or `pipeline_micro_batches` of them.

    Raises:
        ConfigError: they cannot be parted evenly, or the schedule cannot run so many; with sizes that can.
    """
    each, wrong = _parted(config, micro_batch_size, place)
    if wrong is None:
        return config.global_batch_size // (micro_batch_size * place.replicas * each)
    legal = legal_sizes(config, place)
    if legal:
        mend = f"use a micro_batch_size of {', '.join(map(str, legal[-6:]))}"
    elif config.pipeline_micro_batches and trouble(config.pipeline_schedule, config.pipeline_micro_batches, place):
        mend = "leave pipeline_micro_batches out"
    else:
        mend = f"use a global_batch_size of {_next_batch(config, micro_batch_size, place)}"
    raise ConfigError(f"{wrong}: {mend}.")


def legal_sizes(config: TrainConfig, place: Layout) -> list[int]:
    """Sizes of micro-batches that the schedule can run, rising."""
    most = config.global_batch_size // place.replicas
    return [size for size in range(1, most + 1) if _parted(config, size, place)[1] is None]


def pipeline_micro_batch(config: TrainConfig, most: int, place: Layout) -> int:
    """The micro-batch size that `micro_batch_size 0` becomes in a pipeline.

    The largest up to `most` that leaves twice as many micro-batches as stages, for a small bubble; where none does, the
    smallest that works.
    """
    legal = legal_sizes(config, place)
    if not legal:
        passes(config, 1, place)  # says why
    each = config.global_batch_size // place.replicas
    good = [size for size in legal if size <= most and each // size >= 2 * place.stages]
    return good[-1] if good else legal[0]


def _parted(config: TrainConfig, size: int, place: Layout) -> tuple[int, str | None]:
    """Micro-batches of a pass, and what is wrong with them."""
    whole = f"global_batch_size {config.global_batch_size} in micro-batches of {size}"
    count, left = divmod(config.global_batch_size, size * place.replicas)
    if left:
        over = f" over {place.replicas} replicas" if place.replicas > 1 else ""
        return 1, f"{whole} cannot be parted evenly{over}, as a pipeline needs it"
    each = config.pipeline_micro_batches or count
    if count % each:
        return 1, f"{whole} makes {count} of them a replica, which pipeline_micro_batches {each} does not divide"
    found = trouble(config.pipeline_schedule, each, place)
    return each, found and f"{whole} makes {each} a pass, but {found}"


def _next_batch(config: TrainConfig, size: int, place: Layout) -> int:
    """The next larger global batch size that works with a micro-batch size."""
    whole = size * place.replicas  # sequences of a micro-batch in every replica
    if config.pipeline_micro_batches:
        whole *= config.pipeline_micro_batches
        return -(-config.global_batch_size // whole) * whole
    each = -(-config.global_batch_size // whole)
    while trouble(config.pipeline_schedule, each, place):
        each += 1
    return each * whole


def processes(config: TrainConfig, size: int) -> int:
    """Processes of one replica in a world of some size; a world of one trains plainly, whatever the strategy."""
    return layout(config, size).processes if size > 1 else 1


def check_device(device: str, processes: int) -> None:
    """Refuses several processes on a kind of device where they cannot add up.

    Raises:
        ConfigError: with what can.
    """
    if device == "mps" and processes > 1:  # neither gloo nor NCCL knows it
        raise ConfigError(f"nproc {processes} is for CPUs and CUDA, and the device is mps: use nproc 1, or device cpu.")


def check(config: TrainConfig) -> None:
    """Refuses what the config alone shows to be impossible.

    Raises:
        ConfigError: with the legal values.
    """
    if config.optimizer == "muon" and config.strategy in ("fsdp", "pp+fsdp"):
        raise ConfigError(
            f"optimizer muon works on whole matrices, and strategy {config.strategy} leaves each process rows of them: "
            f"use adamw, or strategy {'ddp' if config.strategy == 'fsdp' else 'pp+ddp'}."
        )
    if config.share_gpu and config.strategy != "ddp":
        raise ConfigError(
            f"share_gpu has no way but ddp to share one GPU, and strategy is {config.strategy}: use ddp, or a GPU a "
            "process."
        )
    if config.nproc > config.global_batch_size and config.strategy in ("ddp", "fsdp"):
        raise ConfigError(
            f"nproc {config.nproc} is more than the global_batch_size {config.global_batch_size} gives work to: "
            f"use at most {config.global_batch_size} processes, or a larger batch."
        )
    if config.strategy not in PIPELINES:
        for name in ("stages", "split", "stages_per_process", "pipeline_micro_batches"):
            if getattr(config, name):
                raise ConfigError(
                    f"{name} {getattr(config, name)} is for pipelines, and strategy is {config.strategy}: leave it "
                    f"out, or choose one of {', '.join(PIPELINES)}."
                )
        return
    if config.split is not None:
        points = split_points(str(config.split))
        if config.model == "huggingface":
            tasks.published_cuts(points, config)
        else:
            cut_places(points, config.n_layer)
    place = layout(config, config.nproc)
    if config.micro_batch_size:
        passes(config, config.micro_batch_size, place)
    else:
        pipeline_micro_batch(config, config.global_batch_size, place)


def in_flight(name: str, place: Layout, process: int, count: int) -> int:
    """Most forward passes, of a micro-batch through a stage of a process, that wait for their backward pass at once.

    gpipe and looped_bfs go all the way forward first. The others go as far ahead as the stages behind need
    (Narayanan et al. 2021, section 2.2), and zero bubble as far again, for weights that wait for theirs; those in a V
    hold two passes a process (Qi et al. 2024, section 4).
    """
    P, v = place.processes, place.per_process
    ahead = {
        "1f1b": P - process,
        "interleaved_1f1b": 2 * (P - process - 1) + (v - 1) * P + 1,
        "zero_bubble": 2 * (P - process - 1) + (v - 1) * P + 1 + P,
        "zbv": 2 * P,
        "dualpipev": 2 * P + 1,
    }.get(name, count * v)
    return min(ahead, count * v)
