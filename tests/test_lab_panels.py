"""The panels: the code that they show runs, a wrong text can be mended by a call, Stop, and measuring the machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from labtools import FakeLauncher, until
from labtools import launcher as launcher
from labtools import make as make

from gptlab.config import ConfigError, TrainConfig
from gptlab.grid import cells
from gptlab.sweeps import sweep

pytest.importorskip("ipywidgets", reason="the lab's widgets are not installed")


def test_a_sweeps_code_follows_how_many_train_at_once_and_runs(make: Callable[..., Any], tmp_path: Path) -> None:
    panel = make("SweepPanel", tmp_path, n_layer=[1], n_head=[3, 4], n_embd=[64], n_kv_head=4)
    until(lambda: "n_kv_head=4" in panel.code.text)
    said: dict[str, Any] = {}
    exec(panel.code.text.split("\nsweep = ")[0], said)
    assert (said["base"].n_head, said["base"].n_embd) == (4, 64), "the shape of a cell that can be"
    assert said["grid"] == {"n_layer": [1], "n_head": [3, 4], "n_embd": [64]}
    assert "at_once" not in panel.code.text
    panel._at_once.value = 2
    until(lambda: "at_once=2" in panel.code.text)


def test_a_call_mends_what_was_typed_wrong(make: Callable[..., Any], tmp_path: Path) -> None:
    panel = make("ConfigPanel", runs_dir=tmp_path, n_layer=2, n_head=2, n_embd=64)
    panel.fields["min_lr"].value = panel.axes["n_head"].text.value = "low"
    with pytest.raises(ConfigError, match="min_lr 'low'"):
        panel.choose(seed=3)
    assert panel.fields["seed"].value != 3
    panel.choose(min_lr=1e-5, n_head=4)
    assert panel.config.min_lr == 1e-5 and panel.config.n_head == 4


def test_stop_reaches_a_sweep_that_another_process_works(
    make: Callable[..., Any], tmp_path: Path, launcher: FakeLauncher, tinytext: Path
) -> None:
    launcher.endless = True
    base = TrainConfig(n_layer=1, n_head=1, n_embd=32, data=str(tinytext))
    begun = sweep(base, {"n_layer": [1, 2]}, name="theirs", runs_dir=tmp_path)
    until(lambda: begun.runs and begun.runs[0].is_active)
    panel = make("SweepPanel", tmp_path)
    panel.stop()
    assert begun.wait(30)
    assert [row["state"] for row in begun.rows()] == ["stopped", "waiting"], "no more are started"
    until(lambda: f"gptlab.Sweep.open('theirs', '{tmp_path}').request_stop()" in panel.code.text)


def test_a_measurement_that_waits_is_not_lost_to_another_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    from gptlab.lab import measuring

    started: list[str] = []

    class Quick:
        def __init__(self, command: list[str], **_: Any) -> None:
            started.append(command[command.index("--dtype") + 1])

        def poll(self) -> int:
            return 0

    unknown = {"device": "cpu", "fits": True, "predicted_s": None}
    monkeypatch.setattr("gptlab.costs.cost", lambda config: unknown | {"dtype": config.dtype})
    monkeypatch.setattr("gptlab.lab.measuring.subprocess.Popen", Quick)
    monkeypatch.setattr(measuring, "WARM_S", -1.0)
    single, half = (cells(TrainConfig(dtype=dtype), {"n_layer": [1]}) for dtype in ("float32", "bfloat16"))
    meter = measuring.Meter()
    assert meter.begin(single) and meter.begin(half)
    assert not meter.has_news() and meter.has_news(), "the first was started, and has ended"
    assert meter.begin(half) and not meter.has_news() and meter.has_news()
    assert started == ["float32", "bfloat16"] and not meter.begin(half)
