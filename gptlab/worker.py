"""What every rank of every run executes, however it was started.

The launcher forks `run_rank`; torchrun, and whatever speaks its environment, starts this module:

    torchrun --nproc-per-node 2 -m gptlab.worker runs/first

A rank sets its threads and its device, joins the others, turns each `auto` into a choice that run.json keeps, and
trains.
What goes wrong is written into the attempt's folder by the rank it happened to.

Left out on purpose: starting it, and deciding what to do when it dies (`launcher/`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlab import costs, hardware, joining, memory, spread
from gptlab.config import ConfigError, TrainConfig
from gptlab.pace import PREPARING, Pace, Pulse
from gptlab.peaks import Peak
from gptlab.recording import Claim, RunWriter
from gptlab.runs import Run

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

    from gptlab.assembly import Setting
    from gptlab.corpus import Corpus
    from gptlab.launcher.lookout import Lookout
    from gptlab.parallel.world import World
    from gptlab.training import Trainer


def run_rank(path: Path, *, attempt: int, rank: int, world_size: int, rendezvous: str) -> None:
    """One rank of an attempt, in a process of its own whose output goes to the attempt's folder.

    Args:
        rendezvous: path of a file where the ranks of this attempt meet; fresh for each attempt. Unused by a rank alone.

    Raises:
        Exception: whatever ended it, after it was written to error.json.
    """
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    store = FileStore(rendezvous, world_size) if world_size > 1 else None
    _run(path, attempt, joining.Spot(rank, world_size, local_rank=rank, local_size=world_size), store, _print)


def main(argv: list[str] | None = None) -> None:
    """A rank started by torchrun, or by what speaks as it does, or by srun: the environment says which."""
    parser = argparse.ArgumentParser(
        prog="python -m gptlab.worker", description="One rank of a run, as torchrun or srun starts it."
    )
    # torchrun itself takes options behind the module's name for its own, and finds --run ambiguous.
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="the run directory")
    parser.add_argument("--run", dest="named", type=Path, metavar="RUN", help="the same")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="JSON of the config, to make the run where it is not"
    )
    arguments = parser.parse_args(argv)
    if (arguments.run is None) == (arguments.named is None):
        parser.error("name the run directory, once")
    path: Path = (arguments.run or arguments.named).absolute()
    claim, attempt = None, int(os.environ.get(joining.ATTEMPT, "0"))
    if attempt:
        joining.heed_term(path)
    joining.keep_leash()
    try:
        spot = joining.find_spot(os.environ)
        joining.ensure_run(path, arguments.config, spot)
        if spot.restarts:
            _leave_if_over(Run(path))
        if spot.rank == 0 and not attempt:
            claim = Claim(path, wait_s=30.0)  # held until this process ends
            if spot.restarts:
                _end_if_hopeless(Run(path), spot.restarts)
            attempt = claim.new_attempt(keep_stop=spot.restarts > 0 or joining.KEEP_STOP in os.environ)
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    store = None
    if spot.world_size > 1:
        try:
            store, attempt = joining.meet(joining.open_store(spot), spot, attempt)
        except Exception as error:
            if attempt:
                RunWriter(path, attempt).error(spot.rank, None, error, traceback.format_exc())
            raise
    say = _print
    if joining.ATTEMPT not in os.environ:  # elsewhere this process's output is that file
        log = open(path / "attempts" / f"{attempt:02d}" / f"rank-{spot.rank}.out", "a", buffering=1)  # noqa: SIM115 - until the end

        def say(line: str) -> None:
            _print(line)
            print(line, file=log)

    _run(path, attempt, spot, store, say, watched=False)


def _leave_if_over(run: Run) -> None:
    """An agent that counts restarts and nothing else starts its workers again when the run has its final record."""
    result = run.result()
    if result is not None:
        print(f"the run {run.name!r} is {result['status']}: {result.get('message', 'nothing is left to do')}")
        raise SystemExit(result["status"] == "failed")


def _end_if_hopeless(run: Run, restarts: int) -> None:
    """Ends the run where another attempt would fail as those before."""
    from gptlab.launcher import ending

    if found := ending.hopeless(run, restarts):
        ending.fail(run, int(run.attempts()[-1].name), *found)
        _leave_if_over(run)


def _print(line: str) -> None:
    print(line, flush=True)


def _run(
    path: Path, attempt: int, spot: joining.Spot, store: Store | None, say: Callable[[str], None], *,
    watched: bool = True,
) -> None:  # fmt: skip
    """Trains, and writes down what ended it early.

    Args:
        watched: whether a supervisor of ours looks after this rank; else it does so itself.
    """
    writer = RunWriter(path, attempt)
    trainer = None
    pace = Pace(spot.rank, spot.world_size)
    pulse = Pulse(pace, writer.folder)
    lookout = None if watched else _look_out(pace, writer)
    try:
        trainer = _prepare(path, writer, spot, store, say, pace)
        trainer.resume()
        trainer.run()
        trainer.world.close()
    except BaseException as error:
        writer.error(spot.rank, trainer.done if trainer else None, error, traceback.format_exc())
        raise
    finally:
        if lookout is not None:
            lookout.close()
        pulse.close()


def _look_out(pace: Pace, writer: RunWriter) -> Lookout:
    """This rank's own watch."""
    from gptlab.launcher.lookout import Lookout

    config = Run(writer.path).config
    return Lookout(pace, writer, config.hang_timeout_s, patient=config.compile != "off")


