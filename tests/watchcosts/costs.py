"""What watching costs: each function measures something and gives figures with the limits that they are held to."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jupyter
from desktop import Desktop, desktop
from live import Live

import gptlab
from gptlab import TrainConfig, hardware
from gptlab.runs import Run

HALF_HOUR_S = 1800.0
EYEBLINK_S = 2.0
"""Seconds at both ends of a measurement in which rows are not counted: a view is being opened or closed."""
PATIENCE_S = 600.0
"""How long a thing may take that is waited for: no measure."""


@dataclass(frozen=True)
class Cost:
    """A figure and its limit."""

    what: str
    value: float
    unit: str
    limit: float | None
    """None where the figure is told for its own sake."""
    said: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the limit is broken."""
        return self.limit is not None and not self.value <= self.limit


def watching(folder: Path, seconds: float, growing: float) -> list[Cost]:
    """Four live runs of 1000 points in JupyterLab: from a row written to the row on the screen, what kernel and drawing
    use meanwhile, and what kernel and page grow by.

    Args:
        seconds: that delay and shares are measured for.
        growing: seconds that pictures come without a rest, to see in minutes what half an hour does.
    """
    with Live(folder / "runs") as live, desktop(folder, folder / "runs") as desk:
        desk.watch()
        time.sleep(EYEBLINK_S)
        before, began, pictures = desk.usage(), time.time(), desk.pictures
        time.sleep(seconds)
        shares = before.shares(desk.usage())
        every = seconds / max(1, desk.pictures - pictures)
        found = delays(live, desk, began, began + seconds - EYEBLINK_S)
        late = sorted(found)[math.ceil(0.95 * len(found)) - 1]
        costs = [
            Cost("row written to row on the screen, median", statistics.median(found), "s", 1.5,
                 f"{len(found)} rows, 95 % within {late:.2f} s, a picture every {every:.2f} s"),
            Cost("kernel, 4 live runs of 1000 points", 100 * shares["kernel"], "% of a core", 3.0),
            Cost("drawing process, the same", 100 * shares["drawing"], "% of a core", 10.0),
            Cost("browser, the same", 100 * shares["browser"], "% of a core", None),
        ]  # fmt: skip
        return costs + growth(live, desk, growing, HALF_HOUR_S / every)


def delays(live: Live, desk: Desktop, first: float, last: float) -> list[float]:
    """Seconds from each row that was written between two moments until it was on the screen."""
    seen = desk.seen()
    found = []
    for (name, step), at in live.written.items():
        if first <= at <= last:
            shown = next((when for there, when in seen.get(name, []) if there >= step), math.inf)
            found.append(shown - at)
    assert found, "no row was written"
    return found


