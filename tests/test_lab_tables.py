"""The lab's tables and words: rows of runs, progress, differences, tiles, and what a choice costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labtools import made_run

from gptlab.config import TrainConfig
from gptlab.lab import figures, plan, tables, tiles
from gptlab.lab.comparing import comparison, differences


def test_table_has_a_row_a_cell_and_the_reason_of_invalid_ones(tmp_path: Path) -> None:
    rows = tables.run_rows([made_run(tmp_path)])
    invalid = {"name": "bad", "n_layer": 1, "n_head": 3, "n_embd": 64, "state": "invalid", "reason": "3 heads & 64"}
    text = tables.table([*rows, invalid], {"one": 0})
    assert text.count("<tr") == 3 and "3 heads &amp; 64" in text and "50 / 50" in text and "2.250" in text
    assert text.count(figures.COLOURS[0]) == 1, "the table is the legend"


def test_table_sorts_and_says_so(tmp_path: Path) -> None:
    rows = tables.run_rows([made_run(tmp_path, "a", rows=3), made_run(tmp_path, "b", rows=30)])
    assert [row["name"] for row in tables.ordered(rows, "step", descending=True)] == ["b", "a"]
    rows[1]["mfu"] = None
    assert [row["name"] for row in tables.ordered(rows, "mfu", descending=True)] == ["a", "b"], "no value comes last"
    text = tables.table(rows, {}, sorted_by="loss", descending=True, picked=["b"], clickable=True)
    assert 'aria-sort="descending"' in text and text.count('aria-selected="true"') == 1
    assert 'data-pick="b"' in text and 'data-sort="val. loss"' in text and text.count("onpointerdown") == 1
    assert "onpointerdown" not in tables.table(rows, {})


def test_progress_weighs_steps_by_size_and_foretells_the_end() -> None:
    small = {"state": "finished", "parameters": 1e5, "step": 100, "max_iters": 100, "seconds": 2.0}
    large = {"state": "waiting", "parameters": 3e5, "step": None, "max_iters": 100, "seconds": None}
    assert tables.work([small, large]) == (0.25, 6.0)
    assert "1 of 2 runs ended, about 6 s left" in tables.progress([small, large], running=True)
    assert tables.work([]) == (0.0, None)
    at_once = [small, large | {"state": "running"}, large | {"state": "running"}]
    assert tables.work(at_once) == (1 / 7, 6.0), "two at a time take half as long"
    dropped = large | {"state": "stopped", "step": 10, "reason": "halving: loss 5.0 at step 10 was 2 of 2"}
    assert tables.work([small, dropped]) == (1.0, 0.0), "what does not go on is not waited for"
    assert "2 of 2 runs ended<" in tables.progress([small, dropped], running=True)


def test_comparison_has_what_differs_and_the_loss_at_the_same_step(tmp_path: Path) -> None:
    one, two = made_run(tmp_path, "a", rows=20), made_run(tmp_path, "b", rows=10, seed=2)
    found = differences([one, two])
    assert found["seed"] == [1337, 2] and "n_embd" not in found
    assert found["loss at step 10"][0] == one.metrics()[9]["loss"]
    two.name = "<b>"
    assert "&lt;b&gt;" in comparison([one, two]) and "<b>" not in comparison([one, two])


def test_tiles_tell_the_silent_the_slow_and_the_gone(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    status = {"state": "running", "attempt": 2, "world_size": 3, "pids": [11, 12, 13], "rank_steps": [7, 7, None],
              "heartbeats": [99.5, 80.0, None], "straggler": 0,
              "shares": [{"forward": 0.25, "backward": 0.5, "wait": 0.25}, None, None]}  # fmt: skip
    text = tiles.tiles(run, status, now=100.0)
    assert "heartbeat 0.5 s ago, slowest" in text and "silent, heartbeat 20.0 s ago" in text and "no sign yet" in text
    assert "forward 25%, backward 50%, wait 25%" in text and "process 12" in text and "attempt 2, 3 processes" in text
    assert text.count("gptlab-key") == len(tiles.PARTS), "a key says what the colours of the bars mean"
    assert 'gptlab-key"' not in tiles.tiles(run, status | {"shares": []}, now=100.0)
    assert tiles.tiles(run, status | {"state": "lost"}, now=100.0).count("gone<br>") == 3
    rows: list[dict[str, Any]] = [
            {"attempt": 1, "world_size": 2, "from_step": 0, "to_step": 30, "error": "rank 1 <lost>", "rank": 1},
            {"attempt": 2, "world_size": 2, "from_step": 20, "to_step": 50, "recovery_s": 0.512}]  # fmt: skip
    table = tiles.attempts(rows)
    assert "rank 1 &lt;lost&gt;" in table and "0.51 s" in table and "20 to 50" in table


def test_plan_says_runs_invalid_cells_and_sizes_before_anything_runs() -> None:
    base = TrainConfig(block_size=64, max_iters=10)
    text = plan.describe(plan.cells(base, {"n_layer": [1, 2], "n_head": [2, 3], "n_embd": [64]}))
    assert "<b>2 runs</b>" in text and "70.7k to 121k parameters" in text and "2 invalid" in text
    for word in ("of memory", "FLOPs a token", "predicted (cpu, ", "MFU"):
        assert word in text, word
    assert "cannot be split over n_head 3" in text
    assert "<b>1 run</b>" in plan.describe(plan.cells(base, {"n_layer": [1], "n_head": [2, 3], "n_embd": [64]}))
    assert "Nothing to run" in plan.describe(plan.cells(base, {"n_layer": [1], "n_head": [7], "n_embd": [64]}))
