"""Notebook 01's main act for who has no mouse, sees no colours, zooms, or has a small window."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import jupyter

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = jupyter.NEEDED
MOST_TABS = 80
"""Presses of Tab after which a widget counts as out of a keyboard's reach."""
COLOURLESS = "html {filter: grayscale(1)}"


def tab_to(page: Page, selector: str) -> None:
    """Presses Tab until something that matches has the focus, or holds what has it."""
    for _ in range(MOST_TABS):
        if page.evaluate("wanted => !!document.activeElement.closest(wanted)", selector):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"{selector} cannot be reached with {MOST_TABS} presses of Tab")


def photograph(page: Page, lab: Locator, name: str) -> None:
    """A screenshot of all of the lab: for a moment the window is as high as that."""
    size = page.viewport_size
    assert size is not None
    page.set_viewport_size({"width": size["width"], "height": 2400})
    lab.screenshot(path=str(jupyter.ARTEFACTS / name))
    page.set_viewport_size(size)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "width", "zoom"), [("zoomed", 1300, 2.0), ("narrow", 900, 1.0)])
def test_main_act_by_keyboard_alone_without_colour(name: str, width: int, zoom: float, tmp_path: Path) -> None:
    """Move, Run, see, Stop: no mouse is used after the notebook is open, and nothing hangs over the window's edge."""
    folder = tmp_path / "lab"
    environment = {"GPTLAB_BUDGET": "test", "GPTLAB_RUNS": str(folder / "runs")}
    opened = jupyter.page(width=width, height=1500, zoom=zoom)
    with jupyter.jupyterlab(folder, **environment) as address, opened as page:
        page.set_default_timeout(jupyter.PATIENCE_MS)
        jupyter.open_notebook(page, address, folder, "01_sweep.ipynb")
        page.add_style_tag(content=COLOURLESS)
        page.locator(".jp-Notebook .jp-Cell").first.focus()
        for _ in range(3):  # the text, the cell that shows the lab, the text under it
            page.keyboard.press("Shift+Enter")
        page.wait_for_selector(".gptlab-plan >> text=/predicted/")

        tab_to(page, ".gptlab-n_layer [role=slider], .gptlab-n_layer .noUi-handle-upper")
        tab_to(page, ".gptlab-n_layer .noUi-handle-upper")
        page.keyboard.press("ArrowRight")
        page.wait_for_function("document.querySelector('.gptlab-n_layer-values input').value == '1, 2, 4'")
        tab_to(page, ".gptlab-max_iters input")
        page.keyboard.press("Control+a")
        page.keyboard.type("3000")
        page.keyboard.press("Enter")
        page.wait_for_selector(".gptlab-plan >> text=/9 runs.*tokens each/")
        tab_to(page, ".gptlab-run")
        page.keyboard.press("Enter")
        page.wait_for_function(
            "() => / at step [1-9][0-9]/.test((document.querySelector('.gptlab-picture svg') || document.body)"
            ".getAttribute('aria-label'))"
        )
        lab = page.locator(".gptlab-lab").first
        photograph(page, lab, f"01_sweep-{name}-running.png")

        # What colours say is said in other ways as well.
        dashes = lab.locator(".gptlab-runs tbody svg path").evaluate_all("all => all.map(e => e.outerHTML)")
        patterns = [re.sub(r'stroke="[^"]*"', "", dash) for dash in dashes]
        assert len({*patterns[:8]}) == min(8, len(patterns)), "eight lines can be told apart by their dashes"
        assert "running" in lab.locator(".gptlab-runs").inner_text() and "invalid" in lab.inner_text()

        tab_to(page, ".gptlab-stop")
        page.keyboard.press("Enter")
        page.wait_for_selector(".gptlab-runs >> text=stopped")
        page.wait_for_function("() => !document.querySelector('.gptlab-run').disabled")
        photograph(page, lab, f"01_sweep-{name}-stopped.png")

        for part in page.locator(".gptlab-lab, .gptlab-lab button, .gptlab-lab input, .gptlab-lab select").all():
            if part.is_visible():
                box, over = part.bounding_box(), part.evaluate("e => e.scrollWidth - e.clientWidth")
                assert box is not None and box["x"] + box["width"] <= width / zoom, part.evaluate("e => e.outerHTML")
                assert over <= 1 or part.evaluate("e => e.tagName") == "INPUT", part.evaluate("e => e.outerHTML")
