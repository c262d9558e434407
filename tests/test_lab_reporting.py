"""The button Report: a page that is written beside the kernel, its link and its call."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from labtools import launcher as launcher
from labtools import made_run, until
from labtools import make as make

pytest.importorskip("ipywidgets", reason="the lab's widgets are not installed")


def test_a_report_is_written_beside_the_kernel_and_by_a_call(make: Callable[..., Any], tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        made_run(tmp_path, name, n_embd=64 if name == "a" else 96)
    view = make("RunsView", tmp_path)
    until(lambda: view._actions.picker.options == ("a", "b", "c"))
    assert sorted(run.name for run in view._shown()) == ["a", "b", "c"]
    view.hide("c")
    view._actions.buttons["Report"].click()
    until(lambda: "The report is written" in view._message.value, 120)
    (link,) = view._reports.link.outputs
    path = tmp_path / "all-runs.html"
    assert link["data"]["text/html"].count(quote(os.path.relpath(path))) >= 1
    assert view._reports._process.pid is None, "it ends with its report"
    page = path.read_text()
    assert "<svg" in page and "What sets them apart" in page and "<summary>c</summary>" not in page
    path.unlink()
    call = view.code.text.splitlines()[-1]
    assert call.startswith("report.write(") and "['a', 'b']" in call
    exec("import gptlab\nfrom gptlab.lab import report\n" + call, {})
    assert _undated(path.read_text()) == _undated(page), "the call writes the same page"
    path.unlink()
    assert view.report() == path and _undated(path.read_text()) == _undated(page)

    view._actions.picker.value = ["b"]
    (tmp_path / "b" / "run.json").write_text('{"config"')
    (tmp_path / "all-runs.html").unlink()
    view._actions.buttons["Report"].click()
    until(lambda: "run.json" in view._message.value, 120)
    assert "ConfigError" not in view._message.value, "a mistake is told without its type"
    assert not path.exists()


def _undated(page: str) -> str:
    """A report without the minute in which it was written."""
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "", page)