def growth(live: Live, desk: Desktop, seconds: float, pictures: float) -> list[Cost]:
    """What kernel and page grow by in so many pictures, from fewer of them shown in a hurry."""
    live.every_s = 0.05
    before = desk.pictures
    desk.press("hurry")
    until(lambda: desk.pictures >= before + 20)  # caches are filled, and the hasty process draws
    began, samples = time.monotonic(), list[tuple[float, ...]]()
    while (passed := time.monotonic() - began) < seconds or len(samples) < 8:
        samples.append((desk.pictures, desk.kernel_mb(), desk.heap_mb(), desk.page_mb()))
        time.sleep(max(0.2, min(seconds / 30, seconds - passed)))
    late = samples[len(samples) // 4 :]  # the first quarter is warm-up
    shown = late[-1][0] - late[0][0]
    said = f"from {shown} pictures"
    return [
        Cost(f"{name} grows in 30 minutes", slope(late, place) * pictures, "MB", 50.0, said)
        for place, name in ((1, "kernel"), (2, "the page's heap"), (3, "the page's process"))
    ]


def slope(samples: list[tuple[float, ...]], place: int) -> float:
    """Growth of a column by the first one: the line of least squares, which one high reading does not tilt much."""
    shown, values = [sample[0] for sample in samples], [sample[place] for sample in samples]
    return statistics.linear_regression(shown, values).slope


def slowdown(folder: Path, window: float, pairs: int) -> list[Cost]:
    """A training run on all cores, unwatched and watched in turn, so many times, for some seconds each."""
    runs = folder / "runs"
    with trainer(runs) as run, desktop(folder, runs) as desk:
        wait_for_steps(run, 50)
        losses = []
        for _ in range(pairs):
            alone = rate(run, window)
            desk.watch()
            watched = rate(run, window)
            desk.press("leave")
            losses.append(100 * (alone / watched - 1))
    said = ", ".join(f"{loss:+.1f}" for loss in losses)
    return [Cost("training on all cores, slower when watched", statistics.median(losses), "%", 5.0, f"pairs: {said}")]


@contextlib.contextmanager
def trainer(runs: Path) -> Iterator[Run]:
    """A run that trains on all cores until the end of the `with`."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    text = runs.parent / "text.txt"
    text.write_text((stdlib / "argparse.py").read_text())
    shape = {"n-layer": 4, "n-head": 4, "n-embd": 128, "block-size": 64, "threads": hardware.cores()}
    rest = {"max-iters": 10**7, "eval-interval": 10**7, "checkpoint-interval": 10**7, "data": text, "name": "trained"}
    flags = [word for name, value in (shape | rest).items() for word in (f"--{name}", str(value))]
    process = subprocess.Popen(
        [sys.executable, "-m", "gptlab.cli", "train", *flags, "--runs-dir", str(runs)], stdout=subprocess.DEVNULL
    )
    try:
        yield Run(runs / "trained")
    finally:
        process.terminate()
        process.wait()


def wait_for_steps(run: Run, steps: int) -> None:
    """Until a run has taken some steps more."""
    goal = run.step() + steps
    until(lambda: run.step() >= goal)


def rate(run: Run, seconds: float) -> float:
    """Steps a second, measured after the first moments."""
    time.sleep(EYEBLINK_S)
    before, began = run.step(), time.monotonic()
    time.sleep(seconds)
    return (run.step() - before) / (time.monotonic() - began)


def sweep(folder: Path, count: int, least_s: float = 8.0) -> list[Cost]:
    """A sweep of so many runs one at a time, against the seconds that they trained."""
    base = TrainConfig(n_layer=2, n_head=2, n_embd=64, block_size=64, max_iters=300)
    probe = gptlab.sweep(base, {"seed": [99]}, name="probe", runs_dir=folder / "runs")  # starts the launcher too
    probe.wait()
    (row,) = probe.rows()
    steps = math.ceil(1.1 * least_s * row["step"] / row["seconds"])
    began = time.monotonic()
    begun = gptlab.sweep(
        base.replace(max_iters=steps), {"seed": list(range(count))}, name="s", runs_dir=folder / "runs"
    )
    begun.wait()
    wall = time.monotonic() - began
    rows = begun.rows()
    assert all(row["state"] == "finished" for row in rows), [row["state"] for row in rows]
    trained = [row["seconds"] for row in rows]
    said = f"{wall:.1f} s for {count} runs of {min(trained):.1f} to {max(trained):.1f} s"
    return [Cost("a sweep, times its training seconds", wall / sum(trained), "times", 1.15, said)]


def first_point(folder: Path, tries: int) -> list[Cost]:
    """From Run to the first point in the picture, the launcher warm."""
    from gptlab.lab import Lab
    from gptlab.lab.figures import TIMES

    lab = Lab(folder / "runs", n_layer=1, n_head=2, max_iters=60)
    found = []
    for width in range(64, 64 + 8 * (tries + 1), 8):  # each time a run that was not there
        lab.choose(n_embd=width)
        began = time.monotonic()
        lab.run()
        until(partial(lambda label: label in lab.runs.picture.value, f"1{TIMES}2{TIMES}{width} at step"))
        found.append(time.monotonic() - began)
        asyncio.run(lab.done())
    lab.close()
    found = found[1:]  # the first one starts the launcher and prepares the text
    said = ", ".join(f"{seconds:.2f}" for seconds in found)
    return [Cost("Run to the first point, median", statistics.median(found), "s", 1.5, said)]


def notebooks(folder: Path, budget: str, names: list[str]) -> list[Cost]:
    """The size of each executed notebook, with the state of its widgets."""
    import nbformat

    from gptlab.lab.demo import execute

    costs = []
    for name in names:
        runs = folder / "runs" / name
        runs.mkdir(parents=True)
        os.environ["GPTLAB_BUDGET"] = budget
        notebook, error = execute(next(jupyter.NOTEBOOKS.glob(f"{name}*.ipynb")), runs)
        assert error is None, error
        size = len(nbformat.writes(notebook).encode()) / 1e6
        costs.append(Cost(f"notebook {name}, executed", size, "MB", 1.5, f"{budget} budget"))
    return costs


def until(true: Callable[[], bool]) -> None:
    """Waits for something to become true."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)
