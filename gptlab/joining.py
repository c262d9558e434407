"""Joining a run from outside: which rank this process is, and where it meets the others.

torchrun, DLRover and Kubeflow's operators say who a process is in torchrun's environment variables; srun says it in its
own. Either way the processes of one generation meet in a part of the store that belongs to them alone:

    spot = find_spot(os.environ)
    store, attempt = meet(open_store(spot), spot, attempt)

A store outlives a generation (torchrun's agents share theirs), and what the dead left in it is read by the living: a
world that torch 2.13 has restarted finds the addresses of the one before, and hangs. The restart count is no name for a
generation either, since it stays the same when a node joins or leaves. So rank 0 makes a name up and hands it to
whoever says hello, which only the living do.

Left out on purpose: what a rank does (`worker.py`), starting ranks (`launcher/`).
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gptlab.config import ConfigError, TrainConfig
from gptlab.given import read_object
from gptlab.recording import FORMAT
from gptlab.runs import read_json, write_json

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

ATTEMPT = "GPTLAB_ATTEMPT"
"""In the environment: the number of the attempt, where who starts the ranks holds the run's lock for all of them."""
KEEP_STOP = "GPTLAB_KEEP_STOP"
"""In the environment: a stop that lies there was asked for since this start, however early an attempt it is."""
PATIENCE_S = 600.0
"""How long ranks wait for each other: nodes of a cluster start minutes apart."""
AGAIN_S = 0.5
"""Seconds after which an unanswered hello is said again: one that was dying may have spoken over it."""
LOOK_S = 0.01
"""Seconds between two looks into the store."""
STOP_S = 1.0
"""How long after SIGTERM the job's own process may take to ask for a stop."""
LEASH_S = 0.5
"""Seconds between two looks at the parent."""


