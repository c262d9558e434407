"""Reports beside the kernel: a view asks for the page of the runs it shows, and gets a link to it.

Curves, tables and a fit of a law with its intervals can take a minute, so a process of its own writes the page, as
`gptlab report` would, and ends with it.

    >>> reports = Reports(); reports.begin([Run("runs/a")], Path("runs/a.html"), title="a")
    >>> reports.take()                # now and then: what is to be said of it, once there is something

Left out on purpose: what stands on the page (`report.py`).
"""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gptlab.lab.process import Process, serve
from gptlab.runs import Run


class Reports:
    """The kernel's side: at most one report at a time, and where the last one lies. Used by one thread."""

    def __init__(self) -> None:
        import ipywidgets

        self._process = Process("gptlab.lab.reporting")
        self.is_busy = False
        """Whether a page is being written."""
        # An output and not an HTML widget: there JupyterLab turns a path from the notebook's folder into an address.
        self.link = ipywidgets.Output()
        self.link.add_class("gptlab-report-link")

    def begin(self, runs: Sequence[Run], path: Path, *, title: str) -> None:
        """Lets the page be written; one that is on its way is given up."""
        self._process.close()
        asked = {"runs": [str(run.path) for run in runs], "path": str(path), "title": title}
        self._process.send(asked)
        self.is_busy = True

    def take(self) -> dict[str, Any] | None:
        """`path` of a page that has been written since the last look, or an `error`; None where there is no news."""
        if not self.is_busy:
            return None
        answer = self._process.receive()
        if answer is None:
            if self._process.pid is not None:
                return None
            answer = {"error": "The process that writes the report ended without a word: try again."}
        self._process.close()
        self.is_busy = False
        if "path" in answer:
            self._show(Path(answer["path"]))
        return answer

    def close(self) -> None:
        """Ends a page that is on its way."""
        self._process.close()

    def _show(self, path: Path) -> None:
        where = os.path.relpath(path)
        link = f'<a href="{quote(where)}" target="_blank">{html.escape(where)}</a>'
        data = {"text/html": link, "text/plain": where}
        self.link.outputs = ({"output_type": "display_data", "data": data, "metadata": {}},)


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """The path of the page that a request asks for."""
    from gptlab.lab import report

    return {"path": str(report.write([Run(run) for run in asked["runs"]], Path(asked["path"]), title=asked["title"]))}


def main() -> None:
    """Answers requests until standard input ends."""
    os.nice(5)  # training and the user's cells come first
    serve(answer)


if __name__ == "__main__":
    main()
