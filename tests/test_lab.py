"""The lab without a browser: what is drawn, what the table says, what a choice costs, and the threads behind it."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gptlab.config import ConfigError, TrainConfig
from gptlab.lab import figures, plan, tables
from gptlab.lab.drawing import Artist, Painter
from gptlab.recording import Claim, RunWriter, create_run
from gptlab.runs import Run

widgets = pytest.importorskip("ipywidgets", reason="the lab's widgets are not installed")


def made_run(folder: Path, name: str = "one", rows: int = 50, *, state: str = "finished", **fields: Any) -> Run:
    """A run directory as a trainer leaves it."""
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 64, "block_size": 64, "max_iters": 50}
    config = TrainConfig(**(shape | fields))
    run = create_run(config, name, folder)
    noise = random.Random(name)
    with Claim(run.path) as claim:
        writer = RunWriter(run.path, claim.new_attempt())
        for step in range(1, rows + 1):
            loss = 5 / step + 2 + noise.random() / 10
            speed = {"time_s": step / 50, "tokens_per_s": 40_000.0, "mfu": 0.2}
            writer.log({"step": step, "tokens": step * 768, "loss": loss} | speed)
        if rows:
            writer.log({"step": rows, "val_loss": 2.25})
        writer.status(state)
        if state in ("finished", "failed"):
            writer.result(state, val_loss=2.25)
    return run


class FakeLauncher:
    """Writes a run at once, or lets it run until it is stopped."""

    def __init__(self, *, endless: bool = False) -> None:
        self.endless, self.launched, self.claims = endless, [], {}  # type: ignore[var-annotated]

    def warm(self) -> None:
        pass

    def launch(self, config: TrainConfig, *, name: str, runs_dir: Path) -> Any:
        self.launched.append(name)
        if not self.endless:
            made_run(runs_dir, name, **{k: v for k, v in config.to_dict().items() if k != "vocab_size"})
            return _Handle(None, None)
        run = create_run(config, name, runs_dir)
        claim = Claim(run.path)
        writer = RunWriter(run.path, claim.new_attempt())
        writer.log({"step": 1, "tokens": 768, "loss": 5.0, "time_s": 0.1, "tokens_per_s": 7680.0, "mfu": None})
        writer.status("running")
        return _Handle(claim, writer)

    def resume(self, name: str, *, runs_dir: Path) -> Any:
        raise AssertionError("nothing here is resumed")


class _Handle:
    def __init__(self, claim: Claim | None, writer: RunWriter | None) -> None:
        self.claim, self.writer = claim, writer

    @property
    def status(self) -> str:
        return "finished" if self.claim is None else "running"

    def stop(self) -> None:
        if self.claim is not None and self.writer is not None:
            self.writer.result("stopped")
            self.writer.status("stopped")
            self.claim.release()
            self.claim = None


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> FakeLauncher:
    """Sweeps and the Lab start runs with this instead of processes."""
    import gptlab.launcher

    fake = FakeLauncher()
    for name in ("warm", "launch", "resume"):
        monkeypatch.setattr(gptlab.launcher, name, getattr(fake, name))
    return fake


@pytest.fixture
def make_lab(launcher: FakeLauncher, tinytext: Path) -> Iterator[Callable[..., Any]]:
    """Makes Labs, and closes them."""
    from gptlab.lab import Lab

    made = []

    def make(folder: Path, **choice: Any) -> Any:
        usual: dict[str, Any] = {"n_layer": [1, 2], "n_head": [2, 3], "n_embd": [64], "data": str(tinytext)}
        made.append(Lab(folder, **(usual | {"max_iters": 50} | choice)))
        return made[-1]

    yield make
    for lab in made:
        lab.close()


def until(true: Callable[[], Any], patience_s: float = 30) -> None:
    """Waits for something to become true."""
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


# Figures and tables -------------------------------------------------------------------------------------------------


def test_styles_are_unique_for_sixteen_runs() -> None:
    assert len({figures.style(index) for index in range(figures.MOST_CURVES)}) == figures.MOST_CURVES == 16


def test_svg_is_text_with_the_page_s_colours_and_says_last_values(tmp_path: Path) -> None:
    one = figures.read(made_run(tmp_path), "1 & <2>")
    picture = figures.svg(figures.draw([one], legend=True), figures.describe([one]))
    loss = one.columns["loss"][-1]
    assert picture.startswith("<svg") and 'role="img"' in picture
    assert f"1 &amp; &lt;2&gt; at step 50: loss {loss:.3f}, 40,000 tokens per second, MFU 20.0 %" in picture
    assert "tokens per second</text>" in picture, "text stays text"
    assert "var(--jp-ui-font-color1" in picture and "<script" not in picture
    again = figures.svg(figures.draw([one], legend=True), figures.describe([one]))
    assert picture == again, "an unchanged picture need not be sent"


def test_numbers_on_axes_keep_their_digits(tmp_path: Path) -> None:
    figure = figures.draw([figures.read(made_run(tmp_path))])
    figure.axes[0].set_yticks([2.25, 2.75])
    picture = figures.svg(figure, "")
    assert ">2.25</text>" in picture and ">2.75</text>" in picture


def test_names_are_never_markup_or_mathematics(tmp_path: Path) -> None:
    one = figures.empty("x", "$\\frac{<b>$")
    assert "no points yet" in figures.svg(figures.draw([one]), figures.describe([one]))
    run = figures.read(made_run(tmp_path), "$\\frac{<b>$")
    assert "&lt;b&gt;" in figures.svg(figures.draw([run]), "")
    row = {"name": "x", "n_layer": "<i>", "n_head": 1, "n_embd": 1, "state": "<script>", "reason": "<img>"}
    assert not re.search(r"<(i|script|img)>", tables.table([row], {}))


def test_long_curves_are_thinned_and_keep_their_end(tmp_path: Path) -> None:
    one = figures.read(made_run(tmp_path, rows=2000, max_iters=2000))
    raw, smooth = figures.draw([one]).axes[0].get_lines()[:2]
    assert len(raw.get_xdata()) <= 160 and len(smooth.get_xdata()) <= 80  # type: ignore[arg-type]
    assert smooth.get_xdata()[-1] == 2000  # type: ignore[index]
    late = one.columns["loss"][1000:]
    assert abs(smooth.get_ydata()[-1] - late.mean()) < 0.05  # type: ignore[index]


def test_figure_needs_no_pyplot_and_shows_itself(tmp_path: Path) -> None:
    code = (
        "import sys; from gptlab.lab import figures; p = figures.draw([figures.empty('a', 'a')])._repr_png_();"
        "assert p.startswith(b'\\x89PNG'); assert not {'matplotlib.pyplot', 'torch'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_table_has_a_row_a_cell_and_the_reason_of_invalid_ones(tmp_path: Path) -> None:
    rows = tables.run_rows([made_run(tmp_path)])
    invalid = {"name": "bad", "n_layer": 1, "n_head": 3, "n_embd": 64, "state": "invalid", "reason": "3 heads & 64"}
    text = tables.table([*rows, invalid], {"one": 0})
    assert text.count("<tr") == 3 and "3 heads &amp; 64" in text and "50 / 50" in text and "2.250" in text
    assert text.count(figures.COLOURS[0]) == 1, "the table is the legend"


def test_progress_weighs_steps_by_size_and_foretells_the_end() -> None:
    small = {"state": "finished", "parameters": 1e5, "step": 100, "max_iters": 100, "seconds": 2.0}
    large = {"state": "waiting", "parameters": 3e5, "step": None, "max_iters": 100, "seconds": None}
    assert tables.work([small, large]) == (0.25, 6.0)
    assert "1 of 2 runs ended, about 6 s left" in tables.progress([small, large], running=True)
    assert tables.work([]) == (0.0, None)


# What a choice costs ------------------------------------------------------------------------------------------------


def test_plan_says_runs_invalid_cells_and_sizes_before_anything_runs() -> None:
    base = TrainConfig(block_size=64, max_iters=10)
    text = plan.describe(base, {"n_layer": [1, 2], "n_head": [2, 3], "n_embd": [64]})
    assert "<b>2 runs</b>" in text and "70.7k to 121k parameters" in text and "2 invalid" in text
    assert "cannot be split over n_head 3" in text
    assert "Nothing to run" in plan.describe(base, {"n_layer": [1], "n_head": [7], "n_embd": [64]})


def test_panel_takes_sliders_texts_and_calls() -> None:
    from gptlab.lab.panel import ConfigPanel

    panel = ConfigPanel(TrainConfig(), {"n_layer": [2], "n_head": [2], "n_embd": [64]})
    panel.axes["n_layer"].slider.value = (2, 6)
    assert panel.axes["n_layer"].text.value == "2, 4, 6"
    panel.axes["n_layer"].text.value = "2, 5"
    assert panel.axes["n_layer"].slider.value == (2, 5) and panel.axes["n_layer"].text.value == "2, 5"
    panel.choose(n_embd=[64, 200], max_iters=7, weight_decay=0.2)
    base, grid = panel.read()
    assert grid == {"n_layer": [2, 5], "n_head": [2], "n_embd": [64, 200]}
    assert (base.max_iters, base.weight_decay) == (7, 0.2) and panel.fields["max_iters"].value == 7
    assert panel.fields["seed"].tooltip == "Decides initial weights, windows and dropout."
    wrongs: list[dict[str, Any]] = [{"n_layer": 0}, {"max_iters": -5}, {"n_layers": 2}, {"n_embd": []}]
    for wrong in wrongs:
        with pytest.raises(ConfigError):
            panel.choose(**wrong)
    assert panel.read() == (base, grid), "a refused choice changes nothing"
    panel.axes["n_head"].text.value = "two"
    with pytest.raises(ConfigError, match="n_head 'two'"):
        panel.read()


# The drawing process ------------------------------------------------------------------------------------------------


def test_painter_redraws_only_what_changed(tmp_path: Path) -> None:
    made_run(tmp_path)
    painter = Painter()
    request = {"runs_dir": str(tmp_path), "sweep": None}
    first = painter.look(request)
    assert {"svg", "table", "progress", "active", "cost_s"} <= first.keys()
    assert painter.look(request) == {}
    made_run(tmp_path, "two")
    assert "two at step 50" in painter.look(request)["svg"], "a first point does not wait"


def test_drawing_process_answers_and_ends_with_its_kernel(tmp_path: Path) -> None:
    made_run(tmp_path)
    code = (
        "import sys, time; from gptlab.lab.drawing import Artist; a = Artist(); a.ask({'runs_dir': sys.argv[1]})\n"
        "while not (got := a.answer(0.1)): pass\n"
        "print(a.pid, len(got['svg']), flush=True); time.sleep(60)"
    )
    kernel = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert kernel.stdout is not None
    pid, size = map(int, kernel.stdout.readline().split())
    assert size > 1000
    kernel.send_signal(signal.SIGKILL)
    kernel.wait()
    until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2], 10)
    kernel.stdout.close()


def test_artist_replaces_a_process_that_died(tmp_path: Path) -> None:
    made_run(tmp_path)
    artist = Artist()
    try:
        artist.start()
        assert artist.pid is not None
        os.kill(artist.pid, signal.SIGKILL)
        found: dict[str, Any] | None = None
        for _ in range(3):  # the first request may still fall into the dead one's pipe
            artist.ask({"runs_dir": str(tmp_path)})
            while found is None and artist.busy:
                found = artist.answer(0.1)
        assert found is not None and "svg" in found
    finally:
        artist.close()


# The Lab ------------------------------------------------------------------------------------------------------------


def test_lab_runs_waits_and_saves(tmp_path: Path, make_lab: Callable[..., Any], launcher: FakeLauncher) -> None:
    lab = make_lab(tmp_path)
    assert lab._repr_mimebundle_()["text/plain"] == "Lab"
    until(lambda: "<b>2 runs</b>" in lab._plan.value)
    lab.run()
    asyncio.run(asyncio.wait_for(lab.done(), 60))
    assert len(launcher.launched) == 2
    assert (
        lab._picture.value.count("at step 50") == 2
        and "2x2x64 at step 50".replace("x", figures.TIMES) in lab._picture.value
    )
    assert lab._table.value.count("<tr") == 5 and "2 of 2 runs ended, 2 invalid" in lab._progress.value
    table = lab.table()
    assert list(table["state"]) == ["finished", "invalid", "finished", "invalid"]
    name = lab.sweep.name
    assert (tmp_path / f"{name}.sweep.png").stat().st_size > 10_000
    assert len((tmp_path / f"{name}.sweep.csv").read_text().splitlines()) == 5
    assert len(lab.figure().axes) == 3 and all(path.exists() for path in lab.save())
    lab.run()
    asyncio.run(asyncio.wait_for(lab.done(), 60))
    assert len(launcher.launched) == 2, "what is finished is not run again"


def test_buttons_only_queue_and_stop_ends_the_sweep(
    tmp_path: Path, make_lab: Callable[..., Any], launcher: FakeLauncher
) -> None:
    launcher.endless = True
    lab = make_lab(tmp_path)
    lab._run.click()
    until(lambda: "at step 1: loss 5.000" in lab._picture.value)
    assert lab._run.disabled and not lab._stop.disabled and "1 training" in lab._progress.value
    with pytest.raises(ConfigError, match="still running"):
        lab.run()
    lab._stop.click()
    asyncio.run(asyncio.wait_for(lab.done(), 60))
    assert [row["state"] for row in lab.sweep.rows()] == ["stopped", "invalid", "waiting", "invalid"]
    assert not lab._run.disabled and lab._stop.disabled


def test_a_wrong_choice_is_said_not_raised_by_a_button(tmp_path: Path, make_lab: Callable[..., Any]) -> None:
    lab = make_lab(tmp_path, n_head=[7])
    until(lambda: "Nothing to run" in lab._plan.value)
    lab._run.click()
    until(lambda: "can be run" in lab._message.value)
    asyncio.run(asyncio.wait_for(lab.done(), 10))
    with pytest.raises(ConfigError, match="can be run"):
        lab.run()
    assert list(tmp_path.glob("*.sweep.json")) == []


def test_a_lab_made_again_takes_over_thread_process_and_sweep(
    tmp_path: Path, make_lab: Callable[..., Any], launcher: FakeLauncher
) -> None:
    launcher.endless = True
    first = make_lab(tmp_path)
    first.run()
    until(lambda: launcher.launched)
    second = make_lab(tmp_path)
    assert sum(thread.name == second._thread.name for thread in threading.enumerate()) == 1
    assert first._artist.pid is None and second._artist.pid is not None
    with pytest.raises(RuntimeError, match="taken over"):
        first.stop()
    until(lambda: "1 training" in second._progress.value)
    second.stop()
    asyncio.run(asyncio.wait_for(second.done(), 60))
    assert second.sweep.rows()[0]["state"] == "stopped"


def test_a_new_kernel_shows_the_runs_that_are_there(tmp_path: Path, make_lab: Callable[..., Any]) -> None:
    lab = make_lab(tmp_path)
    lab.run()
    asyncio.run(asyncio.wait_for(lab.done(), 60))
    lab.close()
    again = make_lab(tmp_path)
    until(lambda: "2x2x64 at step 50".replace("x", figures.TIMES) in again._picture.value)
    assert again._table.value.count("<tr") == 5
    again.show("")
    until(lambda: f"{lab.name}-" in again._picture.value)


def test_thread_and_process_end_with_a_forgotten_lab(
    tmp_path: Path, make_lab: Callable[..., Any], launcher: Any
) -> None:
    from gptlab.lab import Lab

    lab = Lab(tmp_path, name="forgotten")
    thread, artist = lab._thread, lab._artist
    until(lambda: artist.pid is not None)
    del lab
    gc.collect()
    until(lambda: not thread.is_alive(), 10)
    assert artist.pid is None


def test_importing_and_making_a_lab_loads_no_torch_and_draws_nothing_here(tmp_path: Path) -> None:
    code = (
        "import sys; from gptlab.lab import Lab; lab = Lab(sys.argv[1]); import time; time.sleep(1)\n"
        "print([name for name in ('torch', 'matplotlib', 'pandas') if name in sys.modules]); lab.close()"
    )
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_sweep_names_follow_the_settings_not_the_shape() -> None:
    from gptlab.lab.naming import sweep_name

    base = TrainConfig(max_iters=10)
    assert sweep_name("lab", base) == sweep_name("lab", base.replace(n_layer=3))
    assert sweep_name("lab", base) != sweep_name("lab", base.replace(max_iters=11))


# The demo -----------------------------------------------------------------------------------------------------------


def test_demo_page_needs_no_network_and_keeps_the_widgets_last_picture() -> None:
    pytest.importorskip("nbconvert")
    from nbformat.v4 import new_code_cell, new_notebook, new_output

    from gptlab.lab import demo

    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "box"}, "text/plain": "Lab"}
    state = {
        "box": {"state": {"children": ["IPY_MODEL_picture"], "_model_name": "VBoxModel"}},
        "picture": {"state": {"value": '<svg id="last"></svg>', "_model_name": "HTMLModel"}},
    }
    notebook = new_notebook(cells=[new_code_cell("lab", outputs=[new_output("display_data", data=view)])])
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": state}}
    page = demo.page(notebook)
    assert '<svg id="last"></svg>' in page
    assert not re.search(r"""(src|href)=["']https?:""", page) and "import(" not in page


def test_notebook_is_stored_without_outputs() -> None:
    notebook = json.loads((Path(__file__).parents[1] / "notebooks" / "01_sweep.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
