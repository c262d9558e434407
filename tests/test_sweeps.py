"""Sweeps: the grid, the queue and the table, with a launcher that only pretends; one real sweep stands at the end."""

from __future__ import annotations

import csv
import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gptlab.cli import main
from gptlab.config import ConfigError, TrainConfig
from gptlab.presets import preset
from gptlab.recording import Claim, RunWriter, create_run
from gptlab.runs import Run, read_json, write_json
from gptlab.sweeps import Sweep, sweep


class Pretended:
    """A run that its test moves: it holds the claim, as a trainer does."""

    def __init__(self, run: Run) -> None:
        self.run, self.claim = run, Claim(run.path)
        self.writer = RunWriter(run.path, self.claim.new_attempt())
        self.writer.status("running")
        self.stopped = False

    @property
    def status(self) -> str:
        return self.run.state

    def stop(self) -> None:
        self.stopped = True
        self.end("stopped")

    def end(self, status: str, **more: Any) -> None:
        self.writer.log({"step": 1, "loss": 2.5, "tokens_per_s": 10.0, "mfu": None, "time_s": 1.0})
        self.writer.result(status, **more)
        self.writer.status(status)
        self.claim.release()


class FakeLauncher:
    """Starts runs that end by themselves at once, or, when `held`, only as the test says."""

    def __init__(self, *, held: bool = False, ends: str = "finished") -> None:
        self.held, self.ends = held, ends
        self.started: list[tuple[str, str]] = []
        self.handles: dict[str, Pretended] = {}

    def launch(self, config: TrainConfig, *, name: str, runs_dir: Path) -> Pretended:
        return self._start("launch", create_run(config, name, runs_dir))

    def resume(self, name: str, *, runs_dir: Path) -> Pretended:
        return self._start("resume", Run.open(name, runs_dir))

    def _start(self, how: str, run: Run) -> Pretended:
        self.started.append((how, run.name))
        handle = self.handles[run.name] = Pretended(run)
        if not self.held:
            handle.end(self.ends, val_loss=1.5)
        return handle


@pytest.fixture
def base(tinytext: Path) -> TrainConfig:
    return preset("tiny", data=str(tinytext), max_iters=10)


