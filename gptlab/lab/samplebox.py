"""A box that lets a run write: its newest checkpoint continues a prompt, also while the run still trains.

    >>> from gptlab.lab import SampleBox
    >>> box = SampleBox("runs"); box
    >>> box.sample("first", "def ", temperature=0.8, top_k=50); await box.done()

The text streams from a process of its own (`sampler.py`), so the kernel imports no torch and stays free.
Left out on purpose: how text is drawn (`sampling.py`).
"""

from __future__ import annotations

import asyncio
import html
import os
import threading
import time
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from gptlab.config import ConfigError
from gptlab.lab.desk import Part
from gptlab.lab.parts import CodeBox, button, call, fold, message, row, set_options, set_text, set_value, wide
from gptlab.lab.process import Process
from gptlab.runs import Run, default_runs_dir, list_runs

WRITE_S = 0.12
"""Seconds between two changes of the text on the page."""
SILENCE_S = 120.0
"""Seconds without a piece after which the process is given up."""


class SampleBox(Part):
    """Prompt, temperature, top-k, and the text that streams.

    Args:
        runs_dir: where runs are read; GPTLAB_RUNS, or `runs`, unless told otherwise.
        kind: of several boxes of a folder, those of one kind take over from one another.
    """

    def __init__(self, runs_dir: str | os.PathLike[str] | None = None, *, kind: str = "sample") -> None:
        super().__init__(kind, Path(runs_dir) if runs_dir is not None else default_runs_dir())
        self.code = CodeBox()
        self._sampler = Process("gptlab.lab.sampler")
        self._number, self._heard, self._written = 0, 0.0, ""
        self._prompted, self._step = "", None
        self._idle = threading.Event()
        self._idle.set()
        self._build()
        self._open()

    def _build(self) -> None:
        post = self.post
        ready = [run.name for run in reversed(list_runs(self.runs_dir)) if run.checkpoints()]
        self._run = widgets.Dropdown(options=ready, value=ready[0] if ready else None, description="run",
                                     style={"description_width": "auto"}, layout={"width": "300px"})  # fmt: skip
        self._prompt = widgets.Textarea(value="def ", rows=2, placeholder="prompt", tooltip="What is continued",
                                        layout={"width": "calc(100% - 4px)"})  # fmt: skip
        self._temperature = _number(widgets.BoundedFloatText, 0.8, "temperature", 160, "0 takes the most likely token",
                                    min=0, max=10, step=0.1)  # fmt: skip
        self._top_k = _number(widgets.BoundedIntText, 0, "top-k", 130, "Draw from the likeliest; 0 draws from all",
                              min=0, max=10**6)  # fmt: skip
        self._tokens = _number(widgets.BoundedIntText, 200, "tokens", 140, "The most tokens to add", min=1, max=10**5)
        self._seed = _number(
            widgets.BoundedIntText, 0, "seed", 120, "The same seed draws the same text", min=0, max=2**53
        )
        self._start = button("Sample", "pencil", "Continue the prompt with the newest checkpoint",
                             lambda: post.put("sample"), style="primary")  # fmt: skip
        self._stop = button("Stop", "stop", "End the text here", lambda: post.put("stop"), name="sample-stop")
        self._stop.disabled = True
        self._text, self._message = wide("sampled"), widgets.HTML()
        named = (self._run, "sample-run"), (self._prompt, "prompt"), (self._temperature, "temperature")
        for widget, name in (*named, (self._top_k, "top-k"), (self._tokens, "tokens"), (self._seed, "sample-seed")):
            widget.add_class(f"gptlab-{name}")
        self.widget = widgets.VBox(
            [row([self._run, self._temperature, self._top_k, self._tokens, self._seed]), self._prompt,
             row([self._start, self._stop, self._message]), self._text, fold([("code", self.code.widget)])],
            layout={"max_width": "1150px", "grid_gap": "6px"},
        )  # fmt: skip
        self.widget.add_class("gptlab-sample-box")

    # What widgets do, as calls -----------------------------------------------------------------------------------

    def sample(
        self, run: str | None = None, prompt: str | None = None, *, temperature: float | None = None,
        top_k: int | None = None, tokens: int | None = None, seed: int | None = None,
    ) -> None:  # fmt: skip
        """Begins a text; what is left out stays as the widgets say. `done` waits for its end.

        Raises:
            ConfigError: no run of that name, one without a checkpoint, or a value that cannot be.
        """
        self.check_open()
        for name, widget, value in (
            ("prompt", self._prompt, prompt), ("temperature", self._temperature, temperature),
            ("top_k", self._top_k, top_k), ("tokens", self._tokens, tokens), ("seed", self._seed, seed),
        ):  # fmt: skip
            if value is not None:
                set_value(widget, name, value)
        if run is not None:
            found = Run.open(run, self.runs_dir)
            if not found.checkpoints():
                raise ConfigError(f"The run {run!r} has no checkpoint yet: wait for its first, or train it to the end.")
            if found.name not in self._run.options:
                self._run.options = [found.name, *self._run.options]
            self._run.value = found.name
        self._idle.clear()
        self.post.put("sample")

    def stop(self) -> None:
        """Ends the text where it is."""
        self.post.put("stop")

    async def done(self) -> str:
        """Waits for the end of the text, and gives it, the prompt included."""
        while not self._idle.is_set():
            self.check_open()
            await asyncio.sleep(0.05)
        return self.text

    @property
    def text(self) -> str:
        """What is written so far, the prompt included."""
        return self._prompted + self._written

    def left(self) -> None:
        """Its process ends with it."""
        self._sampler.close()

    # The desk's thread -------------------------------------------------------------------------------------------

    def do_sample(self) -> None:
        """The button Sample."""
        if self._run.value is None:
            self._idle.set()
            raise ConfigError("No run has a checkpoint yet: wait for a first one, or train a run to its end.")
        self._number += 1
        self._idle.clear()
        self._prompted, self._written, self._step = self._prompt.value, "", None
        chosen = {"max_new_tokens": self._tokens.value, "temperature": self._temperature.value,
                  "top_k": self._top_k.value, "seed": self._seed.value}  # fmt: skip
        folder = str(self.runs_dir / self._run.value)
        self._sampler.send({"id": self._number, "run": folder, "prompt": self._prompted, **chosen})
        self._heard, self._shown = time.monotonic(), 0.0
        self._start.disabled, self._stop.disabled = False, False
        self.say("Loading the newest checkpoint …")
        sampled = call("gptlab.sample", self._prompted, **chosen).replace("sample(", "sample(run, ", 1)
        self.code.show(
            f"import gptlab\nrun = {call('gptlab.Run.open', self._run.value, str(self.runs_dir))}\n"
            f"for piece in {sampled}:\n    print(piece, end='', flush=True)"
        )

    def do_stop(self) -> None:
        """The button Stop."""
        if not self._idle.is_set():
            self._sampler.send({"id": self._number, "stop": True})

    def turn(self) -> float:
        """Takes what was written since."""
        if self._idle.is_set():
            return 0.5
        ended = None
        while (said := self._sampler.receive()) is not None:
            self._heard = time.monotonic()
            if said["id"] != self._number:
                continue
            self._step = said.get("step", self._step)
            self._written += said.get("piece", "")
            ended = said if "done" in said or "error" in said else None
        now = time.monotonic()
        if ended is None and (self._sampler.pid is None or now - self._heard > SILENCE_S):
            self._sampler.close()
            ended = {"error": "The process that samples ended without a word: try again."}
        if ended is not None or now - self._shown > WRITE_S:
            self._shown = now
            self._write()
        if ended is not None:
            self._stop.disabled = True
            step = f"{len(self._written)} characters from step {self._step}"
            self.say(ended.get("error", step), bad="error" in ended)
            self._idle.set()
        return 0.05

    def _write(self) -> None:
        if self._step is not None and not self._idle.is_set():
            self.say(f"{self._run.value}, step {self._step}")
        set_text(
            self._text,
            '<pre class="gptlab-text" role="log" aria-label="Sampled text" style="white-space:pre-wrap;margin:0;'
            "padding:6px 8px;min-height:4em;border:1px solid var(--jp-border-color2,#ddd);font-size:12.5px;"
            'line-height:1.45;color:var(--jp-ui-font-color1,#24292e)">'
            '<span style="color:var(--jp-ui-font-color2,#667)">'
            f"{html.escape(self._prompted)}</span>{html.escape(self._written)}</pre>",
        )

    def look(self) -> dict[str, Any]:
        self.due = time.monotonic() + 2.0
        return {"kind": "list", "runs_dir": str(self.runs_dir)}

    def display(self, answer: dict[str, Any]) -> None:
        if "error" not in answer:
            set_options(self._run, [name for name, _, ready in answer["runs"] if ready])

    def say(self, text: str, *, bad: bool = False) -> None:
        set_text(self._message, message(text, bad=bad))


def _number(kind: Any, value: float, name: str, width: int, tooltip: str, **limits: float) -> Any:
    """A number's field."""
    return kind(value, description=name, tooltip=tooltip, style={"description_width": "auto"},
                layout={"width": f"{width}px"}, **limits)  # fmt: skip
