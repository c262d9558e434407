"""The run directory: what a trainer writes, and everything else reads.

A trainer only writes here; the command, sweeps, widgets and plots only read, or ask a trainer to stop. So a kernel
that restarts loses nothing and a run on another machine looks like one on this.

    runs/NAME/
      run.json        what was asked for and what each `auto` became
      status.json     state, attempt, pids, heartbeats; replaced as a whole
      lock            who may write: held with flock while a trainer lives, with the generation (the attempt) inside
      metrics.jsonl   one JSON object a line
      attempts/NN/    rank-R.out, rank-R.err, rank-R.json (heartbeat) of each rank, error.json of the first that failed,
                      rank-R.stack where one hung
      checkpoints/step-00000120/
      result.json     the final record
      stop            its presence asks for a stop

    >>> from gptlab.runs import Run
    >>> Run("runs/first").frame()[["step", "loss"]].tail()

Left out on purpose: writing one (`recording.py`), and what a checkpoint holds (`checkpoint.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from gptlab.config import ConfigError, TrainConfig, did_you_mean
from gptlab.jsonfile import read_json as read_json
from gptlab.jsonfile import write_json as write_json
from gptlab.records import read_record, sound

if TYPE_CHECKING:
    import pandas

QUEUED = "queued"
"""State of a run whose job waits in SLURM's queue: no trainer is alive, and one will come without being asked."""
PLANNED = "planned"
"""State of a run that was made for an engine (a manifest, a script) and that nothing has started yet."""
TRAINING = ("preparing", "starting", "running", "restarting")
"""States in which a trainer should be alive."""
ACTIVE = (QUEUED, *TRAINING)
"""States of a run that goes on by itself."""


RANK_SAYS = {"heartbeats": "time", "rank_steps": "step", "phases": "phase", "since": "since", "shares": "shares"}
"""What `Run.status` takes from the ranks' own files (`pace.py`), and its name there."""


def default_runs_dir() -> Path:
    """Where runs are written unless told otherwise: GPTLAB_RUNS, or `runs` in the working folder."""
    return Path(os.environ.get("GPTLAB_RUNS") or "runs")


