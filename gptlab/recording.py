"""Writing a run directory: who makes it, who may write, and what they write.

    >>> from gptlab.presets import preset
    >>> from gptlab.recording import Claim, RunWriter, create_run
    >>> run = create_run(preset("tiny"), "first", Path("runs"))
    >>> with Claim(run.path) as claim:
    ...     RunWriter(run.path, claim.new_attempt()).log({"step": 1, "loss": 5.5})

One process claims a run for its whole life, and each attempt has a number that only grows: a writer of an older attempt
that wakes up late is refused. Left out on purpose: reading (`runs.py`, which also draws the directory), and when to
write what (`training.py`, `launcher/`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import socket
import time
from pathlib import Path
from typing import IO, Any, Self

from gptlab.config import ConfigError, TrainConfig
from gptlab.runs import Run, attempt_folders, read_json, write_json

FORMAT = 1
"""Version of the layout, in run.json."""
MOST_BYTES = 200
"""Of a name; file systems take 255, endings and what is written beside a file included."""


class StaleWriterError(RuntimeError):
    """A newer attempt owns the run directory; this process must not write to it any more."""


def no_link(path: str, flags: int) -> int:
    """Opens a file of a run for writing, as `open`'s `opener`. Where the file is a link, an OSError: a run directory
    from elsewhere must not have another file written over."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def check_name(name: str) -> str:
    """A run's or sweep's name as given, or ConfigError where it could not be a folder's name everywhere."""
    if not re.fullmatch(r"\w[\w .+=,-]{0,99}", name) or name != name.strip():
        raise ConfigError(
            f"The name {name!r} cannot be a folder: use up to 100 letters, digits, spaces, '.', '_', '-', '+', "
            "starting with a letter or digit."
        )
    if len(name.encode()) > MOST_BYTES:
        raise ConfigError(
            f"The name {name[:20]!r}... has {len(name.encode())} bytes, and a folder's name with what stands beside it "
            f"takes at most {MOST_BYTES}: use a shorter one."
        )
    if re.search(r"\.sweep(-\d+)?\.\w+$", name):
        raise ConfigError(f"The name {name!r} ends as the files of a sweep do: leave out '.sweep'.")
    return name


def create_run(config: TrainConfig, name: str | None, runs_dir: Path, **info: Any) -> Run:
    """Makes a new run directory with its run.json; a name that is taken is refused.

    Args:
        name: None makes one up from the shape and the time.
        info: further entries of run.json.
    """
    from gptlab import __version__

    shape = f"{config.n_layer}x{config.n_head}x{config.n_embd}"
    wanted = check_name(name) if name is not None else f"{shape}-{time.strftime('%m%d-%H%M%S')}"
    path, count = runs_dir / wanted, 1
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                path.mkdir()
                break
            except FileExistsError:
                if name:
                    raise ConfigError(
                        f"There is a run {name!r} in {runs_dir} already: choose another --name, or go on with "
                        f"`gptlab train --resume {shlex.quote(name)}`."
                    ) from None
                path, count = runs_dir / f"{wanted}-{count}", count + 1
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{str(runs_dir)[:80]} cannot hold runs ({why}): choose another --runs-dir.") from None
    try:
        write_json(
            path / "run.json",
            {"format": FORMAT, "name": path.name, "created": time.time(), "gptlab": __version__,
             "config": config.to_dict(), **info},
        )  # fmt: skip
    except OSError as error:  # a full disk lets folders be made, and nothing be written into them
        path.rmdir()
        raise ConfigError(f"{path} cannot be written ({error.strerror}): mend that, or choose another.") from None
    return Run(path)


