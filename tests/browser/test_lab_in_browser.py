"""The lab in a real JupyterLab, beside notebook 01's main act: sort, let a run write, kill a worker; a page that is
reloaded and a kernel that is restarted while something trains; the dark theme and a narrow window."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import jupyter
from labtools import made_run

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = jupyter.NEEDED
LAB = "from gptlab.lab import Lab\nlab = Lab(n_layer=1, n_head=1, n_embd=32, max_iters=5000, threads=1)\nlab"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with two runs that ended, beside the notebook."""
    folder = tmp_path / "lab" / "notebooks" / "runs"
    folder.mkdir(parents=True)
    for name, rows in (("early", 20), ("late", 40)):
        made_run(folder, name, rows=rows)
    return folder


@pytest.fixture
def trainer(runs: Path, tinytext: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run that a terminal trains, which no kernel has to do with."""
    command = ["train", "--n-layer", "1", "--n-head", "1", "--n-embd", "32", "--block-size", "16", "--threads", "1",
               "--max-iters", "1000000", "--checkpoint-interval", "50", "--eval-interval", "1000000", "--data",
               str(tinytext), "--name", "outside", "--runs-dir", str(runs)]  # fmt: skip
    process = subprocess.Popen([sys.executable, "-m", "gptlab.cli", *command], stdout=subprocess.DEVNULL)
    yield process
    process.terminate()
    process.wait(60)


def step(page: Page, name: str) -> int:
    """The last step of a run that the picture's words say; 0 without one."""
    said = page.locator(".gptlab-picture svg").first.get_attribute("aria-label") or ""
    return int(said.split(f"{name} at step ")[1].split(":")[0]) if f"{name} at step " in said else 0


def wait_step(page: Page, name: str, least: int) -> int:
    """Waits until the picture has come to a step."""
    page.wait_for_function(
        "([name, least]) => {const svg = document.querySelector('.gptlab-picture svg'); "
        "const said = svg && svg.getAttribute('aria-label').match(new RegExp(name + ' at step ([0-9]+)')); "
        "return said && +said[1] >= least}",
        arg=[name, least],
        timeout=jupyter.PATIENCE_MS,
    )
    return step(page, name)


def test_a_reload_and_a_restart_in_the_middle_of_a_run(
    tmp_path: Path, runs: Path, trainer: subprocess.Popen[bytes]
) -> None:
    """A run goes on, and the page shows it again: after the page, and after the kernel, have gone."""
    folder = tmp_path / "lab"
    with jupyter.jupyterlab(folder, GPTLAB_RUNS=str(runs)) as address, jupyter.page() as page:
        page.set_default_timeout(jupyter.PATIENCE_MS)
        jupyter.open_cells(page, address, folder, "watch.ipynb", LAB)
        jupyter.run_all_cells(page)
        seen = wait_step(page, "outside", 1)
        while not json.loads((folder / "notebooks" / "watch.ipynb").read_text())["cells"][0]["outputs"]:
            page.keyboard.press("Control+s")  # too early, it saves what was there before
            page.wait_for_timeout(500)

        page.reload()
        page.wait_for_selector(".gptlab-picture svg", timeout=jupyter.PATIENCE_MS)
        seen = wait_step(page, "outside", seen + 1)

        page.click('.lm-MenuBar-item:has-text("Kernel")')
        page.click('.lm-Menu-item:has-text("Restart Kernel and Run All Cells")')
        page.click('.jp-Dialog button:has-text("Restart")')
        page.wait_for_selector("#jp-main-statusbar >> text=| Idle", timeout=jupyter.PATIENCE_MS)
        wait_step(page, "outside", seen + 1)
        assert trainer.poll() is None, "another's run outlives the kernel"
        page.locator(".gptlab-lab").last.screenshot(path=str(jupyter.ARTEFACTS / "lab-restarted.png"))

        # What it does not train itself it can still stop.
        page.locator(".gptlab-fold >> text=stop, resume, compare").last.click()
        page.locator(".gptlab-view-stop-all").last.click()
        page.wait_for_selector(".gptlab-runs >> text=stopped", timeout=jupyter.PATIENCE_MS)
        trainer.wait(60)


@pytest.mark.slow
def test_sort_sample_report_and_look_in_dark_and_narrow(
    tmp_path: Path, runs: Path, trainer: subprocess.Popen[bytes]
) -> None:
    """Headings and rows answer a click, a run writes while it trains, the report opens, and nothing hangs over in 900
    pixels of dark."""
    folder = tmp_path / "lab"
    with jupyter.jupyterlab(folder, GPTLAB_RUNS=str(runs)) as address, jupyter.page(width=900) as page:
        page.set_default_timeout(jupyter.PATIENCE_MS)
        jupyter.dark(folder)
        jupyter.open_cells(page, address, folder, "dark.ipynb", LAB)
        jupyter.run_all_cells(page)
        wait_step(page, "outside", 60)
        assert page.evaluate("document.body.dataset.jpThemeLight") == "false"
        page.locator(".gptlab-runs th", has_text="step").first.dispatch_event("pointerdown")
        page.wait_for_selector(".gptlab-runs th[aria-sort=ascending] >> text=step")
        page.locator(".gptlab-runs tbody tr", has_text="early").first.dispatch_event("pointerdown")
        page.wait_for_selector(".gptlab-runs tr[aria-selected=true] >> text=early")

        page.locator(".gptlab-fold >> text=let a run write").first.click()
        page.locator(".gptlab-sample-run select").first.select_option("outside")
        page.locator(".gptlab-sample-box .gptlab-sample").first.click()
        page.wait_for_selector(".gptlab-sample-box >> text=/characters from step/")
        assert len(page.locator(".gptlab-text").first.inner_text()) > 20

        page.locator(".gptlab-fold >> text=stop, resume, compare").first.click()
        page.locator(".gptlab-view-report").first.click()
        link = page.locator(".gptlab-report-link a").first
        link.wait_for()
        report = page.request.get(link.evaluate("e => e.href"))
        assert report.ok and "<summary>early</summary>" in report.text(), "the link leads to the page"
        assert "<summary>outside</summary>" not in report.text(), "it is of the picked run"
        lab = page.locator(".gptlab-lab").first
        over = lab.evaluate("e => e.scrollWidth - e.clientWidth")
        assert over <= 1, f"{over} pixels hang over"
        lab.screenshot(path=str(jupyter.ARTEFACTS / "lab-dark-narrow.png"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["04_elastic", "05_pipeline"])
def test_main_act_of_a_notebook(name: str, tmp_path: Path) -> None:
    """The notebook runs to its end in a real JupyterLab; in 04 a click on Kill begins another attempt."""
    folder = tmp_path / "lab"
    environment = {"GPTLAB_BUDGET": "test", "GPTLAB_RUNS": str(folder / "runs")}
    with jupyter.jupyterlab(folder, **environment) as address, jupyter.page(height=2600) as page:
        page.set_default_timeout(jupyter.PATIENCE_MS)
        jupyter.open_notebook(page, address, folder, f"{name}.ipynb")
        jupyter.run_all_cells(page)
        if name == "04_elastic":
            page.wait_for_selector(".gptlab-cluster-tiles >> text=/rank 1/")
            page.locator(".gptlab-rank select").first.select_option("1")
            page.locator(".gptlab-kill").first.click()
            page.wait_for_selector(".gptlab-attempts tbody tr:nth-child(3)")
            page.locator(".gptlab-cluster").first.screenshot(path=str(jupyter.ARTEFACTS / f"{name}-cluster.png"))
        page.wait_for_selector(".jp-CodeCell:last-child .jp-InputPrompt >> text=/\\[\\d+\\]/")
        assert page.locator('[data-mime-type="application/vnd.jupyter.error"]').count() == 0, "a cell raised"
        for index, picture in enumerate(page.locator(".jp-RenderedImage").all()):
            picture.screenshot(path=str(jupyter.ARTEFACTS / f"{name}-{index}.png"))