def _prepare(
    path: Path, writer: RunWriter, spot: joining.Spot, store: Store | None, say: Callable[[str], None], pace: Pace
) -> Trainer:
    """Everything before the first step."""
    import torch

    from gptlab import attention, corpus
    from gptlab.native.rates import measured
    from gptlab.parallel.world import connect
    from gptlab.training import Trainer

    rank, world_size = spot.rank, spot.world_size
    run = Run(path)
    config, info = run.config, run.info
    with pace.within(PREPARING):
        text = corpus.ensure(config.data, config.tokenizer, task=config.task)
    text.check_length(config.block_size, config.task)
    config = _with_vocabulary(config, text, info)
    setting, reasons = settle(config, info, world_size, spot.local_size)
    torch.set_num_threads(setting.threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    device = _device(config, setting.device, spot.local_rank, spot.local_size)
    world = connect(
        rank, world_size, device, store, shared_gpu=config.share_gpu, stages=spread.processes(config, world_size),
        groups=config.strategy != "ddp", pace=pace,
    )  # fmt: skip
    setting = _agreed(config, setting, world)
    numbers = getattr(torch, {"tfloat32": "float32"}.get(setting.dtype, setting.dtype))
    attention.check(setting.attention, config, device, numbers)
    pids = _pids(rank, world_size, store)
    peak = _peak(info, setting, spot) if rank == 0 else None
    if rank == 0 and setting.kernels == "native":
        measured(setting.dtype, hardware.cores())  # once on a machine: what predictions are made of
    memory.reset_peak(setting.device)
    base = memory.peak_bytes(setting.device)  # the interpreter and torch
    if rank == 0:
        writer.update_info(
            config=config.to_dict(), setting=vars(setting), reasons=reasons, world_size=world_size,
            data={"name": text.name, "path": str(text.path), "sha256": text.sha256},
            peak=vars(peak) if peak else None, base_bytes=base, versions=_versions(), host=platform.node(),
            device_name=hardware.device_name(setting.device), started=info.get("started", time.time()),
        )  # fmt: skip
        for name, reason in reasons.items():
            say(f"{name}: {getattr(setting, name, config.strategy)} ({reason})")
    return Trainer(config, setting, text, world, path, writer if rank == 0 else None, peak=peak, pids=pids, say=say)


def _with_vocabulary(config: TrainConfig, text: Corpus, info: dict[str, Any]) -> TrainConfig:
    """The config with the corpus's vocabulary; a corpus that changed under a run, or another vocabulary, is refused."""
    before = info.get("data", {}).get("sha256", text.sha256)
    if before != text.sha256:
        raise ConfigError(
            f"{config.data} is not the text that this run began on (SHA-256 {before[:12]}...): start a new run."
        )
    if config.vocab_size not in (0, text.vocab_size):
        raise ConfigError(
            f"vocab_size {config.vocab_size} is not that of {text.name}, {text.vocab_size}: leave it out, and the "
            "tokenizer decides."
        )
    if config.mask_documents and text.tokenizer.eot != text.vocab_size - 1:
        raise ConfigError(f"mask_documents needs documents, and {text.name} is one text without an end: leave it off.")
    return TrainConfig.from_dict(config.to_dict() | {"vocab_size": text.vocab_size})


def settle(
    config: TrainConfig, info: dict[str, Any], world_size: int, local_size: int
) -> tuple[Setting, dict[str, str]]:
    """What each `auto` becomes, with the rule that said so; a resumed run keeps what it had, for equal bits."""
    from gptlab import compiling, native
    from gptlab.assembly import Setting
    from gptlab.attention import choose
    from gptlab.launcher.checks import check_kept

    reasons: dict[str, str] = {}
    if config.strategy != "ddp" and world_size == 1:
        reasons["strategy"] = "NOT AS ASKED: one process has the whole model and the whole batch, as under ddp"
    if kept := info.get("setting"):
        setting = Setting(**kept)
        spread.check_device(setting.device, world_size)
        check_kept(config, kept, there=hardware.usable().get(setting.device, False))
        if info.get("world_size") == world_size:
            return setting, reasons | {"device": "as this run began"}
        threads = config.threads or hardware.default_threads(local_size)
        reasons["threads"] = f"{local_size} processes on this machine"
        return Setting(**(kept | {"threads": threads})), reasons
    device, reasons["device"] = hardware.resolve_device(config.device)
    spread.check_device(device, world_size)
    dtype, reasons["dtype"] = hardware.resolve_dtype(config.dtype, device, config)
    attention, reasons["attention"] = choose(config.attention, config, device)
    threads = config.threads or hardware.default_threads(local_size)
    reasons["threads"] = "as asked" if config.threads else f"the cores over {local_size} processes on this machine"
    sharing = -(-local_size // hardware.distinct_devices(device, local_size))
    available = hardware.device_memory(device)
    micro, reasons["micro_batch_size"] = costs.micro_batch(config, available, dtype, sharing, device, world_size)
    if config.kernels == "auto" and config.compile != "off":
        kernels, reasons["kernels"] = "torch", "auto: torch.compile was asked for"
    else:
        kernels, reasons["kernels"] = native.choose(config.kernels, config, device, dtype, attention)
    how, reasons["compile"] = compiling.choose(config.compile, device, kernels, config.strategy)
    setting = Setting(
        device=device, dtype=dtype, attention=attention, micro_batch_size=micro, threads=threads, kernels=kernels,
        compile=how,
    )  # fmt: skip
    return setting, reasons


def _agreed(config: TrainConfig, setting: Setting, world: World) -> Setting:
    """The main rank's choices, on every rank: machines that are not alike would each choose for themselves. Device and
    threads are a machine's own. Collective."""
    from gptlab.assembly import Setting
    from gptlab.launcher.checks import check_kept

    told = json.loads(world.of_main(json.dumps(vars(setting))))
    agreed = Setting(**(told | {"device": setting.device, "threads": setting.threads}))
    if agreed != setting:
        check_kept(config, vars(agreed), there=True)
    return agreed


def _device(config: TrainConfig, kind: str, local_rank: int, local_size: int) -> torch.device:
    """This rank's device: a GPU of its own, unless share_gpu."""
    import torch

    if kind != "cuda":
        return torch.device(kind)
    count = torch.cuda.device_count()
    if local_size > count and not config.share_gpu:
        raise ConfigError(f"nproc {local_size} is more than the {count} GPUs here: use at most {count}, or share_gpu.")
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device


def _peak(info: dict[str, Any], setting: Setting, spot: joining.Spot) -> Peak | None:
    """The rate that MFU is measured against: this run's own where it has one, so that an attempt need not measure."""
    kept = info.get("peak")
    if kept and info.get("world_size") == spot.world_size:
        return Peak(**kept)
    here = hardware.total_peak(setting.device, setting.dtype, spot.local_size, measure=True)
    nodes = -(-spot.world_size // spot.local_size)
    return here if here is None or nodes == 1 else Peak(here.flops * nodes, f"{nodes} nodes x {here.source}")


def _pids(rank: int, world_size: int, store: Store | None) -> list[int]:
    """Process ids by rank, on the main rank; the others' lists are empty."""
    if store is None:
        return [os.getpid()]
    store.set(f"pid-{rank}", str(os.getpid()))
    return [int(store.get(f"pid-{r}")) for r in range(world_size)] if rank == 0 else []


def _versions() -> dict[str, str]:
    """What this run was made with."""
    from importlib.metadata import version

    from gptlab import __version__

    ours = {"python": platform.python_version(), "gptlab": __version__}  # of a clone there is no other record
    return ours | {name: version(name) for name in ("torch", "numpy")}


if __name__ == "__main__":
    main()