class Claim:
    """The right to start attempts on a run directory, held while this process lives.

    One process holds it at a time (flock, which the kernel ends with the process); each attempt writes a higher
    generation into the file, and a writer of an older one is refused by `RunWriter`.

    Raises:
        ConfigError: another process holds it after `wait_s` seconds, or the file system knows no locks.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, wait_s: float = 1.0) -> None:
        self.path = path
        self._file: IO[str] = open(path / "lock", "a+", opener=no_link)  # noqa: SIM115 - held open on purpose
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self._file.close()
                    raise ConfigError(
                        f"The run {path.name!r} is being trained by another process: wait for it, stop it with "
                        f"`gptlab runs stop {shlex.quote(path.name)}`, or choose another --name."
                    ) from None
                time.sleep(0.02)  # a reader's look holds it for an instant
            except OSError as error:
                self._file.close()
                raise ConfigError(
                    f"{path} lies where files cannot be locked ({error.strerror}): choose another --runs-dir."
                ) from None

    @classmethod
    def adopt(cls, path: Path, fd: int) -> Self:
        """The claim that another process took and handed over as an open file: the lock is free at no instant."""
        claim = cls.__new__(cls)
        claim.path, claim._file = path, os.fdopen(fd, "a+")
        try:
            claim._sign(claim._generation())
        except BaseException:
            claim.release()
            raise
        return claim

    def fileno(self) -> int:
        """The open file that holds the lock, for handing it over."""
        return self._file.fileno()

    def new_attempt(self, *, keep_stop: bool = False) -> int:
        """The number of a new attempt, from 1; makes its folder, clears `stop`, and archives an old result.

        Args:
            keep_stop: for an attempt that replaces a lost one: a stop asked for in between still counts.
        """
        done = [int(folder.name) for folder in attempt_folders(self.path)]
        attempt = max([self._generation(), *done], default=0) + 1
        folder = self.path / "attempts" / f"{attempt:02d}"
        folder.mkdir(parents=True)
        self._sign(attempt)
        write_json(folder / "attempt.json", {"attempt": attempt, "began": time.time(), "host": socket.gethostname()})
        if not keep_stop:
            (self.path / "stop").unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.path / "result.json", folder / "previous-result.json")
        return attempt

    def _sign(self, generation: int) -> None:
        self._file.seek(0)
        self._file.truncate()
        json.dump({"generation": generation, "pid": os.getpid(), "host": socket.gethostname()}, self._file)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _generation(self) -> int:
        self._file.seek(0)
        with contextlib.suppress(ValueError, KeyError):
            return int(json.loads(self._file.read())["generation"])
        return 0

    def release(self) -> None:
        """Lets another process claim the run."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class RunWriter:
    """Writes a run directory for one attempt: rank 0 while workers live, the supervisor while none does."""

    def __init__(self, path: Path, attempt: int) -> None:
        self.path, self.attempt = path, attempt
        self.folder = path / "attempts" / f"{attempt:02d}"
        self._metrics: IO[str] | None = None

    def check(self) -> None:
        """Raises StaleWriterError if a newer attempt has taken over."""
        lock = read_json(self.path / "lock") or {}
        if lock.get("generation", self.attempt) != self.attempt:
            raise StaleWriterError(
                f"attempt {lock['generation']} has taken over {self.path}; attempt {self.attempt} may not write"
            )

    def log(self, row: dict[str, Any]) -> None:
        """Appends a row, with its attempt, and hands it to the system at once."""
        if self._metrics is None:
            self._metrics = open(self.path / "metrics.jsonl", "ab+", buffering=0, opener=no_link)  # type: ignore[assignment]  # noqa: SIM115
            self._end_half_line()
        line = json.dumps({**row, "attempt": self.attempt}) + "\n"
        self._metrics.write(line.encode())  # type: ignore[union-attr,arg-type]

    def _end_half_line(self) -> None:
        """A killed writer may have left half a line: end it, so that the next row stands on one of its own."""
        file: Any = self._metrics
        if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.write(b"\n")

    def status(self, state: str, **more: Any) -> None:
        """Replaces status.json."""
        self.check()
        write_json(self.path / "status.json", {"state": state, "attempt": self.attempt, "updated": time.time(), **more})

    def update_info(self, **entries: Any) -> None:
        """Adds entries to run.json."""
        self.check()
        write_json(self.path / "run.json", (read_json(self.path / "run.json") or {}) | entries, durable=True)

    def result(self, status: str, **more: Any) -> None:
        """Writes the final record."""
        self.check()
        write_json(self.path / "result.json", {"status": status, "attempt": self.attempt, **more}, durable=True)

    def error(self, rank: int, step: int | None, error: BaseException, traceback: str) -> None:
        """Keeps an attempt's first error; later ones are mostly its echoes."""
        with contextlib.suppress(FileExistsError), open(self.folder / "error.json", "x") as file:
            json.dump(
                {"rank": rank, "step": step, "type": type(error).__name__, "message": str(error),
                 "traceback": traceback, "time": time.time()}, file, indent=1,
            )  # fmt: skip

    def stop_requested(self) -> bool:
        """Whether someone asked for a stop."""
        return (self.path / "stop").exists()

    def end_requested(self) -> bool:
        """Whether this attempt shall end: for a stop, or to let another number of processes go on."""
        return self.stop_requested() or (self.folder / "pause").exists()

    def pause_requested(self) -> bool:
        """Whether another number of processes shall go on; a stop goes before it."""
        return (self.folder / "pause").exists() and not self.stop_requested()

    def request_pause(self) -> None:
        """Asks this attempt to save and to make way for the next."""
        (self.folder / "pause").touch()

    def paused(self, step: int) -> None:
        """This attempt made way after that step."""
        self.check()
        write_json(self.folder / "paused.json", {"step": step, "time": time.time()}, durable=True)
