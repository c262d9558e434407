"""Disks that are full or read-only, checkpoints that rotted, directories that are gone."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from arena import Arena, Skipped, alive, check_equal, steps, until
from verdicts import Case, Outcome

from gptlab.runs import write_json


@contextmanager
def small_disk(arena: Arena, size: str) -> Iterator[Path]:
    """A file system of its own."""
    place = arena.folder / "disk"
    place.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        raise Skipped("a disk of its own (tmpfs) takes root and mount")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "faults", place], capture_output=True)
    if made.returncode:
        place.rmdir()
        raise Skipped(f"tmpfs cannot be mounted here: {made.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)
        place.rmdir()


def full(arena: Arena, how: str = "async") -> Outcome:
    with small_disk(arena, "8m") as disk:
        ballast = disk / "ballast"  # leaves room for words, and for no checkpoint
        fill = {"rank": 0, "step": 7, "at": "after", "do": "fill", "file": str(ballast), "leave": 150_000}
        handle = arena.start(fill, {"at": how, "do": "sync save" if how == "sync" else "nothing"}, runs=disk)
        result = arena.finish(handle, "failed")
        assert "No space left" in result["message"] and "CheckpointError" in result["message"], result["message"]
        assert [path.name for path in handle.run.checkpoints()] == ["step-00000005"]
        assert not list((handle.run.path / "checkpoints").glob(".step-*")), "a half of a checkpoint is left"
        last = steps(handle.run)
        write_json(handle.run.path / "plan.json", [])
        ballast.unlink()
        arena.finish(arena.begin(handle.run))
        equal = check_equal(handle.run, arena.unbroken())
    return Outcome(f"failed at step {last}, disk named, older checkpoint whole; resumed with room", equal)


def rotten(arena: Arena, how: str = "a flipped byte", which: str = "newest") -> Outcome:
    handle = arena.start({"attempt": 1, "rank": 0, "step": 17, "at": "before", "do": "wait"})
    until(lambda: (handle.run.path / "struck").exists() and len(handle.run.checkpoints()) == 3)
    arena.workers(handle.run)
    handle.kill()
    arena.finish(handle, "stopped")
    found = handle.run.checkpoints()
    for checkpoint in found[-1:] if which == "newest" else found:
        _spoil(checkpoint, how)
    handle = arena.begin(handle.run)
    reason = {"a flipped byte": "checksum", "a truncation": "bytes, not", "no manifest": "manifest.json is missing"}[
        how
    ]
    if which == "all":
        result = arena.finish(handle, "failed")
        message = result["message"]
        assert "no checkpoint in" in message and message.count(reason) == 3, message
        assert not [row for row in handle.run.metrics() if row["attempt"] > 1], "it trained on regardless"
        assert len(handle.run.checkpoints()) == 3
        return Outcome("failed, each checkpoint's fault named, no step taken")
    arena.finish(handle)
    log = handle.run.log()
    assert f"checkpoint {found[-1].name} is passed over" in log and reason in log, log
    assert f"resumed from {found[-2].name}" in log
    return Outcome(f"{found[-1].name} passed over, from {found[-2].name}", check_equal(handle.run, arena.unbroken()))


def _spoil(checkpoint: Path, how: str) -> None:
    weights = checkpoint / "model.safetensors"
    if how == "a flipped byte":
        data = bytearray(weights.read_bytes())
        data[len(data) // 2] ^= 1
        weights.write_bytes(data)
    elif how == "a truncation":
        os.truncate(weights, weights.stat().st_size // 2)
    else:
        (checkpoint / "manifest.json").unlink()


def deleted(arena: Arena) -> Outcome:
    handle = arena.start(max_iters=100_000)
    until(lambda: steps(handle.run) >= 3)
    pids = arena.workers(handle.run)
    while handle.run.path.exists():  # a file may have been written in between
        shutil.rmtree(handle.run.path, ignore_errors=True)
    result = handle.wait(60)
    assert result["status"] == "lost" and "is gone" in result["message"], result
    until(lambda: not any(alive(pid) for pid in pids))
    time.sleep(0.3)
    assert not handle.run.path.exists(), "something was written there again"
    return Outcome("lost, the directory named, no process, nothing made anew")


def read_only(arena: Arena) -> Outcome:
    with small_disk(arena, "8m") as disk:
        handle = arena.start({"attempt": 1, "rank": 0, "step": 12, "at": "before", "do": "wait"}, runs=disk)
        until(lambda: (handle.run.path / "struck").exists())
        pids = arena.workers(handle.run)
        until(lambda: [path.name for path in handle.run.checkpoints()] == ["step-00000005", "step-00000010"])
        with _closed_to_writers(handle.run.path):
            os.kill(pids[0], 9)
            result = handle.wait(60)
            assert result["status"] == "lost" and "Read-only file system" in result["message"], result
            until(lambda: not any(alive(pid) for pid in pids))
        arena.finish(arena.begin(handle.run))
        return Outcome(
            "lost, the file system named; resumed when it is back", check_equal(handle.run, arena.unbroken())
        )


@contextmanager
def _closed_to_writers(path: Path) -> Iterator[None]:
    """A read-only view of a folder, over it: files that are open for writing forbid to remount the disk itself."""
    subprocess.run(["mount", "--bind", path, path], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


_some = functools.partial
CASES = (
    Case("disk-full", "disk full while saving, async", full, quick=True),
    Case("disk-full-sync", "disk full while saving, sync", _some(full, how="sync")),
    *(
        Case(
            f"{name}-{which}", f"{how} in {where}", _some(rotten, how=how, which=which),
            quick=(name, which) == ("flip", "all"),
        )
        for name, how in (("flip", "a flipped byte"), ("truncation", "a truncation"), ("no-manifest", "no manifest"))
        for which, where in (("newest", "the newest checkpoint"), ("all", "all checkpoints"))
    ),
    Case("deleted", "the run directory is deleted", deleted),
    Case("read-only", "the run directory becomes read-only", read_only),
)  # fmt: skip
