"""The demo: its page, its picture and its table, what it prints meanwhile, and its exit code; notebooks as git has
them."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from labtools import made_run, until

from gptlab.lab import demo
from gptlab.runs import list_runs

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
HEAD = "n_layer,n_head,n_embd,state,parameters,step,loss,val_loss,tokens_per_s,mfu,seconds,name\n"
KEEPS = f"""
import os
from pathlib import Path
runs = Path(os.environ["GPTLAB_RUNS"])
assert runs == Path.cwd()
(runs / "mine.sweep.png").write_bytes(b"a picture")
(runs / "mine.sweep.csv").write_text({HEAD!r} + "1,2,64,finished,70656,40,3.75887,3.69657,306431.8,0.4309,0.12,a\\n")
print("kept", 40 + 2, "things")
"""

Notebook = Callable[..., Path]


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Notebook:
    """Puts a notebook of some cells in the demo's place, and the demo into an empty folder."""
    pytest.importorskip("nbconvert")
    pytest.importorskip("nbclient")
    import nbformat

    monkeypatch.chdir(tmp_path)

    def make(*cells: str) -> Path:
        path = tmp_path / "small.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells))), path)
        monkeypatch.setattr(demo, "NOTEBOOK", path)
        return path

    return make


def needs_no_network(page: str) -> bool:
    return not re.search(r"""(src|href)=["']https?:""", page) and "import(" not in page


def test_demo_page_needs_no_network_and_keeps_the_widgets_last_picture() -> None:
    pytest.importorskip("nbconvert")
    from nbformat.v4 import new_code_cell, new_notebook, new_output

    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "box"}, "text/plain": "Lab"}
    children = [f"IPY_MODEL_{name}" for name in ("picture", "folded", "steps", "gone")]
    state = {
        "box": {"state": {"children": children, "_model_name": "VBoxModel"}},
        "picture": {"state": {"value": '<svg id="last"></svg>', "_model_name": "HTMLModel"}},
        "folded": {"state": {"children": ["IPY_MODEL_hidden"], "_model_name": "AccordionModel"}},
        "hidden": {"state": {"value": "<b>folded away</b>", "_model_name": "HTMLModel"}},
        "steps": {"state": {"description": "max_iters", "value": "<40>", "_model_name": "BoundedIntTextModel"}},
    }
    notebook = new_notebook(cells=[new_code_cell("lab", outputs=[new_output("display_data", data=view)])])
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": state}}
    page = demo.page(notebook)
    assert '<svg id="last"></svg>' in page and "max_iters: &lt;40&gt;" in page
    assert "folded away" not in page
    assert needs_no_network(page)


def test_the_demo_leaves_a_page_a_picture_and_a_table(
    notebook: Notebook, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = notebook(KEEPS)
    before = path.read_bytes()
    assert demo.main() == 0
    assert path.read_bytes() == before, "a copy was executed"
    said, wrong = capsys.readouterr()
    assert not wrong
    (runs,) = (tmp_path / "runs").glob("demo-*")
    lines = said.splitlines()
    assert lines[0] == f"Executing small.ipynb; its runs are written to runs/{runs.name}"
    assert lines[1:3] == ["wrote demo.html", "wrote demo.png"]
    assert lines[3].split() == [
        "n_layer", "n_head", "n_embd", "parameters", "state", "step", "loss", "val_loss", "tokens_per_s", "mfu",
        "seconds",
    ]  # fmt: skip
    assert lines[4].split() == ["1", "2", "64", "70,656", "finished", "40", "3.759", "3.697", "306,432", "43.1%", "0.1"]
    assert re.fullmatch(r"\d+ s", lines[5]) and len(lines) == 6
    page = (tmp_path / "demo.html").read_text()
    assert "kept 42 things" in page and needs_no_network(page)
    assert (tmp_path / "demo.png").read_bytes() == b"a picture"


def test_a_demo_whose_claim_fails_says_so_and_still_leaves_its_page(
    notebook: Notebook, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook("print('measured first')", "assert 1 > 2, 'width lowers the loss'", "print('never')")
    assert demo.main() == 1
    said, wrong = capsys.readouterr()
    assert wrong.startswith("The notebook failed: ") and "AssertionError: width lowers the loss" in wrong
    assert "\x1b" not in wrong and "wrote demo.png" not in said and not (tmp_path / "demo.png").exists()
    page = (tmp_path / "demo.html").read_text()
    assert "measured first" in page and "width lowers the loss" in page
    assert ">never\n" not in page


def test_a_demo_without_its_notebook_or_its_packages_says_what_it_needs(
    notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook().unlink()
    assert demo.main() == 2
    assert capsys.readouterr() == ("", f"The demo needs the repository: {tmp_path / 'small.ipynb'} is not there.\n")
    monkeypatch.setitem(sys.modules, "nbclient", None)
    assert demo.main() == 2
    assert capsys.readouterr() == ("", "The demo needs the lab's packages: pip install 'gptlab[lab]'.\n")
    assert not list(tmp_path.glob("runs/*")) and not (tmp_path / "demo.html").exists()


def test_each_run_that_ends_is_told_once_the_last_one_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_run(tmp_path, "first", rows=0, state="failed")
    over = threading.Event()
    teller = threading.Thread(target=demo._tell, args=(tmp_path, over))
    teller.start()
    said = ""

    def told() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return "first" in said

    until(told)
    made_run(tmp_path, "last")
    over.set()
    teller.join(30)
    assert not teller.is_alive()
    lines = (said + capsys.readouterr().out).splitlines()
    loss = list_runs(tmp_path)[-1].summary()["loss"]
    assert lines == ["  first: failed, step 0 of 50", f"  last: finished, step 50 of 50, loss {loss:.3f}"]


@pytest.mark.slow
def test_the_whole_demo_trains_every_shape_and_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("nbclient", "nbconvert", "ipywidgets"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPTLAB_BUDGET", "test")
    code = demo.main()
    said, wrong = capsys.readouterr()
    assert (code, wrong) == (0, "")
    (runs,) = (tmp_path / "runs").glob("demo-*")
    shapes = ["1x2x64", "1x2x96", "1x3x96", "2x2x64", "2x2x96", "2x3x96"]
    trained = sorted(list_runs(runs), key=lambda run: run.name)
    assert [run.name.split("-", 2)[2] for run in trained] == shapes
    for run in trained:
        assert said.count(f"  {run.name}: finished, step 40 of 40, loss {run.summary()['loss']:.3f}\n") == 1
    rows = [line.split() for line in said[said.index(" n_layer") :].splitlines()[1:-1]]  # without head and seconds
    assert [row for row in rows if len(row) == 4] == [["1", "3", "64", "invalid"], ["2", "3", "64", "invalid"]]
    full = [row for row in rows if len(row) > 4]
    for row, run in zip(full, trained, strict=True):
        assert "x".join(row[:3]) == run.name.split("-", 2)[2] and row[4:6] == ["finished", "40"]
        assert row[7] == f"{(run.result() or {})['val_loss']:.3f}"
    page = (tmp_path / "demo.html").read_text()
    assert needs_no_network(page) and "What does each of the three buy?" in page
    assert 'aria-label="Curves of loss' in page and "data:image/png;base64" in page, (
        "the widgets' picture and the cell's"
    )
    assert "change of validation loss" in page and "application/vnd.jupyter.widget-view+json" not in page
    picture = (tmp_path / "demo.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_notebook_is_stored_without_outputs() -> None:
    for path in NOTEBOOKS.glob("*.ipynb"):
        code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code), path.name