def until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_a_sweep_runs_every_valid_cell_and_leaves_one_table(base: TrainConfig, tmp_path: Path) -> None:
    fake = FakeLauncher()
    done = sweep(base, {"n_layer": [1, 2], "n_head": [2, 7]}, name="s", runs_dir=tmp_path / "r", launcher=fake)
    assert done.wait(10)
    assert fake.started == [("launch", "s-1x2x64"), ("launch", "s-2x2x64")]
    table = done.table()
    assert list(table["state"]) == ["finished", "invalid", "finished", "invalid"]
    assert list(table["val_loss"].dropna()) == [1.5, 1.5]
    assert "n_head 7" in table["reason"][1]
    assert list(table["n_embd"]) == [64] * 4  # what the grid does not set, and of cells that cannot be
    assert table["parameters"][2] > table["parameters"][0] > 0
    with open(tmp_path / "r" / "s.sweep.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == list(table["state"])
    assert list(rows[0]) == list(table.columns)
    assert [run.name for run in done.runs] == ["s-1x2x64", "s-2x2x64"]


def test_a_second_start_skips_what_is_finished_and_goes_on_with_what_was_not(base: TrainConfig, tmp_path: Path) -> None:
    grid = {"n_layer": [1, 2, 3]}
    first = FakeLauncher(held=True)
    begun = sweep(base, grid, name="s", runs_dir=tmp_path, launcher=first)
    until(lambda: "s-1x2x64" in first.handles)
    first.handles["s-1x2x64"].end("finished")
    until(lambda: "s-2x2x64" in first.handles)
    begun.stop()
    assert begun.wait(10)
    assert [row["state"] for row in begun.rows()] == ["finished", "stopped", "waiting"]

    second = FakeLauncher()
    assert sweep(base, grid, name="s", runs_dir=tmp_path, launcher=second).wait(10)
    assert second.started == [("resume", "s-2x2x64"), ("launch", "s-3x2x64")]
    wider = FakeLauncher()
    assert sweep(base, {"n_layer": [2, 4]}, name="s", runs_dir=tmp_path, launcher=wider).wait(10)
    assert wider.started == [("launch", "s-4x2x64")]


def test_another_process_can_ask_a_sweep_to_stop(base: TrainConfig, tmp_path: Path) -> None:
    fake = FakeLauncher(held=True)
    begun = sweep(base, {"n_layer": [1, 2]}, name="s", runs_dir=tmp_path, launcher=fake)
    until(lambda: fake.handles)
    Sweep.open("s", tmp_path).request_stop()
    assert begun.wait(10)
    assert fake.started == [("launch", "s-1x2x64")] and fake.handles["s-1x2x64"].stopped
    again = FakeLauncher()
    assert sweep(base, {"n_layer": [1, 2]}, name="s", runs_dir=tmp_path, launcher=again).wait(10)
    assert again.started == [("resume", "s-1x2x64"), ("launch", "s-2x2x64")], "its next start forgets it"


def test_a_diverged_cell_is_not_run_again(base: TrainConfig, tmp_path: Path) -> None:
    assert sweep(base, {"n_layer": [1]}, name="s", runs_dir=tmp_path, launcher=FakeLauncher(ends="diverged")).wait(10)
    again = FakeLauncher()
    assert sweep(base, {"n_layer": [1]}, name="s", runs_dir=tmp_path, launcher=again).wait(10)
    assert again.started == []


def test_other_settings_under_the_same_name_are_refused(base: TrainConfig, tmp_path: Path) -> None:
    assert sweep(base, {"n_layer": [1]}, name="s", runs_dir=tmp_path, launcher=FakeLauncher()).wait(10)
    with pytest.raises(ConfigError, match="max_iters 10, and this is 20"):
        sweep(base.replace(max_iters=20), {"n_layer": [1]}, name="s", runs_dir=tmp_path, launcher=FakeLauncher())


def test_stop_ends_the_running_and_starts_no_more(base: TrainConfig, tmp_path: Path) -> None:
    fake = FakeLauncher(held=True)
    begun = sweep(base, {"n_layer": [1, 2, 3]}, name="s", runs_dir=tmp_path, at_once=2, launcher=fake)
    until(lambda: len(fake.handles) == 2)
    time.sleep(0.2)
    assert len(fake.handles) == 2, "more at once than asked for"
    begun.stop()
    assert begun.wait(5) and not begun.is_active
    assert all(handle.stopped for handle in fake.handles.values()) and len(fake.started) == 2


def test_runs_at_once_share_the_cores(base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptlab.hardware.cores", lambda: 8)
    fake = FakeLauncher()
    assert sweep(base, {"n_layer": [1, 2]}, name="s", runs_dir=tmp_path, at_once=2, launcher=fake).wait(10)
    assert [handle.run.config.threads for handle in fake.handles.values()] == [4, 4]
    again = FakeLauncher()
    assert sweep(base, {"n_layer": [1, 2]}, name="s", runs_dir=tmp_path, launcher=again).wait(10)


class Fussy(FakeLauncher):
    """Cannot start what has one layer."""

    def launch(self, config: TrainConfig, *, name: str, runs_dir: Path) -> Pretended:
        if config.n_layer == 1:
            raise ConfigError("No layers of one today: take two.")
        return super().launch(config, name=name, runs_dir=runs_dir)


def full(*_: Any) -> None:
    """A disk that takes nothing."""
    raise OSError(errno.ENOSPC, "No space left on device")


def test_trouble_with_one_cell_is_not_the_others(base: TrainConfig, tmp_path: Path) -> None:
    done = sweep(base, {"n_layer": [1, 2]}, name="s", runs_dir=tmp_path, launcher=Fussy())
    assert done.wait(10)
    for told in (done, Sweep.open("s", tmp_path)):  # others read why, too
        assert [(row["state"], row["reason"]) for row in told.rows()] == [
            ("invalid", "No layers of one today: take two."),
            ("finished", None),
        ]
    again = sweep(base, {"n_layer": [1, 2]}, name="s", runs_dir=tmp_path, launcher=FakeLauncher())
    assert again.wait(10) and [row["state"] for row in Sweep.open("s", tmp_path).rows()] == ["finished"] * 2


def test_a_full_disk_ends_no_queue(base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptlab.sweeps.write_csv", full)
    fake = FakeLauncher()
    assert sweep(base, {"n_layer": [1, 2, 3]}, name="s", runs_dir=tmp_path, launcher=fake).wait(10)
    assert [name for _, name in fake.started] == ["s-1x2x64", "s-2x2x64", "s-3x2x64"]


def test_the_command_says_a_cell_that_cannot_start_and_a_full_disk(
    tinytext: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gptlab.launcher.launch", Fussy().launch)
    words = ["sweep", "--preset", "tiny", "--data", str(tinytext), "--max-iters", "10", "--runs-dir", str(tmp_path)]
    assert main([*words, "--n-layer", "2", "--n-head", "2", "7", "--name", "fine"]) == 0
    assert main([*words, "--n-layer", "1", "2", "--name", "fussy"]) == 1
    assert "No layers of one today" in capsys.readouterr().out
    monkeypatch.setattr("gptlab.sweeps.write_csv", full)
    assert main([*words, "--n-layer", "2", "--name", "full"]) == 1
    assert "No space left on device" in capsys.readouterr().err


def test_a_run_that_another_process_trains_is_waited_for(base: TrainConfig, tmp_path: Path) -> None:
    elsewhere = FakeLauncher(held=True)
    elsewhere.launch(base.replace(n_layer=1), name="s-1x2x64", runs_dir=tmp_path)
    here = FakeLauncher()
    begun = sweep(base, {"n_layer": [1, 2]}, name="s", runs_dir=tmp_path, launcher=here)
    assert not begun.wait(0.3) and here.started == []
    elsewhere.handles["s-1x2x64"].end("finished")
    assert begun.wait(10) and here.started == [("launch", "s-2x2x64")]


def test_a_run_that_another_process_begins_at_this_moment_is_waited_for(base: TrainConfig, tmp_path: Path) -> None:
    elsewhere = FakeLauncher(held=True)

    class Late(FakeLauncher):
        """Another is quicker, between the look at the folder and the launch."""

        def launch(self, config: TrainConfig, *, name: str, runs_dir: Path) -> Pretended:
            elsewhere.launch(config, name=name, runs_dir=runs_dir)
            return super().launch(config, name=name, runs_dir=runs_dir)

    begun = sweep(base, {"n_layer": [1]}, name="s", runs_dir=tmp_path, launcher=Late())
    assert not begun.wait(0.3)
    elsewhere.handles["s-1x2x64"].end("finished")
    assert begun.wait(10) and begun.rows()[0]["state"] == "finished" and begun.rows()[0]["reason"] is None


@pytest.mark.parametrize("name", ["x" * 98, "漢" * 66])
def test_cells_that_would_share_a_run_are_refused(base: TrainConfig, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="use a shorter one"):
        sweep(base, {"n_embd": [64, 128]}, name=name, runs_dir=tmp_path / "r", launcher=FakeLauncher())
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "spoilt",
    [{"base": 3}, {"base": {"n_hade": 1}}, {"cells": 5}, {"cells": [1]}, {"cells": [{}]}, {"cells": None},
     {"cells": [{"name": "../../x", "values": {}, "reason": None}]},
     {"cells": [{"name": "a", "values": {"n_hade": 1}, "reason": None}]}],
)  # fmt: skip
def test_a_manifest_that_is_spoilt_is_a_sentence(base: TrainConfig, tmp_path: Path, spoilt: dict[str, Any]) -> None:
    assert sweep(base, {"n_layer": [1]}, name="s", runs_dir=tmp_path, launcher=FakeLauncher()).wait(10)
    path = tmp_path / "s.sweep.json"
    write_json(path, (read_json(path) or {}) | spoilt)
    with pytest.raises(ConfigError, match=r"s\.sweep\.json cannot be read"):
        Sweep.open("s", tmp_path)


def test_a_cell_whose_run_is_spoilt_leaves_the_table_whole(base: TrainConfig, tmp_path: Path) -> None:
    done = sweep(base, {"n_layer": [1, 2]}, name="s", runs_dir=tmp_path, launcher=FakeLauncher())
    assert done.wait(10)
    (tmp_path / "s-1x2x64" / "run.json").write_text("{")
    one, two = Sweep.open("s", tmp_path).rows()
    assert two["val_loss"] == 1.5 and "run.json" in one["reason"] and one["state"] == "finished"


def test_a_text_or_a_machine_that_cannot_is_a_reason(base: TrainConfig, tmp_path: Path) -> None:
    fake = FakeLauncher()
    done = sweep(
        base, {"block_size": [64, 900_000], "n_embd": [64, 64_000]}, name="s", runs_dir=tmp_path, launcher=fake
    )
    assert done.wait(10)
    assert [row["state"] for row in done.rows()] == ["finished", "invalid", "invalid", "invalid"]
    assert "GB" in done.rows()[1]["reason"] and "block_size" in done.rows()[2]["reason"]


@pytest.mark.parametrize(
    ("grid", "more"),
    [({"n_head": [3, 7]}, {}), ({"n_layer": [1]}, {"at_once": 0}), ({"data": ["/none/such.txt"]}, {})],
)
def test_nothing_is_made_for_a_sweep_that_is_refused(
    base: TrainConfig, tmp_path: Path, grid: dict[str, list[Any]], more: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError):
        sweep(base, grid, name="s", runs_dir=tmp_path / "r", launcher=FakeLauncher(), **more)
    assert not (tmp_path / "r").exists()


def test_a_sweep_is_read_back_from_its_folder(base: TrainConfig, tmp_path: Path) -> None:
    done = sweep(base, {"n_layer": [1, 2], "n_head": [2, 3]}, name="s", runs_dir=tmp_path, launcher=FakeLauncher())
    assert done.wait(10)
    manifest = read_json(tmp_path / "s.sweep.json")
    assert manifest is not None and manifest["grid"] == {"n_layer": [1, 2], "n_head": [2, 3]}
    assert Sweep.open("s", tmp_path).rows() == done.rows()
    with pytest.raises(ConfigError, match="did you mean 's'"):
        Sweep.open("ss", tmp_path)


def test_the_table_can_be_asked_for_from_several_threads(base: TrainConfig, tmp_path: Path) -> None:
    fake = FakeLauncher()
    done = sweep(base, {"n_layer": list(range(1, 9))}, name="s", runs_dir=tmp_path, launcher=fake)
    wrong: list[BaseException] = []

    def look() -> None:
        try:
            for _ in range(20):
                done.rows()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done.wait(10) and not wrong
    assert [row["step"] for row in done.rows()] == [1] * 8


def test_a_real_sweep_trains(base: TrainConfig, tmp_path: Path) -> None:
    small = base.replace(
        max_iters=5, n_embd=32, block_size=32, global_batch_size=4, device="cpu", dtype="float32", threads=1
    )
    done = sweep(small, {"n_layer": [1, 2], "n_head": [2, 7]}, name="real", runs_dir=tmp_path)
    try:
        assert done.wait(120)
    finally:
        done.stop()
    rows = done.rows()
    assert [row["state"] for row in rows] == ["finished", "invalid", "finished", "invalid"], rows
    assert all(row["step"] == 5 and 0 < row["val_loss"] < 7 for row in rows[::2])
