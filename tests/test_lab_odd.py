"""The lab's widgets under odd values: one sentence, nothing changed, and one spoilt run hides no other."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from labtools import FakeLauncher, made_run, until
from labtools import launcher as launcher
from labtools import make as make

from gptlab.config import ConfigError, TrainConfig
from gptlab.jsonfile import write_json
from gptlab.lab.desk import desk
from gptlab.sweeps import sweep

pytest.importorskip("ipywidgets", reason="the lab's widgets are not installed")


ODD: tuple[Any, ...] = ("x", "", -1, math.nan, math.inf, 10**400, 2.5, [], ["x"], {}, None, True, range(10**9))


def test_panels_refuse_odd_values_and_change_nothing(make: Callable[..., Any], tmp_path: Path) -> None:
    panel = make("SweepPanel", tmp_path, n_layer=[1, 2], n_head=2, n_embd=64)
    before = panel.read()
    for odd in ODD:
        for name in ("n_layer", "n_head", "n_embd", "max_iters", "seed", "tokenizer", "data", "bias", "n_lyer"):
            try:
                panel.choose(**{name: odd})
            except ConfigError as error:
                assert "\n" not in str(error) and panel.read() == before, (name, odd)
            else:  # a text may be anything
                assert name in ("data", "bias"), (name, odd)
                panel.choose(data="pysrc", bias=True)
        if odd is not None:
            with pytest.raises(ConfigError, match="at_once"):
                panel.run(at_once=odd)


def test_a_grid_that_is_too_large_is_said_at_once(make: Callable[..., Any], tmp_path: Path) -> None:
    panel = make("SweepPanel", tmp_path, n_layer=[1], n_head=2, n_embd=64)
    for axis in panel.axes.values():
        axis.text.value = ", ".join(map(str, range(1, 400)))
    until(lambda: "cells" in panel.plan.value and "at most" in panel.plan.value)
    panel._run.click()
    until(lambda: "cells" in panel._message.value)
    asyncio.run(asyncio.wait_for(panel.done(), 10))


def test_views_and_boxes_refuse_odd_values(make: Callable[..., Any], tmp_path: Path) -> None:
    made_run(tmp_path, "one")
    view, cluster, box = make("RunsView", tmp_path), make("ClusterView", tmp_path), make("SampleBox", tmp_path)
    for odd in ODD:
        calls: list[Callable[[], object]] = []
        if odd is not None:
            calls += [partial(view.show, x=odd), partial(view.sort, str(odd))]
        if not isinstance(odd, bool) and odd is not None:
            calls += [partial(view.show, log_x=odd)]
        calls += [partial(cluster.kill, odd), partial(cluster.scale, odd)]
        if odd is not None:
            calls += [partial(box.sample, tokens=odd)]
        if odd not in (None, 2.5):
            calls += [partial(box.sample, temperature=odd)]
        for call in calls:
            with pytest.raises(ConfigError) as caught:
                call()
            assert "\n" not in str(caught.value)
    for name in ("", "x" * 300, "../one/..", "a\nb", "nosuch"):
        for use in (view.stop, view.resume, view.hide, view.compare, view.log, cluster.show, box.sample):
            with pytest.raises(ConfigError):
                use(name)


def test_one_spoilt_run_hides_no_other(make: Callable[..., Any], tmp_path: Path) -> None:
    made_run(tmp_path, "good")
    old, torn = made_run(tmp_path, "old"), made_run(tmp_path, "torn")
    info = json.loads((old.path / "run.json").read_text())
    write_json(old.path / "run.json", info | {"config": {"n_hade": 3}})
    (torn.path / "run.json").write_text("{")
    view = make("RunsView", tmp_path)
    until(lambda: "good" in view.table_html.value)
    for word in ("old", "torn", "2.25", "n_hade"):
        assert word in view.table_html.value
    assert set(view.table()["name"]) == {"good", "old", "torn"}
    assert view.save()[-1].name == "all-runs.csv"


def test_a_sweep_that_is_not_there_is_said(make: Callable[..., Any], tmp_path: Path) -> None:
    made_run(tmp_path, "one")
    (tmp_path / "first.sweep.json").write_text("{}")
    view = make("RunsView", tmp_path, sweep="")
    with pytest.raises(ConfigError, match=r"no sweep 'frist' .*did you mean 'first'"):
        view.show("frist", x="tokens")
    assert view.sweep_name is None and view.axes["x"] == "step", "nothing is changed"
    with pytest.raises(ConfigError, match="no sweep 'frist'"):
        make("RunsView", tmp_path, sweep="frist")


def test_a_damaged_manifest_keeps_no_other_sweep_from_its_stop(
    make: Callable[..., Any], tmp_path: Path, launcher: FakeLauncher, tinytext: Path
) -> None:
    launcher.endless = True
    base = TrainConfig(n_layer=1, n_head=1, n_embd=32, data=str(tinytext))
    begun = sweep(base, {"n_layer": [1, 2]}, name="good", runs_dir=tmp_path)
    until(lambda: begun.runs and begun.runs[0].is_active)
    (tmp_path / "spoilt.sweep.json").write_text('{"cells": 3}')
    view = make("RunsView", tmp_path, sweep="")
    view.stop()
    assert begun.wait(30)
    view.show("spoilt")
    until(lambda: "cannot be read" in view._message.value)
    assert "ConfigError" not in view._message.value, "a mistake is told without its type"
    with pytest.raises(ConfigError, match="cannot be read"):
        view.stop()
    (tmp_path / "spoilt.sweep.json").write_bytes((tmp_path / "good.sweep.json").read_bytes())
    until(lambda: "cannot be read" not in view._message.value)


def test_a_compared_run_that_cannot_be_read_leaves_the_view_alive(make: Callable[..., Any], tmp_path: Path) -> None:
    for name in ("good", "old"):
        made_run(tmp_path, name)
    info = json.loads((tmp_path / "old" / "run.json").read_text())
    write_json(tmp_path / "old" / "run.json", info | {"config": {"n_hade": 3}})
    view = make("RunsView", tmp_path)
    table = view.compare("good", "old")
    assert list(table.loc["n_hade"]) == [None, 3] and table.loc["val_loss", "good"] == 2.25
    until(lambda: "n_hade" in view._comparison.value)


def test_a_box_keeps_its_runs_where_a_look_goes_wrong(make: Callable[..., Any], tmp_path: Path) -> None:
    (made_run(tmp_path, "one").path / "checkpoints" / "step-00000050").mkdir(parents=True)
    box = make("SampleBox", tmp_path)
    box.display({"error": "The disk is gone."})
    assert box._run.options == ("one",)


@pytest.mark.parametrize("error", [OSError("no more processes"), ValueError("no JSON")])
@pytest.mark.parametrize("method", ["send", "receive"])
def test_the_desk_outlives_trouble_with_its_drawing_process(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    made_run(tmp_path, "one")
    artist, told = desk().artist, list[Exception]()
    as_usual = getattr(artist, method)

    def once(*values: Any, **named: Any) -> Any:
        if not told:
            told.append(error)
            raise error
        return as_usual(*values, **named)

    monkeypatch.setattr(artist, method, once)
    view = make("RunsView", tmp_path)
    until(lambda: "one at step 50" in view.picture.value)
    assert told
