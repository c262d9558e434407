"""A real JupyterLab with folders of its own, and a headless Chromium that looks at it.

Left out on purpose: what is clicked and expected (`test_*_notebook.py`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
ARTEFACTS = Path(__file__).parent / "artefacts"
"""Where screenshots are left for a person to look at."""
PATIENCE_MS = 300_000  # a test machine may train other things meanwhile


def chromium() -> str | None:
    """Path of an installed Chromium or Chrome."""
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if found := shutil.which(name):
            return found
    return None


NEEDED = [
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="playwright is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("jupyterlab") is None, reason="jupyterlab is not installed"),
    pytest.mark.skipif(chromium() is None, reason="no chromium on the PATH (apt-get install chromium)"),
]
"""A module's marks: what these tests cannot do without."""


@contextmanager
def jupyterlab(folder: Path, **environment: str) -> Iterator[str]:
    """JupyterLab on a fresh folder; gives its address. Nothing of the user's settings is read or written."""
    work = folder / "notebooks"
    work.mkdir(parents=True, exist_ok=True)
    ARTEFACTS.mkdir(exist_ok=True)
    settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(
        json.dumps({"fetchNews": "false", "checkForUpdates": False})
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {
        "JUPYTERLAB_SETTINGS_DIR": folder / "settings", "JUPYTERLAB_WORKSPACES_DIR": folder / "workspaces",
        "JUPYTER_CONFIG_DIR": folder / "config", "JUPYTER_RUNTIME_DIR": folder / "runtime",
        "JUPYTER_DATA_DIR": folder / "data", "IPYTHONDIR": folder / "ipython",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--allow-root",
        "--ServerApp.port_retries=0", "--IdentityProvider.token=", f"--ServerApp.root_dir={work}",
    ]  # fmt: skip
    with open(folder / "jupyter.log", "w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {name: str(path) for name, path in own.items()} | environment,
        )  # fmt: skip
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_for(f"{address}/api/status", process, folder / "jupyter.log")
            yield address
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path, patience_s: float = 300) -> None:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")


@contextmanager
def page(width: int = 1300, height: int = 1500, *, dark: bool = False, zoom: float = 1.0) -> Iterator[Page]:
    """A page of a fresh headless browser.

    Args:
        width, height: of the window, in pixels of the screen.
        zoom: the browser's own: at 2 the page has half as many pixels, each twice as large.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=chromium(), args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        try:
            yield browser.new_page(
                viewport={"width": int(width / zoom), "height": int(height / zoom)},
                device_scale_factor=zoom,
                color_scheme="dark" if dark else "light",
            )
        finally:
            browser.close()


def dark(folder: Path) -> None:
    """Gives a JupyterLab that runs the dark theme; pages that are opened later have it."""
    settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
    (settings / "themes.jupyterlab-settings").write_text(json.dumps({"theme": "JupyterLab Dark"}))


def open_cells(page: Page, address: str, folder: Path, name: str, *cells: str) -> None:
    """Opens a new notebook of these cells and waits until its kernel is idle."""
    from nbformat import v4, write

    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    made = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in cells], metadata={"kernelspec": kernel})
    write(made, folder / "notebooks" / name)
    _open(page, address, name)


def open_notebook(page: Page, address: str, folder: Path, name: str) -> None:
    """Opens a copy of a notebook of ours and waits until its kernel is idle."""
    shutil.copy(NOTEBOOKS / name, folder / "notebooks" / name)
    _open(page, address, name)


def _open(page: Page, address: str, name: str) -> None:
    page.goto(f"{address}/doc/tree/{name}?reset")
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=300_000)
    page.wait_for_selector("#jp-main-statusbar >> text=| Idle", timeout=300_000)


def run_all_cells(page: Page) -> None:
    """Menu Run, Run All Cells."""
    page.click('.lm-MenuBar-item:has-text("Run")')
    page.click('.lm-Menu-item:has-text("Run All Cells")')
