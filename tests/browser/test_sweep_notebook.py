"""The main act of notebook 01 in a real JupyterLab: move a slider, Run, see the picture change, Stop, look at it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import jupyter

pytestmark = jupyter.NEEDED


def test_move_run_see_stop(tmp_path: Path) -> None:
    """The notebook runs, then the keyboard alone widens the grid, starts it, and stops it."""
    folder = tmp_path / "lab"
    environment = {"GPTLAB_BUDGET": "test", "GPTLAB_RUNS": str(folder / "runs")}
    with jupyter.jupyterlab(folder, **environment) as address, jupyter.page() as page:
        jupyter.open_notebook(page, address, folder, "01_sweep.ipynb")
        jupyter.run_all_cells(page)
        lab = page.locator(".gptlab-lab").first
        page.wait_for_selector(".gptlab-message >> text=Saved", timeout=jupyter.PATIENCE_MS)
        page.wait_for_selector("#jp-main-statusbar >> text=| Idle", timeout=jupyter.PATIENCE_MS)
        assert page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').count() == 0, "a cell raised"
        label = page.locator(".gptlab-picture svg").first.get_attribute("aria-label") or ""
        assert len(re.findall(r"at step 40: loss \d", label)) == 6
        assert lab.locator(".gptlab-runs tbody tr").count() == 8
        lab.screenshot(path=str(jupyter.ARTEFACTS / "01_sweep-finished.png"))

        # A slider by keyboard: depth 1..2 becomes 1..4, the text beside it and the price follow.
        price = lab.locator(".gptlab-plan").inner_text()
        upper = lab.locator(".gptlab-n_layer [role=slider], .gptlab-n_layer .noUi-handle").last
        upper.focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function(
            "document.querySelector('.gptlab-n_layer-values input').value == '1, 2, 4'", timeout=jupyter.PATIENCE_MS
        )
        iterations = lab.locator(".gptlab-max_iters input")
        iterations.fill("5000")
        iterations.press("Enter")
        page.wait_for_function(
            "old => document.querySelector('.gptlab-plan').innerText != old", arg=price, timeout=jupyter.PATIENCE_MS
        )

        before = lab.locator(".gptlab-picture").inner_html()
        run = page.locator(".gptlab-run").first
        run.focus()
        page.keyboard.press("Enter")
        page.wait_for_function(
            "old => document.querySelector('.gptlab-picture').innerHTML != old && / at step [1-9]/.test("
            "document.querySelector('.gptlab-picture svg').getAttribute('aria-label'))",
            arg=before,
            timeout=jupyter.PATIENCE_MS,
        )
        assert page.locator(".gptlab-run").first.is_disabled()
        first = lab.locator(".gptlab-picture").inner_html()
        page.wait_for_function(
            "old => document.querySelector('.gptlab-picture').innerHTML != old", arg=first, timeout=jupyter.PATIENCE_MS
        )
        lab.screenshot(path=str(jupyter.ARTEFACTS / "01_sweep-running.png"))

        stop = page.locator(".gptlab-stop").first
        stop.focus()
        page.keyboard.press("Enter")
        page.wait_for_function(
            "() => document.querySelector('.gptlab-stop').disabled && !document.querySelector('.gptlab-run').disabled",
            timeout=jupyter.PATIENCE_MS,
        )
        page.wait_for_function(  # the table is drawn a moment after the buttons change
            "() => /stopped[^]*waiting/.test(document.querySelector('.gptlab-runs tbody').innerText)",
            timeout=jupyter.PATIENCE_MS,
        )
        lab.screenshot(path=str(jupyter.ARTEFACTS / "01_sweep-stopped.png"))
