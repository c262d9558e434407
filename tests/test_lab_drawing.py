"""The lab's processes: the one that draws and the one that samples."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from labtools import FakeLauncher, made_run, until

from gptlab.config import TrainConfig
from gptlab.jsonfile import read_json, write_json
from gptlab.lab import drawing
from gptlab.lab.drawing import Painter
from gptlab.lab.process import Process
from gptlab.sweeps import sweep

DRAWING = "gptlab.lab.drawing"


def asked(folder: Path, **more: Any) -> dict[str, Any]:
    """A view's request."""
    return {"kind": "runs", "view": "one", "runs_dir": str(folder), "sweep": None, "x": "step"} | more


def test_painter_redraws_only_what_changed(tmp_path: Path) -> None:
    made_run(tmp_path)
    painter = Painter()
    first = painter.look(asked(tmp_path))
    assert {"svg", "table", "progress", "active", "runs", "sweeps", "cost_s"} <= first.keys()
    assert painter.look(asked(tmp_path)) == {}
    assert "svg" in painter.look(asked(tmp_path, view="two")), "another view has seen nothing yet"
    made_run(tmp_path, "two")
    assert "two at step 50" in painter.look(asked(tmp_path))["svg"], "a first point does not wait"


def test_pictures_are_fewer_where_all_cores_are_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path, state="running")
    painter = Painter()
    painter.look(asked(tmp_path))
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 51, "attempt": 1, "loss": 2.0, "tokens": 51 * 768, "time_s": 1.02}) + "\n")
    view = painter._views["one"]
    view.at = time.monotonic() - 1.0
    view.cpu_s = time.process_time()
    monkeypatch.setattr(drawing, "_idle_s", lambda: view.idle_s)
    assert painter.look(asked(tmp_path)) == {}
    idle = view.idle_s + 1.0
    monkeypatch.setattr(drawing, "_idle_s", lambda: idle)
    assert "one at step 51" in painter.look(asked(tmp_path))["svg"], "a core was idle meanwhile"


def test_pictures_wait_until_all_that_was_done_is_a_small_share_of_the_time(tmp_path: Path) -> None:
    run = made_run(tmp_path, state="running")
    painter = Painter()
    assert "svg" in painter.look(asked(tmp_path))
    with open(run.path / "metrics.jsonl", "a") as file:
        row = {"step": 51, "attempt": 1, "loss": 2.0, "tokens": 51 * 768, "time_s": 1.02}
        row |= {"tokens_per_s": 4e4, "mfu": 0.2}
        file.write(json.dumps(row) + "\n")
    view = painter._views["one"]
    view.at = time.monotonic()
    assert painter.look(asked(tmp_path)) == {}, "more of the same can wait"
    view.at, view.cpu_s = time.monotonic() - 100, time.process_time() - 50
    assert painter.look(asked(tmp_path)) == {}, "half a core was used since, by looks or by other views"
    view.cpu_s = time.process_time()
    assert "one at step 51" in painter.look(asked(tmp_path))["svg"]


