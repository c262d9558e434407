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
from labtools import launcher as launcher
from labtools import made_run, until
from labtools import make as make

from gptlab.config import ConfigError
from gptlab.jsonfile import write_json

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
