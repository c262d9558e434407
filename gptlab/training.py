"""The loop: step, evaluate, save, and write down what happened.

A `Trainer` is what every rank of every run executes, whoever started it. It begins at the newest good checkpoint, takes
steps until the last one or until someone asks for a stop, and leaves result.json. Timed is the step alone: windows,
forward, backward, sums and update; evaluation and saving are left out. What a save held training up for stands in its
own column, `checkpoint_stall_s`.

A checkpoint is saved every checkpoint_interval steps, at each look at the validation loss that is the lowest so far,
and at the end.

Left out on purpose: what a step is (`step.py`), the processes and their first moments (`worker.py`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gptlab import checkpoint, compiling, costs, evaluation, initial, manifest, memory
from gptlab.assembly import Setting, assemble
from gptlab.config import ConfigError, TrainConfig
from gptlab.corpus import Corpus
from gptlab.making import adapt, labels_of
from gptlab.pace import COMMUNICATION
from gptlab.parallel.world import World
from gptlab.peaks import Peak
from gptlab.preparing import Split
from gptlab.recording import RunWriter
from gptlab.runs import write_json
from gptlab.saving import Saver
from gptlab.step import StepResult

SPLITS: tuple[Split, Split] = ("train", "val")
"""Parts of a corpus."""
STATUS_EVERY_S = 0.5
"""Seconds between two heartbeats."""


def human_line(row: dict[str, Any]) -> str:
    """A step in nanoGPT's words, with the run's time as DLRover's example prints it."""
    mfu = "n/a" if row["mfu"] is None else f"{row['mfu'] * 100:.2f}%"
    return (
        f"iter {row['step']}: loss {row['loss']:.4f}, time {row['step_s'] * 1000:.2f}ms, mfu {mfu}, "
        f"lr {row['lr']:.2e}, total time {row['time_s']:.2f}s"
    )


