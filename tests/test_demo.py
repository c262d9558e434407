"""The demo's page, and notebooks as git has them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest


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
    for path in (Path(__file__).parents[1] / "notebooks").glob("*.ipynb"):
        code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code), path.name