class Run:
    """A run directory, read. Nothing here writes, but for `request_stop`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.name = os.path.basename(os.path.abspath(self.path))  # of "." too
        self._metrics = _MetricsTail(self.path / "metrics.jsonl")

    @classmethod
    def open(cls, name: str, runs_dir: str | os.PathLike[str] | None = None) -> Self:
        """The run of that name (or path). ConfigError names the nearest known one."""
        base = Path(runs_dir) if runs_dir is not None else default_runs_dir()
        for path in (base / name, Path(name)):
            with contextlib.suppress(OSError, ValueError):  # a name that no file can have, or may not be looked for
                if name and (path / "run.json").is_file():
                    return cls(path)
        known = [run.name for run in list_runs(base)]
        raise ConfigError(
            f"There is no run {name[:100]!r} in {base}{did_you_mean(name, known)}: `gptlab runs` lists them."
        )

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def info(self) -> dict[str, Any]:
        """run.json."""
        return read_record(self.path / "run.json") or {}

    @property
    def config(self) -> TrainConfig:
        """What was asked for, with the vocabulary that the corpus gave.

        Raises:
            ConfigError: run.json is damaged, or of a version with other settings.
        """
        info = self.info
        if "config" not in info:
            raise ConfigError(
                f"{self.path / 'run.json'} has no config that can be read: bring the file back, or start a new run."
            )
        try:
            return TrainConfig.from_dict(info["config"])
        except ConfigError as error:
            made = f"gptlab {info['gptlab']}" if info.get("gptlab") else "another version"
            raise ConfigError(
                f"The settings of the run {self.name!r}, which {made} wrote, cannot be read here ({error}): read it "
                "with that version, or start a new run."
            ) from None

    def status(self) -> dict[str, Any]:
        """status.json, with `state` corrected to `lost` where the trainer that should be there is gone.

        While workers live, what they say of themselves joins it, a list each with an entry a rank, None where a rank
        has said nothing yet: `heartbeats` (epoch seconds of its last one), `rank_steps`, `phases` (what it does:
        forward, backward, communication, saving, ...), `since` (epoch seconds: no sign of progress since then), and
        `shares` (of its recent time: forward, backward, communication, wait; 0..1). `straggler` is the rank that the
        others wait for, or None.
        """
        status = self._said()
        if status["state"] in TRAINING and not is_locked(self.path):
            status = self._said()  # the writer may have ended between the two looks
            if status["state"] in TRAINING:
                status["state"] = "lost"
        if status["state"] in ("starting", "running"):
            folder = self.path / "attempts" / f"{status.get('attempt') or 0:02d}"
            ranks = [read_record(folder / f"rank-{rank}.json") or {} for rank in range(status.get("world_size") or 0)]
            status |= {told: [rank.get(said) for rank in ranks] for told, said in RANK_SAYS.items()}
        return status

    def _said(self) -> dict[str, Any]:
        """status.json; before it is there, the run is being prepared."""
        said = read_record(self.path / "status.json") or {}
        return said if said.get("state") else said | {"state": "preparing"}

    @property
    def state(self) -> str:
        """One word: planned, queued, preparing, starting, running, restarting, finished, stopped, failed, diverged or
        lost."""
        return str(self.status().get("state"))

    @property
    def is_active(self) -> bool:
        """Whether a trainer is at work on it, or will be as soon as SLURM has room."""
        return self.state in ACTIVE

    def result(self) -> dict[str, Any] | None:
        """result.json, or None while the run goes on."""
        return read_record(self.path / "result.json")

    def metrics(self) -> list[dict[str, Any]]:
        """A row a step, in order: the newest attempt's, where a step was done twice. Reads only what is new."""
        return self._metrics.rows()

    def frame(self) -> pandas.DataFrame:
        """`metrics()` as a table."""
        import pandas

        return pandas.DataFrame(self.metrics())

    def step(self) -> int:
        """Steps taken so far."""
        return next((int(row["step"]) for row in reversed(self.metrics()) if "loss" in row), 0)

    def tokens(self) -> int | None:
        """Tokens trained on so far; None before the first step."""
        return next((row["tokens"] for row in reversed(self.metrics()) if row.get("tokens") is not None), None)

    def attempts(self) -> list[Path]:
        """Folders of the attempts, oldest first."""
        return attempt_folders(self.path)

    def attempts_table(self) -> list[dict[str, Any]]:
        """A row an attempt: attempt, world_size, began, ended (epoch seconds; None while it lasts), from_step, to_step,
        rank (of the first that failed), error (in a sentence, None where none was), recovery_s (from the end of the
        attempt before to this one's first step)."""
        from gptlab.attempts import attempts_table

        self.metrics()
        return attempts_table(self.attempts(), self._metrics.spans, active=self.state in TRAINING)

    def why(self) -> list[str]:
        """Why the run is in the state that it is in, in lines for a person: what happened on which rank after which
        step, what was kept of it, each attempt, and how to go on."""
        from gptlab.attempts import why

        return why(self.name, self.status(), self.result(), self.error(), self.attempts(), self.attempts_table())

    def error(self) -> dict[str, Any] | None:
        """The newest attempt's first error: rank, step, message and traceback; None if it had none."""
        attempts = self.attempts()
        return read_record(attempts[-1] / "error.json") if attempts else None

    def log(self, rank: int = 0) -> str:
        """What a rank of the newest attempt printed, to both streams."""
        attempts = self.attempts()
        parts = [attempts[-1] / f"rank-{rank}.{stream}" for stream in ("out", "err")] if attempts else []
        return "".join(part.read_text(errors="replace") for part in parts if part.exists())

    def pipeline(self) -> dict[str, Any] | None:
        """A pipeline's timeline, measured and predicted, of the newest attempt that has one (`record` in
        `parallel/pipeline/timeline.py` says what it holds); None where there is none."""
        found = (read_json(attempt / "pipeline.json") for attempt in reversed(self.attempts()))
        return next((record for record in found if record is not None), None)

    def checkpoints(self) -> list[Path]:
        """Folders of complete checkpoints, oldest first."""
        return sorted((self.path / "checkpoints").glob("step-*"))

    def request_stop(self) -> None:
        """Asks for a stop at the next step, on every rank together, with a checkpoint."""
        (self.path / "stop").touch()

    def summary(self) -> dict[str, Any]:
        """One row of a table of runs: shape, state, progress, last losses, median speed over the last half."""
        config, rows, result = self.config, self.metrics(), self.result() or {}
        losses = [row for row in rows if "loss" in row]
        late = losses[len(losses) // 2 :]
        return {
            "name": self.name,
            "n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd,
            "state": self.state,
            "step": losses[-1]["step"] if losses else 0,
            "max_iters": config.max_iters,
            "loss": losses[-1]["loss"] if losses else None,
            "val_loss": result.get("val_loss", next((r["val_loss"] for r in reversed(rows) if "val_loss" in r), None)),
            "tokens_per_s": _median([row["tokens_per_s"] for row in late if row.get("tokens_per_s") is not None]),
            "mfu": _median([row["mfu"] for row in late if row.get("mfu") is not None]),
            "seconds": losses[-1].get("time_s") if losses else None,
        }  # fmt: skip

    def row(self) -> dict[str, Any]:
        """`summary`; of a run that cannot be read name and state alone, and the reason, so that one such run does not
        hide the others of its folder."""
        try:
            return self.summary()
        except ConfigError as error:
            return {"name": self.name, "state": self.state, "reason": str(error)}


class _MetricsTail:
    """Rows of metrics.jsonl by step, extended at each look by the lines that came since."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.inode = path, 0, -1
        self.by_step: dict[int, dict[str, Any]] = {}
        self.spans: dict[int, tuple[int, int]] = {}  # by attempt: first and last step that it did

    def rows(self) -> list[dict[str, Any]]:
        try:
            if not self.path.is_file():
                return []
            with open(self.path, "rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self.inode or stat.st_size < self.offset:
                    self.offset, self.inode, self.by_step, self.spans = 0, stat.st_ino, {}, {}
                file.seek(self.offset)
                new = file.read()
        except OSError:
            return []
        whole = new[: new.rfind(b"\n") + 1]  # a half-written last line waits for its end
        self.offset += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                row = sound(json.loads(line))
                if row["step"] is None or row["attempt"] is None:
                    continue
                if "loss" in row:
                    self.spans[row["attempt"]] = (self.spans.get(row["attempt"], (row["step"],))[0], row["step"])
                old = self.by_step.get(row["step"], row)
                if row["attempt"] == old["attempt"]:
                    self.by_step[row["step"]] = old | row
                elif row["attempt"] > old["attempt"]:
                    # Without a loss it is no step done again, but what a later attempt had to add to it.
                    self.by_step[row["step"]] = row if "loss" in row else old | row
        return [self.by_step[step] for step in sorted(self.by_step)]


def list_runs(runs_dir: str | os.PathLike[str] | None = None) -> list[Run]:
    """The runs in a folder, oldest first."""
    base = Path(runs_dir) if runs_dir is not None else default_runs_dir()
    try:
        found = [Run(base / name) for name in os.listdir(base) if os.path.lexists(base / name / "run.json")]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{str(base)[:80]!r} cannot be looked into ({why}): give another --runs-dir.") from None
    return sorted(found, key=lambda run: (run.info.get("created") or 0, run.name))


def attempt_folders(path: Path) -> list[Path]:
    """Folders of a run's attempts, oldest first."""
    found = [folder for folder in (path / "attempts").glob("[0-9]*") if folder.name.isdecimal()]
    return sorted(found, key=lambda folder: int(folder.name))


def is_locked(path: Path) -> bool:
    """Whether some living process holds the right to write this run."""
    try:
        # A pipe of that name would be waited on for ever.
        with open(path / "lock", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:  # but for a lock that is held: no such file, or one that nobody can hold
        return isinstance(error, BlockingIOError)
    return False


def _median(values: list[float]) -> float | None:
    """The middle of a list, or None of an empty one."""
    return sorted(values)[len(values) // 2] if values else None