@dataclass(frozen=True)
class Spot:
    """A process among those of a run."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    restarts: int = 0
    """How often its agent has replaced lost workers."""


def find_spot(environ: Mapping[str, str]) -> Spot:
    """This process's spot, from torchrun's variables or else from srun's.

    Raises:
        ConfigError: neither has started it.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    missing = [name for name in names if name not in environ]
    if not missing:
        rank, size, local_rank, local_size = (int(environ[name]) for name in names)
        return Spot(rank, size, local_rank, local_size, int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        size = int(environ["SLURM_STEP_NUM_TASKS"])
        nodes = int(environ.get("SLURM_STEP_NUM_NODES", "1"))
        return Spot(int(environ["SLURM_PROCID"]), size, int(environ["SLURM_LOCALID"]), -(-size // nodes))
    raise ConfigError(f"{missing[0]} is not set: start this with torchrun or srun, or use `gptlab train`.")


def open_store(spot: Spot) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT, which rank 0 serves where no agent does."""
    from torch.distributed.rendezvous import rendezvous

    if "SLURM_LAUNCH_NODE_IPADDR" in os.environ:  # where srun was called: the job's first node, which has rank 0
        os.environ.setdefault("MASTER_ADDR", os.environ["SLURM_LAUNCH_NODE_IPADDR"])
    store: Store = next(iter(rendezvous("env://", spot.rank, spot.world_size)))[0]
    return store


def meet(store: Store, spot: Spot, attempt: int, *, patience_s: float = PATIENCE_S) -> tuple[Store, int]:
    """The part of the store that belongs to this generation, and the attempt's number. Every rank calls it.

    Args:
        attempt: the number, on rank 0; unused on the others.

    Raises:
        TimeoutError: a rank has not come.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    until = time.monotonic() + patience_s
    if spot.rank == 0:
        generation = f"{attempt}-{secrets.token_hex(8)}"
        _welcome(store, spot.world_size, generation, until)
    else:
        generation = _say_hello(store, spot.rank, until)
    return PrefixStore(f"gptlab/{generation}", store), int(generation.partition("-")[0])


def _welcome(store: Store, size: int, generation: str, until: float) -> None:
    """Answers each hello, a newer one as well, until every rank has said that it knows the generation."""
    waiting, answered = set(range(1, size)), dict[int, bytes]()
    while waiting:
        for rank in sorted(waiting):
            if store.check([f"gptlab/hello-{rank}"]):
                hello = store.get(f"gptlab/hello-{rank}")
                if answered.get(rank) != hello:
                    store.set(f"gptlab/welcome-{rank}", f"{hello.decode()} {generation}")
                    answered[rank] = hello
            if store.check([f"gptlab/{generation}/here-{rank}"]):
                waiting.discard(rank)
        if waiting and time.monotonic() > until:
            raise TimeoutError(f"ranks {sorted(waiting)} of {size} have not come")
        time.sleep(LOOK_S)


def _say_hello(store: Store, rank: int, until: float) -> str:
    """The generation's name, from the rank 0 that answers this very process."""
    token, again = secrets.token_hex(8), 0.0
    while True:
        now = time.monotonic()
        if now > until:
            raise TimeoutError(f"rank 0 has not answered rank {rank}")
        if now > again:
            store.set(f"gptlab/hello-{rank}", token)
            again = now + AGAIN_S
        if store.check([f"gptlab/welcome-{rank}"]):
            answer, _, generation = store.get(f"gptlab/welcome-{rank}").decode().partition(" ")
            if answer == token:
                store.set(f"gptlab/{generation}/here-{rank}", "yes")
                return generation
        time.sleep(LOOK_S)


def ensure_run(path: Path, config: Path | None, spot: Spot) -> None:
    """Makes the run directory from a JSON file of the config's fields, where it is not there; rank 0 does.

    Raises:
        ConfigError: there is no run, and no such file either; or the run was made with other settings.
    """
    made = path / "run.json"
    if config is None:
        if not made.is_file():
            raise ConfigError(f"There is no run in {path}: make it with `gptlab train`, or name its --config FILE.")
        return
    wanted = TrainConfig.from_dict(read_object(config, "a config"))
    if made.is_file():
        check_same(path, wanted)
    elif spot.rank == 0:
        path.mkdir(parents=True, exist_ok=True)
        record = {"format": FORMAT, "name": path.name, "created": time.time(), "config": wanted.to_dict()}
        write_json(made, record | {"cwd": os.getcwd()})
    else:
        until = time.monotonic() + PATIENCE_S
        while not made.is_file():
            if time.monotonic() > until:
                raise ConfigError(f"Rank 0 has not made the run in {path}: see what it printed.")
            time.sleep(0.1)


def check_same(path: Path, wanted: TrainConfig) -> None:
    """Refuses to go on with a run under settings that are not its own."""
    had = (read_json(path / "run.json") or {}).get("config", {})
    for name, new in wanted.to_dict().items():
        old = had.get(name, new)
        if old != new and not (name == "vocab_size" and new == 0):
            raise ConfigError(
                f"The run {path.name!r} was made with {name} {old}, and this is {new}: choose another --name, or "
                "leave the old value."
            )


def heed_term(path: Path, leave: Callable[[int], None] = os._exit) -> None:
    """SIGTERM under srun: the job ends, and a stop was asked for that leaves a checkpoint; or this attempt alone does.

    A thread waits for it, since the main thread may be amid a sum that never comes. Call it before other threads start.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def watch() -> None:
        signal.sigwait({signal.SIGTERM})
        until = time.monotonic() + STOP_S
        while not (path / "stop").exists():
            if time.monotonic() > until:
                leave(128 + signal.SIGTERM)
            time.sleep(0.05)

    threading.Thread(target=watch, name="term", daemon=True).start()


def keep_leash(leave: Callable[[int], None] = os._exit) -> None:
    """Ends this process soon after the one that started it has: agents that are killed leave their workers behind."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LEASH_S)
        leave(1)

    threading.Thread(target=watch, name="leash", daemon=True).start()