class Trainer:
    """A run in the making, on one rank.

    Args:
        path: the run directory.
        writer: writes it, on the main rank; None on the others.
        peak: rate that MFU is measured against, for all devices of the world together; None where it is unknown.
        pids: process ids by rank, for status.json.
        say: prints a line into the rank's log.
    """

    def __init__(
        self, config: TrainConfig, setting: Setting, corpus: Corpus, world: World, path: Path, writer: RunWriter | None,
        *, peak: Peak | None, pids: list[int], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.config, self.setting, self.corpus, self.world = config, setting, corpus, world
        self.path, self.writer, self.peak, self.pids, self.say = path, writer, peak, pids, say
        self.train_data, self.val_data = (
            corpus.documents(split) if config.task == "classify" else corpus.split(split) for split in SPLITS
        )
        parts = assemble(config, setting, self.train_data, world)
        self.strategy, self.train_step = parts.strategy, parts.step
        self.compile_s = 0.0  # of this attempt: spent in compilers, no part of the steps' times
        self._steps = 0  # of this attempt
        self._graphs: int | None = None  # compiled in the first two of them: what comes later was compiled again
        self.done = 0  # steps taken
        self.spent = 0.0  # seconds of the attempts before, up to the checkpoint that this one began at
        self.bad_steps = 0  # in a row
        self._fixed: evaluation.Starts | None = None
        self.saved = -1  # step of the newest checkpoint
        self.look: tuple[int, float] | None = None  # step and loss of the last look at the validation loss
        self.best: dict[str, Any] | None = None  # step and val_loss of the lowest look so far
        self.saver = None if writer is None else Saver(
            path / "checkpoints", keep=config.keep_checkpoints, may_write=writer.check, say=say
        )  # fmt: skip
        self._began = time.monotonic()
        self._beat = 0.0
        self.pace = world.pace

    @property
    def recompiles(self) -> int:
        """Graphs that this attempt compiled after its second step."""
        return 0 if self._graphs is None else compiling.graphs() - self._graphs

    @property
    def time_s(self) -> float:
        """Seconds of training behind the present state, over all attempts."""
        return self.spent + time.monotonic() - self._began

    def resume(self) -> None:
        """Goes to the newest good checkpoint, or else to the weights that the config names, if there are any.
        Collective."""
        found = self._newest()
        if found is not None:
            files, state = checkpoint.read(found, self.strategy.shapes)
            for name, kind in (("time_s", float), ("skipped_steps", int), ("tokenizer", dict)):
                if not isinstance(state.get(name), kind):
                    raise ConfigError(f"{found / manifest.STATE} does not say {name}: go on from another checkpoint.")
            if state["tokenizer"] != self.corpus.tokenizer.to_meta():
                raise ConfigError(
                    f"The checkpoint {found} was made with another tokenizer, so its ids mean other text than those of "
                    f"{self.corpus.name}: go on from one of this run's own."
                )
            self.strategy.load(files)
            self.done = self.saved = state["step"]
            self.spent, self.train_step.skipped = state["time_s"], state["skipped_steps"]
            if self.train_step.scaler:
                self.train_step.scaler.restore(state["scaler"])
            self.best = state.get("best")
            self._began = time.monotonic()
            self.say(f"resumed from {found.name}")
        elif weights := initial.read(self.config, self.say):
            self.strategy.load({manifest.MODEL: adapt(self.config, labels_of(self.train_data), weights)})
        self.pace.begin(self.done)

    def _newest(self) -> Path | None:
        """The main process's newest good checkpoint, on every process: on a shared disk another machine may not see it
        yet, or see one more. None where there is none. Collective.

        Raises:
            CheckpointError: none is good, or the main process's cannot be read here.
        """
        folder = self.path / "checkpoints"
        found = checkpoint.newest_good(folder, self.say)
        mine = found.name if found else ""
        name = self.world.of_main(mine)
        if name and name != mine and (wrong := checkpoint.fault(folder / name)):
            raise checkpoint.CheckpointError(
                f"rank 0 goes on from {name}, and rank {self.world.rank} cannot ({wrong}): it has {mine or 'none'}"
            )
        return folder / name if name else None

    def run(self) -> str:
        """Trains to the end. Collective. Returns how it ended: finished, stopped, diverged, or paused, where another
        number of processes goes on."""
        try:
            return self._loop()
        except BaseException:
            self._let_save_end()
            raise

    def _let_save_end(self) -> None:
        """What is being written as the run breaks off is still worth having; its own error must not hide the first."""
        if self.saver is not None:
            try:
                with self.pace.within("saving"):
                    self.saver.wait()
            except Exception as error:
                self.say(str(error))

    def _loop(self) -> str:
        config = self.config
        self.strategy.part.train()
        status = "finished"
        while self.done < config.max_iters:
            self._heartbeat()
            began, compiled = time.perf_counter(), compiling.seconds()
            step = self.train_step(self.done, stop=self.writer is not None and self.writer.end_requested())
            if self.world.device.type == "cuda":
                torch.cuda.synchronize(self.world.device)  # the update may still be under way
            compiled = compiling.seconds() - compiled
            self._record(step, time.perf_counter() - began - compiled, compiled)
            seen = self.strategy.observe()
            if seen is not None and self.writer is not None:
                write_json(self.writer.folder / "pipeline.json", {"step": self.done, **seen})
            if step.stop:
                status = "stopped"
            if self.bad_steps >= config.max_bad_steps:
                return self._finish("diverged")
            last = self.done == config.max_iters or step.stop
            best = self.done % config.eval_interval == 0 and not step.stop and self._evaluate_fixed()
            if self.bad_steps == 0 and (last or best or self.done % config.checkpoint_interval == 0):
                self.save()  # never amid steps that are not finite: their weights may be the cause
            if step.stop:
                break
        if status == "stopped" and self.writer is not None and self.writer.pause_requested():
            return self._pause()
        return self._finish(status)

    def _record(self, step: StepResult, seconds: float, compiled: float) -> None:
        """Counts the step and writes its row; the main rank prints it now and then.

        Args:
            compiled: seconds that went to compilers meanwhile, and are not in `seconds`.
        """
        config = self.config
        self.done += 1
        self.pace.done(self.done)
        if not step.rescaled:  # a float16 overflow is what the scale falls for: no sign of divergence, nor of health
            self.bad_steps = self.bad_steps + 1 if step.skipped else 0
        tokens = config.global_batch_size * config.block_size
        rate = tokens / seconds
        row: dict[str, Any] = {
            "step": self.done, "tokens": self.done * tokens, "loss": step.loss, "lr": step.lr,
            "grad_norm": step.grad_norm, "step_s": seconds, "tokens_per_s": rate,
            "mfu": costs.flops_per_token(config) * rate / self.peak.flops if self.peak else None,
            "peak_bytes": memory.peak_bytes(self.world.device.type), "world_size": self.world.size,
            "time_s": self.time_s,
        }  # fmt: skip
        self.compile_s += compiled
        if compiled:
            row["compile_s"] = compiled
        self._steps += 1
        if self._steps == 2:
            self._graphs = compiling.graphs()
        if step.scale is not None:
            row["loss_scale"] = step.scale
        if step.skipped:
            row |= {"skipped": True, "loss": _plain(step.loss), "grad_norm": _plain(step.grad_norm)}
            why = f"loss {step.loss}, gradient norm {step.grad_norm}"
            if step.rescaled:
                why = f"float16 overflowed with the loss times {step.scale:g}, which is halved"
            self.say(f"step {self.done} skipped: {why}")
        if self.writer is not None:
            self.writer.log(row)
        if not step.skipped and (self.done % config.log_interval == 0 or self.done == 1):
            self.say(human_line(row))

    def _heartbeat(self) -> None:
        """Says in status.json that the run lives; every half second at most. The ranks' own files say the rest."""
        self.pace.mark()
        now = time.monotonic()
        if self.writer is not None and now - self._beat > STATUS_EVERY_S:
            self._beat = now
            self.writer.status(
                "running", step=self.done, max_iters=self.config.max_iters, world_size=self.world.size,
                pids=self.pids, straggler=self.pace.straggler,
            )  # fmt: skip

    def _evaluate_fixed(self) -> bool:
        """A look at the validation loss, over the same windows each time. Whether it is the lowest so far."""
        config, tokens = self.config, self.val_data
        if self._fixed is None:
            self._fixed = evaluation.fixed_windows(
                tokens, config.eval_iters * config.global_batch_size, config.block_size
            )
            if self.writer is not None:
                digest = evaluation.windows_hash(tokens, self._fixed, config.block_size)
                self.writer.update_info(evaluation={"windows": len(self._fixed), "sha256": digest})
        with self.pace.within("evaluating"):
            score = self.evaluate(self._fixed)
        loss = score.loss
        if self.writer is not None:
            self.writer.log({"step": self.done} | _looked(score))
        self.say(f"step {self.done}: val loss {loss:.4f}{_shown(score)}")
        self.look = (self.done, loss)
        if self.bad_steps or not np.isfinite(loss) or (self.best is not None and loss >= self.best["val_loss"]):
            return False
        self.best = {"step": self.done, "val_loss": loss}
        return True

    def evaluate(self, starts: evaluation.Starts, size: int | None = None) -> evaluation.Score:
        """The score on windows of the validation split, whose predicted tokens have `size` bytes. Collective."""
        return evaluation.score(
            self.strategy, self.val_data, starts, self.config.block_size, world=self.world, size=size,
            after_each=lambda _: self._heartbeat(),
        )  # fmt: skip

    def save(self) -> None:
        """Has a checkpoint written, unless this step has one. Training goes on once its state is copied. Collective."""
        if self.saved == self.done:
            return
        self.saved, began = self.done, time.perf_counter()
        if self.writer is not None:
            self.writer.check()
        with self.pace.within(COMMUNICATION):
            files = self.strategy.gather()
        gathering = time.perf_counter() - began
        if self.saver is not None and self.writer is not None:
            assert files is not None, "the main process has the whole state"
            here = self.look is not None and self.look[0] == self.done
            self.pace.enter("saving")
            stall = gathering + self.saver.save(
                self.done, files,
                {
                    "time_s": self.time_s, "skipped_steps": self.train_step.skipped,
                    "scaler": self.train_step.scaler.state() if self.train_step.scaler else None,
                    "model": self.config.shape().to_dict(), "tokenizer": self.corpus.tokenizer.to_meta(),
                    "origin": self.config.model,
                    "classes": self.corpus.classes if self.config.task == "classify" else None,
                    "seed": self.config.seed, "val_loss": _plain(self.look[1]) if here and self.look else None,
                    "best": self.best,
                },
            )  # fmt: skip
            self.pace.enter("other")
            self.writer.log({"step": self.done, "checkpoint_stall_s": stall})

    def _pause(self) -> str:
        """The checkpoint of this step is what another world goes on from."""
        if self.writer is not None and self.saver is not None:
            with self.pace.within("saving"):
                self.saver.wait()
            self.writer.paused(self.done)
        return "paused"

    def _finish(self, status: str) -> str:
        """Leaves the final record. A finished run is evaluated on the whole validation split; who asks for a stop wants
        it now."""
        score = None
        if status == "finished":
            starts = evaluation.covering_windows(self.val_data, self.config.block_size)
            size = None if self.config.task == "classify" else evaluation.split_bytes(self.corpus, "val")
            self.pace.enter("evaluating")
            score = self.evaluate(starts, size)
            self.say(f"step {self.done}: val loss {score.loss:.4f}{_shown(score)} over the whole validation split")
        if self.writer is not None and self.saver is not None:
            with self.pace.within("saving"):
                self.saver.wait()  # the last word is not said before the last checkpoint is on the disk
            looked = _looked(score) if score else {"val_loss": None}
            if score is not None:
                self.writer.log({"step": self.done} | looked)
            tokens = self.done * self.config.global_batch_size * self.config.block_size
            message = {"message": f"{self.bad_steps} steps in a row were not finite, the last at step {self.done}"}
            self.writer.result(
                status, step=self.done, **looked, val_bits_per_byte=score.bits_per_byte if score else None,
                tokens=tokens, time_s=self.time_s, skipped_steps=self.train_step.skipped,
                setting=dataclasses.asdict(self.setting), best=self.best, compile_s=self.compile_s,
                recompiles=self.recompiles,
                **(message if status == "diverged" else {}),
            )  # fmt: skip
            self.writer.status(
                status,
                step=self.done,
                max_iters=self.config.max_iters,
                world_size=self.world.size,
                pids=[],
                heartbeats=[],
            )
        return status


def _looked(score: evaluation.Score) -> dict[str, float]:
    """What a look at validation found, for a row."""
    return {"val_loss": score.loss} | ({} if score.accuracy is None else {"val_accuracy": score.accuracy})


def _shown(score: evaluation.Score) -> str:
    """What there is to say beside a validation loss."""
    if score.accuracy is not None:
        return f", accuracy {score.accuracy:.4f}"
    return "" if score.bits_per_byte is None else f", {score.bits_per_byte:.4f} bits a byte"


def _plain(value: float) -> float | None:
    """A number that JSON knows, or None."""
    return value if np.isfinite(value) else None
