"""A report: runs as one HTML file that needs nothing else, to be kept or sent.

    $ gptlab report first second --out report.html
    >>> from gptlab.lab import report
    >>> report.write([gptlab.Run("runs/first")], "report.html")

Curves by steps and by FLOPs, the table of runs, the law through them where there are runs enough to fit one, what sets
their configs apart, and for each run its config, what each `auto` became, device, text and versions. The figures are
those of the notebooks. Every text is escaped and the page forbids itself scripts and any network.
Left out on purpose: checkpoints and logs.
"""

from __future__ import annotations

import html
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptlab.config import ConfigError
from gptlab.given import check_output
from gptlab.jsonfile import replacing
from gptlab.lab.comparing import settings
from gptlab.runs import Run

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>
<style>
:root {{color-scheme: light dark; --jp-ui-font-color1: #24292e; --jp-ui-font-color2: #667; --jp-border-color1: #bbb;
  --jp-border-color2: #dde1e6; --jp-error-color1: #b3261e; --page: #fff}}
@media (prefers-color-scheme: dark) {{:root {{--jp-ui-font-color1: #e3e6ea; --jp-ui-font-color2: #9aa3ad;
  --jp-border-color1: #59626b; --jp-border-color2: #363c43; --jp-error-color1: #ff8a80; --page: #16181b}}}}
body {{margin: 2rem auto; padding: 0 1.2rem; max-width: 1080px; font: 15px/1.55 system-ui, sans-serif;
  color: var(--jp-ui-font-color1); background: var(--page)}}
h1 {{font-size: 1.6rem; margin-bottom: 0}} h2 {{font-size: 1.15rem; margin: 2.2rem 0 .6rem}}
.by {{color: var(--jp-ui-font-color2); margin-top: .2rem}}
table.plain {{border-collapse: collapse; font-size: 13px}} table.plain th, table.plain td {{text-align: left;
  padding: 2px 14px 2px 0; border-bottom: 1px solid var(--jp-border-color2); vertical-align: top;
  overflow-wrap: anywhere}} table.plain th {{font-weight: 600; white-space: nowrap}}
details {{margin: .4rem 0; border-bottom: 1px solid var(--jp-border-color2); padding-bottom: .4rem}}
summary {{cursor: pointer; font-weight: 600}} .wide {{overflow-x: auto}}
</style></head><body>
<h1>{title}</h1><p class="by">{by}</p>
{body}
</body></html>
"""


def write(runs: Sequence[Run], path: str | os.PathLike[str], *, title: str = "") -> Path:
    """Writes the page, whole or not at all; gives its path.

    Raises:
        ConfigError: no runs, or a folder that cannot be written.
    """
    path = Path(path)
    check_output(path, "--out")
    text = page(runs, title=title)
    try:
        with replacing(path) as beside:
            beside.write_text(text, encoding="utf-8", errors="backslashreplace")  # names need not be Unicode
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): give another --out.") from None
    return path


def page(runs: Sequence[Run], *, title: str = "") -> str:
    """The page as text."""
    from gptlab import __version__
    from gptlab.lab import figures, tables

    if not runs:
        raise ConfigError("A report needs a run: name one or several, `gptlab runs` lists them.")
    rows = tables.run_rows(runs)
    drawn = list(runs)[: figures.MOST_CURVES]
    series = [figures.read(run, run.name) for run in drawn]
    said = figures.describe(series)
    colours = {run.name: index for index, run in enumerate(drawn)}
    parts = [f"<p>The curves are those of the first {len(drawn)} runs.</p>" if len(drawn) < len(runs) else ""]
    parts.append("<h2>Curves by optimizer steps</h2>" + figures.page(figures.draw(series, legend=False), said))
    parts.append(
        "<h2>Loss and speed by compute</h2>" + figures.page(figures.draw(series, x="flops", legend=False), said)
    )
    parts.append("<h2>Runs</h2>" + tables.STYLE + tables.table(rows, colours, names=True))
    parts.append(_law(runs))
    parts.append(_differences(runs))
    parts.append("<h2>Each run</h2>" + "".join(map(_run, runs)))
    by = f"gptlab {__version__}, {len(runs)} run{'s' * (len(runs) > 1)}, {time.strftime('%Y-%m-%d %H:%M')}"
    return _PAGE.format(
        title=_safe(title or (runs[0].name if len(runs) == 1 else "Runs")), by=_safe(by), body="\n".join(parts)
    )


def _law(runs: Sequence[Run]) -> str:
    """The law through the finished runs' losses, or the sentence that says why there is none."""
    from gptlab import scaling
    from gptlab.lab import figures, plots

    ended = [(run, run.result() or {}) for run in runs]
    done = [(run, result) for run, result in ended if result.get("val_loss") and result.get("tokens")]
    if len(done) < 3:
        return ""
    columns: dict[str, Any] = {
        "N": [scaling.sizes(run.config)["matmul"] for run, _ in done],
        "D": [result["tokens"] for _, result in done],
    }
    loss = [result["val_loss"] for _, result in done]
    try:
        fit = scaling.fit(columns, loss)
    except ConfigError as error:
        return f"<h2>Law</h2><p>{_safe(str(error))}</p>"
    import numpy as np

    points = {name: np.array(column, dtype=float) for name, column in columns.items()}
    values = {name: f"{value:.4g} ({fit.intervals[name][0]:.3g} to {fit.intervals[name][1]:.3g})"
              for name, value in fit.values.items()}  # fmt: skip
    drawing = figures.svg(plots.law(fit, points, np.array(loss)), f"{fit.law}, with measured losses and residuals.")
    said = "Value and 95 % interval; N counts matmul weights."
    return f"<h2>Law: {_safe(fit.law)}</h2><p>{said}</p>{_table(values)}{drawing}"


def _differences(runs: Sequence[Run]) -> str:
    """The settings in which the runs' configs differ, a column a run."""
    found = settings(runs)
    if not found:
        return ""
    head = "".join(f"<th scope='col'>{_safe(run.name)}</th>" for run in runs)
    lines = []
    for name, values in found.items():
        cells = "".join(f"<td>{_safe(value)}</td>" for value in values)
        lines.append(f"<tr><th scope='row'>{_safe(name)}</th>{cells}</tr>")
    return (
        "<h2>What sets them apart</h2><div class='wide'><table class='plain'>"
        f"<thead><tr><th></th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _run(run: Run) -> str:
    """One run's record."""
    info, result, status = run.info, run.result() or {}, run.status()
    peak = info.get("peak") or {}
    record: dict[str, Any] = {
        "state": status.get("state"), "attempts": len(run.attempts()), "processes": info.get("world_size"),
        "device": info.get("device_name"), "host": info.get("host"),
        "peak": f"{peak['flops']:.3g} FLOP/s, {peak['source']}" if peak else None,
        "text": _words(info.get("data")), "versions": _words(info.get("versions")),
        "result": _words({name: value for name, value in result.items() if name not in ("setting", "attempt")}),
        "imported": _words(info.get("imported")),
    }  # fmt: skip
    setting, reasons = info.get("setting") or {}, info.get("reasons") or {}
    became = {name: f"{value} ({reasons[name]})" if name in reasons else value for name, value in setting.items()}
    shown = {name: value for name, value in record.items() if value is not None}
    return (
        f"<details><summary>{_safe(run.name)}</summary>{_table(shown)}"
        f"{'<h3>Settings in force</h3>' + _table(became) if became else ''}"
        f"<h3>Config</h3>{_table(info.get('config', {}))}</details>"
    )


def _words(values: Any) -> str | None:
    """A record in one line."""
    if not isinstance(values, dict) or not values:
        return None
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def _table(values: Any) -> str:
    """Names and values, a line each."""
    lines = [f"<tr><th scope='row'>{_safe(name)}</th><td>{_safe(value)}</td></tr>" for name, value in values.items()]
    return f"<table class='plain'><tbody>{''.join(lines)}</tbody></table>"


def _safe(value: Any) -> str:
    """Any value as text that a page shows and does not run."""
    return html.escape("none" if value is None else str(value))