def test_a_view_hides_sorts_compares_and_shows_a_log(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        made_run(tmp_path, name, rows={"a": 10, "b": 30, "c": 20}[name])
    (tmp_path / "b" / "attempts" / "01" / "rank-0.out").write_text("step 1 <&>\n")
    painter = Painter()
    before = painter.look(asked(tmp_path))
    after = painter.look(asked(tmp_path, hidden=["a"], sort="step", descending=True, log="b", compare=["b", "c"]))
    assert "a at step" not in after["svg"] and after["table"].index("b</td>") < after["table"].index("c</td>")
    assert "step 1 &lt;&amp;&gt;" in after["log"] and "loss at step 20" in after["compare"]
    colour = before["table"].split("c</td>")[0].rsplit("stroke=", 1)[1][:9]
    assert colour == after["table"].split("c</td>")[0].rsplit("stroke=", 1)[1][:9], "hiding moves no colours"


def test_a_hidden_run_that_trains_counts_as_active(tmp_path: Path) -> None:
    begun = FakeLauncher(endless=True).launch(
        TrainConfig(n_layer=1, n_head=1, n_embd=32), name="slow", runs_dir=tmp_path
    )
    made_run(tmp_path, "done")
    assert Painter().look(asked(tmp_path, hidden=["slow"]))["active"] == 1
    begun.stop()


def test_a_reason_that_comes_into_the_manifest_is_drawn_at_once(tmp_path: Path, tinytext: Path) -> None:
    base = TrainConfig(n_layer=1, n_head=1, n_embd=32, data=str(tinytext))
    launcher: Any = FakeLauncher()
    assert sweep(base, {"n_layer": [1, 2]}, name="s", runs_dir=tmp_path, launcher=launcher).wait(10)
    painter = Painter()
    assert "No room" not in painter.look(asked(tmp_path, sweep="s"))["table"]
    bar = {"kind": "progress", "view": "bar", "runs_dir": str(tmp_path), "sweep": "s"}
    assert "progress" in painter.look(bar) and painter.look(bar) == {}
    manifest = read_json(tmp_path / "s.sweep.json") or {}
    manifest["cells"][1]["reason"] = "No room today."
    write_json(tmp_path / "s.sweep.json", manifest)
    assert "No room today." in painter.look(asked(tmp_path, sweep="s"))["table"]
    assert "progress" in painter.look(bar)


def test_drawing_process_answers_and_ends_with_its_kernel(tmp_path: Path) -> None:
    made_run(tmp_path)
    code = (
        "import json, sys, time; from gptlab.lab.process import Process\n"
        "a = Process('gptlab.lab.drawing'); a.send(json.loads(sys.argv[1]))\n"
        "while not (got := a.receive(0.1)): pass\n"
        "print(a.pid, len(got['svg']), flush=True); time.sleep(60)"
    )
    request = json.dumps(asked(tmp_path))
    kernel = subprocess.Popen([sys.executable, "-c", code, request], stdout=subprocess.PIPE, text=True)
    assert kernel.stdout is not None
    pid, size = map(int, kernel.stdout.readline().split())
    assert size > 1000
    kernel.send_signal(signal.SIGKILL)
    kernel.wait()
    until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2], 30)
    kernel.stdout.close()


def test_a_stop_is_answered_where_its_request_was_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    from gptlab.lab.sampler import answer

    answer({"id": 4, "stop": True}, queue.SimpleQueue())
    assert json.loads(capsys.readouterr().out) == {"id": 4, "done": True}


def test_a_process_that_died_is_replaced(tmp_path: Path) -> None:
    made_run(tmp_path)
    artist = Process(DRAWING)
    try:
        artist.start()
        assert artist.pid is not None
        os.kill(artist.pid, signal.SIGKILL)
        found: dict[str, Any] | None = None
        for _ in range(3):  # the first request may still fall into the dead one's pipe
            artist.send(asked(tmp_path))
            while found is None and artist.pid is not None:
                found = artist.receive(0.1)
        assert found is not None and "svg" in found
    finally:
        artist.close()


def test_sampling_process_streams_stops_and_says_mistakes(tmp_path: Path, tinytext: Path) -> None:
    from gptlab.worker import run_rank

    run = made_run(tmp_path, rows=0, state="preparing", data=str(tinytext), max_iters=2, block_size=16, n_embd=32)
    run_rank(run.path, attempt=1, rank=0, world_size=1, rendezvous=str(tmp_path / "store"))
    sampler = Process("gptlab.lab.sampler")

    def answers(number: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []

        def ended() -> bool:
            said = sampler.receive(0.1)
            if said is not None and said["id"] == number:
                found.append(said)
            return bool(found) and bool({"done", "error"} & found[-1].keys())

        until(ended, 90)
        return found

    try:
        sampler.send({"id": 1, "run": str(run.path), "prompt": "def ", "max_new_tokens": 20, "seed": 3})
        said = answers(1)
        assert said[0] == {"id": 1, "step": 2} and said[-1] == {"id": 1, "done": True}
        assert sum("piece" in one for one in said) > 5
        sampler.send({"id": 2, "run": str(run.path), "prompt": "def ", "max_new_tokens": 10**6})
        until(lambda: "piece" in (sampler.receive(0.1) or {}), 90)
        sampler.send({"id": 2, "stop": True})
        assert answers(2)[-1] == {"id": 2, "done": True}
        sampler.send({"id": 3, "run": str(run.path), "prompt": "x", "temperature": -1.0})
        assert "temperature" in answers(3)[-1]["error"]
    finally:
        sampler.close()
