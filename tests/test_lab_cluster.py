"""The view of a run's processes: its code, and buttons that are pressed faster than a run changes its world."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from labtools import FakeLauncher, made_run, until
from labtools import launcher as launcher
from labtools import make as make

from gptlab.config import TrainConfig

pytest.importorskip("ipywidgets", reason="the lab's widgets are not installed")


class Scaled:
    """A handle that remembers what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def scale(self, workers: int) -> None:
        self.asked.append(workers)


def test_presses_add_up_until_so_many_workers_are_there(
    make: Callable[..., Any], tmp_path: Path, launcher: FakeLauncher
) -> None:
    launcher.endless = True
    begun = launcher.launch(TrainConfig(n_layer=1, n_head=1, n_embd=32), name="wide", runs_dir=tmp_path)
    begun.writer.status("running", world_size=2)
    cluster, handle = make("ClusterView", tmp_path), Scaled()
    cluster.desk.handles[begun.run.path.absolute()] = handle
    until(lambda: cluster._rank.options == (0, 1))
    for _ in range(2):
        cluster._more.click()
    until(lambda: handle.asked == [3, 4])
    begun.writer.status("running", world_size=4)
    until(lambda: len(cluster._rank.options) == 4 and cluster._wanted is None)
    cluster._fewer.click()
    until(lambda: handle.asked == [3, 4, 3])
    begun.stop()


def test_code_says_the_run_that_is_shown(make: Callable[..., Any], tmp_path: Path) -> None:
    cluster = make("ClusterView", tmp_path)
    cluster.do_look()
    assert cluster.code.text == "", "there is no run yet"
    made_run(tmp_path, "first")
    until(lambda: cluster._run.options == ("first",))
    cluster._run.value = "first"
    until(lambda: f"gptlab.Run.open('first', '{tmp_path}')" in cluster.code.text)
    assert f"gptlab.Run.open('first', '{tmp_path}')" in make("ClusterView", tmp_path, kind="another").code.text


def test_a_look_that_goes_well_takes_the_mistake_of_the_last_away(make: Callable[..., Any], tmp_path: Path) -> None:
    cluster = make("ClusterView", tmp_path)
    answer = {"runs": [], "tiles": "", "attempts": "", "ranks": [], "state": ""}
    cluster.desk.leave(cluster)
    cluster.display({"error": "The disk is gone."})
    assert "The disk is gone." in cluster._message.value
    cluster.display(answer)
    assert "The disk is gone." not in cluster._message.value
    cluster.say("Killed rank 1.")
    cluster.display(answer)
    assert "Killed rank 1." in cluster._message.value, "another message stays"
