"""Several processes that run one function of a test, without the launcher: what strategies are tested in.

results = run_world(4, function, argument)    # function(world, argument) -> what rank 0 .. 3 returned
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def _rank(
    function: Callable[..., Any], rank: int, size: int, stages: int, store: str, report: Connection, *arguments: Any
) -> None:
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    from gptlab.parallel.world import connect

    torch.set_num_threads(1)
    try:
        meeting = FileStore(store, size) if size > 1 else None
        world = connect(rank, size, torch.device("cpu"), meeting, stages=stages, groups=True)
        report.send_bytes(pickle.dumps((function(world, *arguments), None)))  # tensors by value: this process ends
        world.close()
    except BaseException:
        report.send_bytes(pickle.dumps((None, traceback.format_exc())))
        os._exit(1)  # the others may wait for this one


def run_world(size: int, function: Callable[..., T], *arguments: Any, stages: int = 1) -> list[T]:
    """What each rank's function(world, *arguments) returned. Functions of a module alone; results that pickle knows.

    Raises:
        AssertionError: with the traceback of the first rank that failed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "gptlab.assembly"])
    with tempfile.TemporaryDirectory() as folder:
        processes, reports = [], []
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(function, rank, size, stages, str(Path(folder) / "store"), sender, *arguments)
            )
            process.start()
            sender.close()
            processes.append(process)
            reports.append(receiver)
        results: list[T] = []
        try:
            for rank, receiver in enumerate(reports):
                try:
                    result, error = pickle.loads(receiver.recv_bytes())
                except EOFError:
                    result, error = None, "it died without a word"
                assert error is None, f"rank {rank}: {error}"
                results.append(result)
        finally:
            for process in processes:
                if len(results) < size:
                    process.kill()
                process.join()
    return results
