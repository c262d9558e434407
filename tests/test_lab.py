"""The lab's widgets without a browser: their state, their code, and the thread behind them."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from labtools import FakeLauncher, made_run, until
from labtools import launcher as launcher
from labtools import make as make

from gptlab.config import LIMITS, ConfigError, TrainConfig, field_docs, field_types
from gptlab.lab import figures
from gptlab.sweeps import sweep

widgets = pytest.importorskip("ipywidgets", reason="the lab's widgets are not installed")


@pytest.fixture
def make_lab(make: Callable[..., Any], tinytext: Path) -> Callable[..., Any]:
    """Makes Labs with a small grid."""
    usual: dict[str, Any] = {
        "n_layer": [1, 2],
        "n_head": [2, 3],
        "n_embd": [64],
        "data": str(tinytext),
        "max_iters": 50,
    }
    return lambda folder, **choice: make("Lab", folder, **(usual | choice))


def test_panel_takes_sliders_texts_and_calls(make: Callable[..., Any], tmp_path: Path) -> None:
    panel = make("SweepPanel", tmp_path, n_layer=2, n_head=2, n_embd=64)
    panel.axes["n_layer"].slider.value = (2, 6)
    assert panel.axes["n_layer"].text.value == "2, 4, 6"
    panel.axes["n_layer"].text.value = "2, 5"
    assert panel.axes["n_layer"].slider.value == (2, 5) and panel.axes["n_layer"].text.value == "2, 5"
    panel.choose(n_embd=[64, 200], max_iters=7, weight_decay=0.2)
    base, grid = panel.read()
    assert grid == {"n_layer": [2, 5], "n_head": [2], "n_embd": [64, 200]}
    assert (base.max_iters, base.weight_decay) == (7, 0.2) and panel.fields["max_iters"].value == 7
    wrongs: list[dict[str, Any]] = [
        {"n_layer": 0},
        {"max_iters": -5},
        {"n_layers": 2},
        {"vocab_size": 65},
        {"n_embd": []},
    ]
    for wrong in wrongs:
        with pytest.raises(ConfigError):
            panel.choose(**wrong)
    assert panel.read() == (base, grid), "a refused choice changes nothing"
    panel.axes["n_head"].text.value = "two"
    with pytest.raises(ConfigError, match="n_head 'two'"):
        panel.read()


def test_panel_has_every_field_with_its_docstring_and_limits(make: Callable[..., Any], tmp_path: Path) -> None:
    panel = make("ConfigPanel", runs_dir=tmp_path)
    docs = field_docs(TrainConfig)
    assert {*panel.fields, *panel.axes, "vocab_size"} == {*field_types(TrainConfig)}
    for name, widget in panel.fields.items():
        assert widget.tooltip == docs[name], name
        if name in LIMITS and hasattr(widget, "max"):
            assert (widget.min, widget.max) == LIMITS[name]
    shown = {id(widget) for widget in (*panel.settings.children, *panel.choices.children[-1].children)}
    assert shown == {id(widget) for widget in panel.fields.values()}, "each stands on the page, once"


def test_config_panel_prices_says_wrong_heads_and_runs(
    make: Callable[..., Any], tmp_path: Path, launcher: FakeLauncher, tinytext: Path
) -> None:
    panel = make("ConfigPanel", runs_dir=tmp_path, n_layer=2, n_head=2, n_embd=64, data=str(tinytext), min_lr=1e-5)
    until(lambda: "of memory" in panel.plan.value and "MFU" in panel.plan.value and "predicted" in panel.plan.value)
    before = panel.plan.value
    panel.axes["n_layer"].slider.value = 4
    until(lambda: panel.plan.value != before and "parameters" in panel.plan.value)
    panel.axes["n_head"].text.value = "3"
    until(lambda: "cannot be split over n_head 3" in panel.plan.value)
    panel._run.click()
    until(lambda: "cannot be split over n_head 3" in panel._message.value)
    assert launcher.launched == []
    with pytest.raises(ConfigError, match="a ConfigPanel takes one"):
        panel.choose(n_embd=[64, 128])
    panel.fields["min_lr"].value = "low"
    with pytest.raises(ConfigError, match="min_lr 'low' is not a number"):
        panel.read()
    panel.fields["min_lr"].value = "0.0001"
    panel.choose(n_head=2)
    until(lambda: "n_head=2" in panel.code.text and "min_lr=0.0001" in panel.code.text)
    said: dict[str, Any] = {}
    exec(panel.code.text, said)
    assert said["config"] == panel.config == TrainConfig.from_dict(panel.config.to_dict())
    panel._run.click()
    until(lambda: launcher.launched and "Training" in panel._message.value)
    assert "handle = gptlab.launch(config, name=" in panel.code.text


def test_the_speed_of_a_machine_is_measured_once_where_it_is_unknown(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gptlab import peaks
    from gptlab.lab import measuring

    known = peaks.cache_file().read_text()
    peaks.cache_file().unlink()
    started: list[list[str]] = []

    class Quick:
        def __init__(self, command: list[str], **_: Any) -> None:
            started.append(command)
            peaks.cache_file().write_text(known)

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(measuring, "WARM_S", 0.3)
    monkeypatch.setattr("gptlab.lab.measuring.subprocess.Popen", Quick)
    panel = make("ConfigPanel", runs_dir=tmp_path)
    until(lambda: "measuring how fast this machine is" in panel.plan.value)
    until(lambda: "predicted (cpu" in panel.plan.value)
    assert len(started) == 1 and "--measure" in started[0]


def test_view_sorts_hides_compares_logs_and_says_the_calls(make: Callable[..., Any], tmp_path: Path) -> None:
    for name, rows in (("a", 10), ("b", 30)):
        made_run(tmp_path, name, rows=rows, n_embd=64 if name == "a" else 96)
    view = make("RunsView", tmp_path)
    assert view._repr_mimebundle_()["text/plain"] == "RunsView"
    until(lambda: "b at step 30" in view.picture.value and view._actions.picker.options == ("a", "b"))
    view.sort("step", descending=True)
    until(lambda: view.table_html.value.find(">b</td>") < view.table_html.value.find(">a</td>"))
    assert list(view.table()["name"]) == ["b", "a"]
    with pytest.raises(ConfigError, match="did you mean 'loss'"):
        view.sort("los")
    view.show(x="tokens", log_y=True)
    until(lambda: "tokens seen" in view.picture.value)
    view._actions.picker.value = ["a"]
    view._actions.buttons["Hide"].click()
    until(lambda: "a at step" not in view.picture.value)
    script = view.code.text.replace("runs.png", str(tmp_path / "runs.png"))
    assert "x='tokens', log_y=True" in script
    said: dict[str, Any] = {}
    exec(script, said)
    assert [run.name for run in said["runs"]] == ["b"] and (tmp_path / "runs.png").stat().st_size > 10_000
    assert list(view.compare().columns) == ["b"], "without names, what is shown"
    view.show_all()
    table = view.compare("a", "b")
    assert list(table.loc["n_embd"]) == [64, 96]
    until(lambda: "loss at step 10" in view._comparison.value)
    view.log("a")
    until(lambda: "Log of a" in view._log.value)
    picture, vector, numbers = view.save()
    assert vector.read_text().startswith("<svg") and picture.exists() and len(numbers.read_text().splitlines()) == 3


def test_view_stops_and_resumes_runs(make: Callable[..., Any], tmp_path: Path, launcher: FakeLauncher) -> None:
    launcher.endless = True
    handle = launcher.launch(TrainConfig(n_layer=1, n_head=1, n_embd=32), name="slow", runs_dir=tmp_path)
    made_run(tmp_path, "halted", state="stopped", rows=3)
    made_run(tmp_path, "put away", state="stopped", rows=3)
    view = make("RunsView", tmp_path)
    until(lambda: view.active and "1 training" in view.progress.value)
    view.hide("slow", "put away")
    until(lambda: "slow" not in view.table_html.value)
    hidden_at = view.shown_at
    until(lambda: view.shown_at > hidden_at)
    assert not view._actions.buttons["Stop"].disabled and not view._actions.buttons["Stop all"].disabled
    view._actions.buttons["Stop"].click()
    until(lambda: "Stop needs a run" in view._message.value)
    view._actions.picker.value = ["slow"]
    view._actions.buttons["Stop"].click()
    until((tmp_path / "slow" / "stop").exists)
    assert f"gptlab.Run.open('slow', '{tmp_path}').request_stop()" in view.code.text
    handle.stop()
    until(lambda: not view.active)
    view._actions.picker.value = []
    view.show_all()
    view.hide("put away")
    view.resume()
    assert sorted(launcher.resumed) == ["halted", "slow"]
    assert f"gptlab.resume('halted', runs_dir='{tmp_path}')" in view.code.text


def test_a_view_stops_a_sweep_that_another_process_works(
    make: Callable[..., Any], tmp_path: Path, launcher: FakeLauncher, tinytext: Path
) -> None:
    launcher.endless = True
    base = TrainConfig(n_layer=1, n_head=1, n_embd=32, data=str(tinytext))
    begun = sweep(base, {"n_layer": [1, 2]}, name="theirs", runs_dir=tmp_path)
    until(lambda: launcher.launched)
    view = make("RunsView", tmp_path)
    until(lambda: view.active)
    view._actions.buttons["Stop all"].click()
    assert begun.wait(30)
    assert [row["state"] for row in begun.rows()] == ["stopped", "waiting"]
    assert f"gptlab.Sweep.open('theirs', '{tmp_path}').request_stop()" in view.code.text


def test_two_views_share_a_thread_and_a_process(make: Callable[..., Any], tmp_path: Path) -> None:
    made_run(tmp_path)
    one, two = make("RunsView", tmp_path, kind="left"), make("RunsView", tmp_path, kind="right")
    box = make("SampleBox", tmp_path)
    until(lambda: "one at step 50" in one.picture.value and "one at step 50" in two.picture.value)
    assert one.desk is two.desk
    processes = (one._reports._process, box._sampler)
    for process in processes:
        process.start()
    again = make("RunsView", tmp_path, kind="left")
    make("SampleBox", tmp_path)
    assert [process.pid for process in processes] == [None, None], "what one alone used ends with it"
    with pytest.raises(RuntimeError, match="taken over"):
        one.check_open()
    until(lambda: "one at step 50" in again.picture.value)


def test_sample_box_streams_from_a_run_that_trains(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made_run(tmp_path, "young", state="running", rows=3)
    (run.path / "checkpoints" / "step-00000003").mkdir(parents=True)
    box = make("SampleBox", tmp_path)
    with pytest.raises(ConfigError, match="no checkpoint yet"):
        box.sample(made_run(tmp_path, "bare", rows=0, state="running").name)
    answers = [{"id": 1, "step": 3}, {"id": 1, "piece": "ab<"}, {"id": 1, "piece": "c"}, {"id": 1, "done": True}]
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(type(box._sampler), "send", lambda self, request: sent.append(request))
    monkeypatch.setattr(
        type(box._sampler), "receive", lambda self, timeout=0: answers.pop(0) if sent and answers else None
    )
    monkeypatch.setattr(type(box._sampler), "pid", 1)
    box.sample("young", "def ", temperature=0.5, top_k=40, tokens=9)
    assert asyncio.run(asyncio.wait_for(box.done(), 30)) == "def ab<c"
    assert {"temperature": 0.5, "top_k": 40, "max_new_tokens": 9, "prompt": "def "}.items() <= sent[0].items()
    assert "def </span>ab&lt;c" in box._text.value and "from step 3" in box._message.value
    assert "gptlab.sample(run, 'def ', max_new_tokens=9, temperature=0.5, top_k=40, seed=0)" in box.code.text


def test_lab_runs_waits_and_saves(tmp_path: Path, make_lab: Callable[..., Any], launcher: FakeLauncher) -> None:
    lab = make_lab(tmp_path)
    assert lab._repr_mimebundle_()["text/plain"] == "Lab"
    until(lambda: "<b>2 runs</b>" in lab.panel.plan.value)
    lab.run()
    asyncio.run(asyncio.wait_for(lab.done(), 60))
    assert len(launcher.launched) == 2
    assert (
        lab.runs.picture.value.count("at step 50") == 2
        and "2x2x64 at step 50".replace("x", figures.TIMES) in lab.runs.picture.value
    )
    assert lab.runs.table_html.value.count("<tr") == 5 and "2 of 2 runs ended, 2 invalid" in lab.runs.progress.value
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
    lab.panel._run.click()
    until(lambda: "at step 1: loss 5.000" in lab.runs.picture.value)
    assert lab.panel._run.disabled and not lab.panel._stop.disabled and "1 training" in lab.runs.progress.value
    with pytest.raises(ConfigError, match="still running"):
        lab.run()
    lab.panel._stop.click()
    asyncio.run(asyncio.wait_for(lab.done(), 60))
    assert [row["state"] for row in lab.sweep.rows()] == ["stopped", "invalid", "waiting", "invalid"]
    assert not lab.panel._run.disabled and lab.panel._stop.disabled


def test_a_wrong_choice_is_said_not_raised_by_a_button(tmp_path: Path, make_lab: Callable[..., Any]) -> None:
    lab = make_lab(tmp_path, n_head=[7])
    until(lambda: "Nothing to run" in lab.panel.plan.value)
    lab.panel._run.click()
    until(lambda: "can be run" in lab.panel._message.value)
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
    assert first.panel.desk is second.panel.desk
    with pytest.raises(RuntimeError, match="taken over"):
        first.stop()
    until(lambda: "1 training" in second.runs.progress.value)
    second.stop()
    asyncio.run(asyncio.wait_for(second.done(), 60))
    assert second.sweep.rows()[0]["state"] == "stopped"


def test_a_new_kernel_shows_the_runs_that_are_there(tmp_path: Path, make_lab: Callable[..., Any]) -> None:
    lab = make_lab(tmp_path)
    lab.run()
    asyncio.run(asyncio.wait_for(lab.done(), 60))
    lab.close()
    again = make_lab(tmp_path)
    until(lambda: "2x2x64 at step 50".replace("x", figures.TIMES) in again.runs.picture.value)
    assert again.runs.table_html.value.count("<tr") == 5
    again.show("")
    until(lambda: f"{lab.name}-" in again.runs.picture.value)


def test_thread_and_process_end_with_a_forgotten_lab(
    tmp_path: Path, make_lab: Callable[..., Any], launcher: Any
) -> None:
    from gptlab.lab import Lab

    lab = Lab(tmp_path, name="forgotten")
    desk = lab.panel.desk
    thread, artist = desk.thread, desk.artist
    until(lambda: artist.pid is not None)
    assert thread is not None
    del lab
    gc.collect()
    until(lambda: not thread.is_alive(), 30)
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
