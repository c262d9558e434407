"""One process of a cell: judges and races it, or takes turns with one side alone for its memory.

    python -m gptlab.benchmark.cell FOLDER RANK race      # FOLDER/cell.json says what; FOLDER/row.json gets it

What is known is written at once, so that a crash later on takes nothing with it; `stage` says what was being run. Left
out on purpose: starting it and reading what it left (`isolation.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlab import hardware, joining, memory, spread, worker
from gptlab.benchmark.cells import Cell
from gptlab.config import TrainConfig
from gptlab.runs import write_json

if TYPE_CHECKING:
    import torch

    from gptlab.assembly import Setting
    from gptlab.benchmark.inside.counting import Counts
    from gptlab.benchmark.inside.training import Trainee
    from gptlab.parallel.world import World

LOUD = ("NOT AS ASKED", hardware.FALLBACK)
"""How reasons begin that say that a run is not what was asked for."""


class Unavailable(Exception):
    """The cell cannot run here as it was asked for."""


class Place:
    """A process among those of a cell, and the folder that they share."""

    def __init__(self, folder: Path, rank: int, part: str) -> None:
        self.folder, self.rank, self.part = folder, rank, part
        self.cell = Cell.from_dict(json.loads((folder / "cell.json").read_text()))
        self.row: dict[str, Any] = {}

    def stage(self, name: str) -> None:
        """Says what is being run."""
        if self.rank == 0:
            (self.folder / "stage").write_text(name)

    def know(self, **columns: Any) -> None:
        """Adds to the row."""
        self.row |= columns
        if self.rank == 0:
            write_json(self.folder / f"{self.part}.json", self.row)


def settle(cell: Cell, config: TrainConfig, *, strict: bool) -> Setting:
    """What a config's `auto` becomes.

    Args:
        strict: refuse what comes out otherwise than asked.
    """
    known = config
    if cell.backend == "aot_eager" and config.compile != "off":  # needs none of what torch.compile's own backend needs
        known = config.replace(compile="off")
    setting, reasons = worker.settle(known, {}, config.nproc, config.nproc)
    for name, reason in reasons.items():
        if strict and reason.startswith(LOUD):
            raise Unavailable(f"{name} is {getattr(setting, name, config.strategy)} here: {reason}.")
    return dataclasses.replace(setting, compile=config.compile) if known is not config else setting


def main() -> None:
    """See above."""
    joining.keep_leash()
    folder, rank, part = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    place = Place(folder, rank, part)
    try:
        run(place)
    except Unavailable as error:
        place.know(accuracy="unavailable", note=str(error))


def run(place: Place) -> None:
    """Everything, in this process."""
    import torch

    from gptlab.parallel.world import connect

    cell = place.cell
    place.stage("prepare")
    setting = settle(cell, cell.config, strict=True)
    torch.set_num_threads(setting.threads)
    device = _device(cell.config, setting.device, place.rank)
    store = None
    if cell.config.nproc > 1:
        store = torch.distributed.FileStore(str(place.folder / f"meet-{place.part}"), cell.config.nproc)  # type: ignore[attr-defined]
    world = connect(place.rank, cell.config.nproc, device, store, shared_gpu=cell.config.share_gpu,
        stages=spread.processes(cell.config, cell.config.nproc), groups=cell.config.strategy != "ddp",
    )  # fmt: skip
    if place.part == "race":
        place.know(
            dev=setting.device, device_name=hardware.device_name(setting.device), threads=setting.threads,
            setting=vars(setting),
        )  # fmt: skip
        (_train if cell.kind == "train" else _generate)(place, setting, world)
    else:
        _alone(place, setting, world)
    world.close()


def _device(config: TrainConfig, kind: str, rank: int) -> torch.device:
    import torch

    if kind != "cuda":
        return torch.device(kind)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _train(place: Place, setting: Setting, world: World) -> None:
    from gptlab.benchmark.inside import judging, race, training
    from gptlab.benchmark.inside.counting import Counts

    cell, counts = place.cell, Counts()
    ours: Trainee | None = None
    status = "pass"
    if cell.accuracy:
        place.stage("candidate")
        drops = cell.config.dropout > 0
        still = cell.config.replace(dropout=0.0)
        ours = training.make("ours", dataclasses.replace(cell, config=still), setting, world)
        meeting = judging.Meeting(place.folder, world)
        verdict, tensors = judging.judge_training(cell, ours, setting, world, meeting, place.stage)
        status = "pass" if world.sum([float(verdict.status != "pass")])[0] == 0 else "wrong"
        place.know(**verdict.to_dict(), **counts.columns())
        if drops:
            place.know(dropout_note="judged without dropout: no two backends draw alike")
            ours = None
        if cell.outputs and world.is_main:
            _keep(cell, tensors)
    if not cell.performance or (status != "pass" and not cell.force):
        return
    place.stage("candidate")
    ours = ours or training.make("ours", cell, setting, world)
    theirs = training.make(cell.against, cell, settle(cell, cell.opponent, strict=False), world)
    counts.settle()
    if not cell.accuracy:
        ours.step()
        counts.settle()
        ours.reset()
    place.know(**{**_compiled(counts), "ours": ours.setting, "other": theirs.setting})
    place.stage("race")
    place.know(**race.race_training(cell, ours, theirs, setting, world, counts))


def _compiled(counts: Counts) -> dict[str, Any]:
    columns = counts.columns()
    return columns | {"compilation_latency": columns.get("compile_s", 0.0)}


def _keep(cell: Cell, tensors: dict[str, torch.Tensor]) -> None:
    """Writes the compared tensors into the folder that was asked for."""
    from safetensors.torch import save_file

    folder = Path(cell.outputs or "")
    folder.mkdir(parents=True, exist_ok=True)
    sizes = f"B{cell.config.global_batch_size} T{cell.length}"  # what else tells the cells of a grid apart
    name = f"{cell.label} {sizes}".replace(" ", "-").replace("/", "x")
    save_file({key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()},
              folder / f"{name}.safetensors")  # fmt: skip


def _generate(place: Place, setting: Setting, world: World) -> None:
    from gptlab.benchmark.inside import generating, judging, race
    from gptlab.benchmark.inside.counting import Counts

    cell, counts = place.cell, Counts()
    place.stage("candidate")
    model = generating.model_of(cell, world.device.type)
    dtype = generating.DTYPES[cell.config.dtype]
    ours = generating.make("ours", cell, model, dtype, setting.attention)
    place.know(ours=ours.setting)
    status = "pass"
    if cell.accuracy:
        verdict = judging.judge_generation(cell, ours.greedy, model, dtype, place.stage)
        status = verdict.status
        place.know(**verdict.to_dict(), **counts.columns())
    if not cell.performance or (status != "pass" and not cell.force):
        return
    place.stage("race")
    theirs = generating.make(cell.against, cell, model, dtype, setting.attention)
    columns = race.race_generation(cell, ours, theirs, world.device.type, dtype)
    place.know(**columns, **_compiled(counts), other=theirs.setting)


def _alone(place: Place, setting: Setting, world: World) -> None:
    """One side's peak memory, above what this process held before the model; and what compiling took once more, with
    what the first time left on the disk."""
    import torch

    from gptlab.benchmark.inside import generating, training
    from gptlab.benchmark.inside.counting import Counts

    cell, kind = place.cell, world.device.type
    name = "ours" if place.part == "ours" else cell.against
    if name == "transformers":
        import transformers.models.gpt2.modeling_gpt2  # noqa: F401 - code is no part of what is measured
    if setting.compile != "off" or cell.kind == "generate":
        import torch._inductor.compile_fx
    counts = Counts()
    before = _settled(kind)
    if cell.kind == "train":
        chosen = setting if name == "ours" else settle(cell, cell.opponent, strict=False)
        trainee = training.make(name, cell, chosen, world)
        turn: Callable[[], object] = trainee.step
    else:
        model, dtype = generating.model_of(cell, kind), generating.DTYPES[cell.config.dtype]
        way = generating.make(name, cell, model, dtype, setting.attention)
        prompts = torch.zeros(cell.config.global_batch_size, cell.prompt, dtype=torch.long, device=kind)
        turn = functools.partial(way.greedy, prompts, min(cell.new_tokens, 8))
    turn()  # compiles, and makes the optimizer's state
    _settled(kind)
    turn()
    place.know(peak_bytes=memory.peak_bytes(kind) - before, compile_s=counts.columns().get("compile_s", 0.0))


def _settled(kind: str) -> int:
    """Bytes held, once what is free has gone back to the system; the peak begins anew here."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc's alone
        ctypes.CDLL(None).malloc_trim(0)
    memory.reset_peak(kind)
    return memory.peak_bytes(kind)


if __name__ == "__main__":
    main()
