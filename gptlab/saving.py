"""Saving while training goes on: a copy in memory, then a thread that writes it.

    saver = Saver(path / "checkpoints", keep=2)
    stall_s = saver.save(step, checkpoint.tensors(model, optimizer), state)    # training waits for the copy alone
    saver.wait()                                           # before the last word on the run

The stall is bounded: one checkpoint is written at a time, and one that is asked for meanwhile waits for it and says so.
The copy lies in buffers that are allocated once, because fresh memory costs more than the copy itself. What goes wrong
in the thread is raised by the next `save` or `wait`: always at the same step, so that the launcher can tell a full
disk from bad luck.

Left out on purpose: what a checkpoint is (`checkpoint.py`), and when to save (`training.py`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from gptlab import checkpoint, hardware
from gptlab.parallel.strategy import Files

NICE = 10
"""How far the writing thread steps back. 130 MB written beside a training on both of 2 cores cost the training 0.62 s
at 0, 0.35 s at 10 and 0.30 s at 19, and took 0.5, 1.1 and 2.3 s to write."""


class Snapshot:
    """Host buffers that hold the last copy of a training state."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def missing_bytes(self, files: Files) -> int:
        """Bytes that `take` would have to allocate."""
        return sum(v.nbytes for f, named in files.items() for k, v in named.items() if not self._fits((f, k), v))

    def take(self, files: Files) -> dict[str, dict[str, Tensor]]:
        """A copy of all tensors, on the CPU. It is overwritten by the next one."""
        copy: dict[str, dict[str, Tensor]] = {}
        devices = set()
        for file, named in files.items():
            copy[file] = {}
            for name, value in named.items():
                pinned = value.device.type == "cuda"  # page-locked memory takes copies at the bus's full rate
                if not self._fits((file, name), value):
                    self._buffers[file, name] = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
                copy[file][name] = buffer = self._buffers[file, name]
                if value.device.type == "cpu" and value.is_contiguous():
                    # One core saturates the memory. torch's threads would wait for each other 300 times: on a busy
                    # machine that took 670 ms for 130 MB, and this 60 ms.
                    np.copyto(_bytes(buffer), _bytes(value))
                else:
                    buffer.copy_(value.detach(), non_blocking=pinned)
                devices |= {value.device} if pinned else set()
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copy

    def _fits(self, key: tuple[str, str], value: Tensor) -> bool:
        buffer = self._buffers.get(key)
        return buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype


def _bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a contiguous tensor, in place: numpy does not know every type that torch does."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()


class Saver:
    """Writes a run's checkpoints, one at a time, while training goes on.

    Args:
        folder: the run's `checkpoints`.
        keep: how many of the newest are kept, beside the one with the lowest validation loss.
        may_write: raises if another attempt owns the run.
        say: prints a line into the run's log.
    """

    def __init__(
        self, folder: Path, *, keep: int, may_write: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.folder, self.keep, self.may_write, self.say = folder, keep, may_write, say
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._step = -1
        self._error: BaseException | None = None

    def save(self, step: int, files: Files, state: dict[str, Any]) -> float:
        """Copies the training state and has it written; returns the seconds that training waited.

        Where the copy would not fit into memory, training waits for the whole of it, and the log says so.

        Raises:
            CheckpointError: the checkpoint before this one could not be written.
        """
        began = time.perf_counter()
        if self._thread is not None and self._thread.is_alive():
            before = self._step
            self.wait()
            waited = time.perf_counter() - began
            self.say(f"step {step}: waited {waited:.2f} s until the checkpoint of step {before} was written")
        self.wait()
        wanted, free = self._snapshot.missing_bytes(files), free_bytes()
        if wanted > free:
            self.say(
                f"step {step}: training waits while its checkpoint is written: a copy takes {wanted / 2**20:.0f} MiB "
                f"of memory, and {free / 2**20:.0f} are free"
            )
            self._write(step, files, state)
            self.wait()
        else:
            files, self._step = self._snapshot.take(files), step
            self._thread = threading.Thread(target=self._write_behind, args=(step, files, state), name="checkpoint")
            self._thread.start()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Until nothing is being written any more.

        Raises:
            CheckpointError: what was written could not be.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write_behind(self, step: int, files: Files, state: dict[str, Any]) -> None:
        """In the thread: training's threads go first, as each of them waits for all."""
        if sys.platform == "linux":  # where a thread has a priority of its own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICE)
        self._write(step, files, state)

    def _write(self, step: int, files: Files, state: dict[str, Any]) -> None:
        try:
            checkpoint.write(self.folder, step, files, state, keep=self.keep, may_write=self.may_write)
        except BaseException as error:  # raised where somebody can hear it
            self._error = error


def free_bytes() -> int:
    """Memory that this process could still take: of the machine, and of what its container grants it."""
    return min(psutil.virtual_memory().available, hardware.memory_bytes() - psutil.Process().memory_info().rss)
