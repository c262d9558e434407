"""The first notebook without a browser: runs it, and leaves its page, its picture and its table.

    $ python -m gptlab.lab.demo

Executes `notebooks/01_sweep.ipynb` in a kernel of its own, prints what its runs reach meanwhile, writes demo.html (one
file that needs no network) and demo.png into the working folder, and prints the table of results. Its runs go to
`runs/demo-<time>`. The exit code is 0 only if every cell ran and its claims held.
Left out on purpose: what the notebook does.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

from gptlab.runs import ACTIVE, Run, default_runs_dir, list_runs

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "01_sweep.ipynb"
CELL_TIMEOUT_S = 900
_WIDGET = "application/vnd.jupyter.widget-view+json"


def main() -> int:
    """Runs the demo; gives the exit code."""
    try:
        import nbclient  # noqa: F401
        import nbconvert  # noqa: F401
    except ImportError:
        print("The demo needs the lab's packages: pip install 'gptlab[lab]'.", file=sys.stderr)
        return 2
    if not NOTEBOOK.is_file():
        print(f"The demo needs the repository: {NOTEBOOK} is not there.", file=sys.stderr)
        return 2
    began = time.monotonic()
    runs_dir = default_runs_dir().absolute() / time.strftime("demo-%Y%m%d-%H%M%S")
    runs_dir.mkdir(parents=True)
    print(f"Executing {NOTEBOOK.name}; its runs are written to {os.path.relpath(runs_dir)}", flush=True)
    over = threading.Event()
    teller = threading.Thread(target=_tell, args=(runs_dir, over), daemon=True)
    teller.start()
    notebook, error = execute(NOTEBOOK, runs_dir)
    over.set()
    teller.join()
    Path("demo.html").write_text(page(notebook), encoding="utf-8")
    print("wrote demo.html")
    pictures = sorted(runs_dir.glob("*.sweep.png"))
    if pictures:
        shutil.copyfile(pictures[-1], "demo.png")
        print("wrote demo.png")
    _print_table(runs_dir)
    print(f"{time.monotonic() - began:.0f} s")
    if error is not None:
        print(f"The notebook failed: {error}", file=sys.stderr)
        return 1
    return 0


def execute(path: Path, runs_dir: Path) -> tuple[Any, str | None]:
    """Executes a copy of a notebook; gives it with its outputs, and what went wrong, if something did."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", store_widget_state=True,
        resources={"metadata": {"path": str(runs_dir)}},
    )  # fmt: skip
    try:
        client.execute(env=os.environ | {"GPTLAB_RUNS": str(runs_dir)})
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        return notebook, re.sub(r"\x1b\[[\d;]*m", "", str(error)).strip()
    return notebook, None


def page(notebook: Any) -> str:
    """The executed notebook as one HTML file, with the widgets' last picture and table in the place of the widgets."""
    from nbconvert import HTMLExporter

    models = notebook.metadata.pop("widgets", {}).get("application/vnd.jupyter.widget-state+json", {}).get("state", {})
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if _WIDGET in data:
                data["text/html"] = _still(models, data.pop(_WIDGET)["model_id"])
    exporter = HTMLExporter(template_name="lab")
    # Scripts that nbconvert would load from elsewhere: nothing on this page needs them.
    exporter.mathjax_url = exporter.require_js_url = exporter.jquery_url = exporter.mermaid_js_url = ""
    body, _ = exporter.from_notebook_node(notebook)
    body = re.sub(r'<script[^>]*src="[^"]*"[^>]*>\s*</script>', "", body)
    return re.sub(r"<script type=\"module\">.*?</script>", "", body, flags=re.DOTALL)


def _still(models: dict[str, Any], model_id: str) -> str:
    """What HTML widgets under a widget show, in order."""
    state = models.get(model_id, {}).get("state", {})
    if state.get("_model_name") == "AccordionModel":
        return ""  # folded away on the page too
    parts = [str(state["value"])] if state.get("_model_name") == "HTMLModel" else []
    if str(state.get("_model_name")).endswith(("TextModel", "ComboboxModel")):
        said = f"{state.get('description') or state.get('placeholder') or ''}: {state.get('value')}"
        parts.append(f'<span style="margin-right:1.5em">{html.escape(said)}</span> ')
    parts += [_still(models, child.removeprefix("IPY_MODEL_")) for child in state.get("children", [])]
    return f"<div>{''.join(parts)}</div>" if state.get("children") else "".join(parts)


def _tell(runs_dir: Path, over: threading.Event) -> None:
    """Prints a line for each run that has ended, and one now and then for the one that trains."""
    told: set[str] = set()
    quiet = 0.0
    ended = False
    while not ended:
        ended = over.wait(0.5)  # one more look then, for what has ended since the last one
        for run in list_runs(runs_dir):
            state = run.state
            if state not in ACTIVE and run.name not in told:
                told.add(run.name)
                print(_line(run, state), flush=True)
                quiet = time.monotonic()
            elif state in ACTIVE and time.monotonic() - quiet > 10:
                print(_line(run, state), flush=True)
                quiet = time.monotonic()


def _line(run: Run, state: str) -> str:
    row = run.summary()
    loss = f", loss {row['loss']:.3f}" if row["loss"] is not None else ""
    return f"  {run.name}: {state}, step {row['step']} of {row['max_iters']}{loss}"


def _print_table(runs_dir: Path) -> None:
    import csv

    from rich.console import Console
    from rich.table import Table

    for path in sorted(runs_dir.glob("*.sweep.csv")):
        table = Table(box=None, header_style="bold")
        columns = {
            "n_layer": "{}", "n_head": "{}", "n_embd": "{}", "parameters": "{:,.0f}", "state": "{}", "step": "{:.0f}",
            "loss": "{:.3f}", "val_loss": "{:.3f}", "tokens_per_s": "{:,.0f}", "mfu": "{:.1%}", "seconds": "{:.1f}",
        }  # fmt: skip
        for name in columns:
            table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                table.add_row(*(_cell(row.get(name) or "", form) for name, form in columns.items()))
        Console(width=110).print(table)


def _cell(text: str, form: str) -> str:
    if form == "{}" or not text:
        return text
    return form.format(float(text))


if __name__ == "__main__":
    sys.exit(main())
