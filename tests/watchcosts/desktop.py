"""A notebook that watches runs in a real JupyterLab, with a headless Chromium in front of it; what its processes use.

Needs Chromium on the PATH (apt-get install chromium), as the browser tests do (`tests/browser/`).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jupyter
import psutil

if TYPE_CHECKING:
    from playwright.sync_api import Page

PATIENCE_MS = 300_000
HASTY = str(Path(__file__).parent)

_CELL = """
import os, sys
import ipywidgets as widgets
from gptlab.lab import RunsView, runsview
from gptlab.lab.desk import desk
view = None

def watch(_=None):
    global view
    view = RunsView({runs!r})
    place.children = [view.widget]
    said.value = f"kernel {{os.getpid()}}"

def leave(_):
    global view
    place.children = []
    view.close()
    view = None
    said.value = "away"

def hurry(_):
    runsview.LIVE_S = 0.02
    os.environ["PYTHONPATH"] = os.pathsep.join([{hasty!r}, os.environ.get("PYTHONPATH", "")])
    desk().artist.module = "hasty"
    desk().artist.close()

place, said, buttons = widgets.VBox(), widgets.Label(), []
for text, pressed in (("watch", watch), ("leave", leave), ("hurry", hurry)):
    buttons.append(widgets.Button(description=text))
    buttons[-1].on_click(pressed)
    buttons[-1].add_class(f"costs-{{text}}")
said.add_class("costs-said")
widgets.VBox([widgets.HBox([*buttons, said]), place])
"""

# When each step was first on the screen (epoch seconds, once a frame was drawn), and how many pictures there were.
_EYE = """
window.seen = {}; window.pictures = 0;
new MutationObserver(() => {
  const svg = document.querySelector('.gptlab-picture svg');
  if (!svg || svg === window.lastPicture) return;
  window.lastPicture = svg; window.pictures += 1;
  const said = svg.getAttribute('aria-label');
  requestAnimationFrame(() => setTimeout(() => {
    for (const [, name, step] of said.matchAll(/(live-\\d+) at step (\\d+)/g)) {
      (window.seen[name] = window.seen[name] || []).push([+step, Date.now() / 1000]);
    }
  }, 0));
}).observe(document.body, {childList: true, subtree: true});
"""


@dataclass
class Usage:
    """CPU seconds that processes have used, and when that was read."""

    at: float
    kernel: float
    drawing: float
    browser: float

    def shares(self, later: Usage) -> dict[str, float]:
        """Shares of one core between two readings."""
        seconds = later.at - self.at
        return {
            name: (getattr(later, name) - getattr(self, name)) / seconds for name in ("kernel", "drawing", "browser")
        }


class Desktop:
    """The page, the kernel behind it and its drawing process."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self._cdp = page.context.new_cdp_session(page)
        self._cdp.send("Performance.enable")
        self._cdp.send("HeapProfiler.enable")
        self.page.evaluate(_EYE)

    def press(self, button: str) -> None:
        """Presses one of the cell's buttons."""
        self.page.click(f".costs-{button}")

    def watch(self) -> None:
        """Opens the view, and waits for its first picture."""
        before = self.pictures
        self.press("watch")
        self.page.wait_for_function("before => window.pictures > before", arg=before, timeout=PATIENCE_MS)

    @property
    def pictures(self) -> int:
        """Pictures that were shown so far."""
        return int(self.page.evaluate("window.pictures"))

    def seen(self) -> dict[str, list[list[float]]]:
        """By run every step that was the last of a picture, and when that was on the screen, in epoch seconds."""
        return dict(self.page.evaluate("window.seen"))

    @property
    def kernel(self) -> psutil.Process:
        """The kernel."""
        said = re.search(r"kernel (\d+)", self.page.inner_text(".costs-said"))
        assert said is not None
        return psutil.Process(int(said.group(1)))

    def usage(self) -> Usage:
        """What the processes have used until now."""
        kernel = self.kernel
        artists = [child for child in kernel.children() if {"gptlab.lab.drawing", "hasty"} & {*child.cmdline()}]
        return Usage(time.monotonic(), _seconds(kernel), sum(map(_seconds, artists)), sum(map(_seconds, browsers())))

    def heap_mb(self) -> float:
        """The page's JavaScript heap after a collection."""
        self._cdp.send("HeapProfiler.collectGarbage")
        found = self._cdp.send("Performance.getMetrics")["metrics"]
        return float(next(one["value"] for one in found if one["name"] == "JSHeapUsedSize")) / 1e6

    def page_mb(self) -> float:
        """Resident memory of the process that renders the page."""
        renderers = [one for one in browsers() if "--type=renderer" in one.cmdline()]
        return max(one.memory_info().rss for one in renderers) / 1e6

    def kernel_mb(self) -> float:
        """Resident memory of the kernel."""
        return float(self.kernel.memory_info().rss) / 1e6


def browsers() -> list[Any]:
    """The browser's processes: those under this one."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "chrom" in child.name():
                found.append(child)
    return found


def _seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # one of the browser's that has just ended
        return 0.0
    return float(times.user + times.system)


@contextlib.contextmanager
def desktop(folder: Path, runs: Path) -> Iterator[Desktop]:
    """A page whose notebook is ready to watch the runs of a folder."""
    with jupyter.jupyterlab(folder) as address, jupyter.page() as page:
        page.set_default_timeout(PATIENCE_MS)
        jupyter.open_cells(page, address, folder, "watch.ipynb", _CELL.format(runs=str(runs), hasty=HASTY))
        jupyter.run_all_cells(page)
        page.wait_for_selector(".costs-watch")
        yield Desktop(page)
