"""The table of runs as HTML: a real <table>, which is the legend of the curves too, and the bar of progress.

Pure functions from rows (`Sweep.rows()`, or `run_rows` for a folder) to text. Every value is escaped: run
directories are data, and a page would run what a name smuggles in.

    >>> from gptlab.lab import tables
    >>> tables.table(tables.run_rows(gptlab.runs.list_runs()), {})

Left out on purpose: the table as numbers, which is `Sweep.table()`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from gptlab.lab.figures import style
from gptlab.runs import QUEUED, TRAINING, Run
from gptlab.wording import duration

STYLE = """<style>
.gptlab-table {border-collapse: collapse; width: 100%; font-size: 12px; line-height: 1.5;
  font-variant-numeric: tabular-nums;
  color: var(--jp-ui-font-color1, #24292e); font-family: var(--jp-ui-font-family, sans-serif)}
.gptlab-table th, .gptlab-table td {padding: 2px 10px 2px 4px; text-align: right; white-space: nowrap; border: none}
.gptlab-table th {font-weight: 600; border-bottom: 1px solid var(--jp-border-color1, #bbb); vertical-align: bottom}
.gptlab-table tbody tr {border-bottom: 1px solid var(--jp-border-color2, #e4e4e4); background: transparent}
.gptlab-table td.text, .gptlab-table th.text {text-align: left}
.gptlab-table td.why {white-space: normal}
@media (max-width: 1000px) {.gptlab-table th, .gptlab-table td {padding: 2px 5px 2px 2px}}
.gptlab-table .best {font-weight: 700} .gptlab-table .off td {color: var(--jp-ui-font-color2, #667)}
.gptlab-table .bad td.text {color: var(--jp-error-color1, #b3261e)}
.gptlab-table [data-sort], .gptlab-table [data-pick] {cursor: pointer}
.gptlab-table tr.picked, .gptlab-table tbody tr.picked:hover {background: var(--jp-layout-color2, #eceff3);
  box-shadow: inset 3px 0 var(--jp-brand-color1, #2196f3)}
</style>"""
"""What a page needs once, beside its tables: a style sheet that came anew with each of them would make the browser look
at every element of the page again."""

# A click on a heading or a row moves the select of its view that sorts or picks, which a keyboard reaches as well. On
# pointerdown: a live table may be replaced before a click is whole.
_LISTEN = (
    "const t=event.target.closest('[data-sort],[data-pick]');if(t){"
    "const k=t.dataset.sort?'sort':'pick',x=t.dataset[k],v=this.closest('.gptlab-lab')||this.closest('.gptlab-view'),"
    "s=v.querySelector('.gptlab-'+k+' select'),o=[...s.options].find(o=>o.value==x);if(o){"
    "if(k=='pick'){o.selected=!o.selected}else if(o.selected){v.querySelector('.gptlab-down').click()}"
    "else{s.value=x}s.dispatchEvent(new Event('change',{bubbles:true}))}}"
)


def run_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Rows like a sweep's for any runs: shape, state, parameters, progress, last losses, speed."""
    from gptlab import costs

    rows = []
    for run in runs:
        row = run.row()
        if "n_layer" in row:  # it can be read
            error = run.error() if row["state"] == "failed" else None
            reason = f"{error.get('type')}: {error.get('message')}" if error else None
            row |= {"parameters": costs.parameters(run.config).total, "reason": reason}
        rows.append(row)
    return rows


COLUMNS: dict[str, tuple[str, str]] = {
    "n_layer": ("layers", "{}"), "n_head": ("heads", "{}"), "n_embd": ("width", "{}"),
    "parameters": ("parameters", "{:,}"), "state": ("state", "{}"), "step": ("step", "{}"), "loss": ("loss", "{:.3f}"),
    "val_loss": ("val. loss", "{:.3f}"), "tokens_per_s": ("tokens/s", "{:,.0f}"), "mfu": ("MFU", "{:.1%}"),
    "seconds": ("seconds", "{:.1f}"),
}  # fmt: skip
"""What a row shows, and what it can be sorted by: title and form by column."""


def ordered(rows: Sequence[Mapping[str, Any]], by: str | None, descending: bool = False) -> list[Mapping[str, Any]]:
    """The rows sorted by a column, those without a value in it last; None leaves them as they are."""
    if by is None:
        return list(rows)
    known = [row for row in rows if row.get(by) is not None and row[by] == row[by]]
    shown = {id(row) for row in known}
    return sorted(known, key=lambda row: row[by], reverse=descending) + [row for row in rows if id(row) not in shown]


def table(
    rows: Sequence[Mapping[str, Any]],
    colours: Mapping[str, int],
    *,
    names: bool = False,
    sorted_by: str | None = None,
    descending: bool = False,
    picked: Sequence[str] = (),
    clickable: bool = False,
) -> str:
    """The rows as HTML, for a page with `STYLE`.

    Args:
        rows: as `Sweep.rows()` gives them.
        colours: by run name the place of its curve in the picture (`figures.style`); others have no line.
        names: whether a column says the runs' names, where shapes alone do not tell them apart.
        sorted_by, descending: how the rows are sorted, which the heading says.
        picked: names of rows that are marked.
        clickable: whether a click on a heading sorts and one on a row picks it: they move the widgets of `RunsView`
            that do it, which a keyboard reaches.
    """
    head = [("", "text", "")] + ([("run", "text", "name")] if names else [])
    head += [(title, "text" if key == "state" else "", key) for key, (title, _) in COLUMNS.items()]
    titles = []
    for title, kind, key in head:
        order = ("descending" if descending else "ascending") if key and key == sorted_by else ""
        aria = f' aria-sort="{order}"' if order else ""
        arrow = {
            "ascending": " \N{BLACK UP-POINTING SMALL TRIANGLE}",
            "descending": " \N{BLACK DOWN-POINTING SMALL TRIANGLE}",
        }
        click = f' data-sort="{COLUMNS[key][0] if key in COLUMNS else title}"' if clickable and key else ""
        titles.append(f'<th scope="col" class="{kind}"{aria}{click}>{title}{arrow.get(order, "")}</th>')
    best = min((row["val_loss"] for row in rows if row.get("val_loss") is not None), default=None)
    lines = []
    for row in rows:
        name = str(row["name"])
        can_pick = clickable and row["state"] not in ("invalid", "waiting")
        click = f' data-pick="{html.escape(name)}"' if can_pick else ""
        lines.append(_row(row, colours.get(name), names, best, name in picked, click))
    caption = '<caption style="display:none">Runs: shape, state, losses, speed</caption>'
    listens = f' onpointerdown="{html.escape(_LISTEN)}"' if clickable else ""
    return (
        f'<div style="overflow-x:auto"><table class="gptlab-table"{listens}>{caption}'
        f"<thead><tr>{''.join(titles)}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _row(row: Mapping[str, Any], colour: int | None, names: bool, best: float | None, picked: bool, click: str) -> str:
    state, reason = str(row["state"]), row.get("reason")
    cells = [f'<td class="text">{swatch(colour)}</td>']
    if names:
        cells.append(f'<td class="text">{html.escape(str(row["name"]))}</td>')
    for key, (_, form) in COLUMNS.items():
        kind = (
            "text"
            if key == "state"
            else "best"
            if key == "val_loss" and best is not None and row.get(key) == best
            else ""
        )
        value = row.get(key)
        text = (
            f"{value} / {row['max_iters']}" if key == "step" and value else "" if key == "step" else _text(value, form)
        )
        cells.append(f'<td class="{kind}">{text}</td>')
        if key == "state" and reason and not row.get("step"):
            cells.append(f'<td class="text why" colspan="6">{html.escape(str(reason))}</td>')
            break
    else:
        if reason:
            cells.append(f'<td class="text why">{html.escape(str(reason))}</td>')
    kind = "bad" if state in ("failed", "diverged", "lost") else "off" if state in ("invalid", "waiting") else ""
    mark = ' aria-selected="true"' if picked else ""
    return f'<tr class="{kind}{" picked" * picked}"{mark}{click}>{"".join(cells)}</tr>'


def _text(value: Any, form: str = "{}") -> str:
    """A value in its form; what is not there is an empty cell."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    try:
        return html.escape(form.format(value))
    except (ValueError, TypeError):  # a file that someone wrote by hand
        return html.escape(str(value))


def swatch(index: int | None) -> str:
    """A piece of a run's line, in its colour and dashes."""
    if index is None:
        return ""
    colour, dashes = style(index)
    pattern = f' stroke-dasharray="{" ".join(str(2 * dash) for dash in dashes)}"' if dashes else ""
    return (
        f'<svg width="34" height="8" aria-hidden="true" style="vertical-align:middle">'
        f'<path d="M1 4H33" stroke="{colour}" stroke-width="2.5"{pattern}/></svg>'
    )


def is_ended(row: Mapping[str, Any]) -> bool:
    """Whether a row trains no more in its sweep: it came to an end, or a reason says why it does not go on."""
    return row["state"] in ("finished", "diverged", "failed") or bool(row.get("reason"))


def work(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float | None]:
    """How much of the rows' training is done, 0..1, and about how many seconds of it are left (None: not known yet).

    A step counts with its parameters, so that large models at the end of a grid are not a surprise. Seconds are those
    of training, with as many runs at a time as train now.
    """
    total = done = seconds = 0.0
    sizes = [row["parameters"] for row in rows if row.get("parameters")]
    usual = sum(sizes) / len(sizes) if sizes else 1.0
    for row in rows:
        if row["state"] == "invalid" or not row.get("max_iters"):
            continue
        size = float(row.get("parameters") or usual)
        steps = row.get("step") or 0
        total += size * (steps if is_ended(row) else row["max_iters"])
        done += size * steps
        seconds += row.get("seconds") or 0.0
    if not total:
        return 0.0, None
    at_once = max(1, sum(row["state"] in TRAINING for row in rows))
    return done / total, (total - done) / done * seconds / at_once if done and seconds > 0.5 else None


def progress(rows: Sequence[Mapping[str, Any]], running: bool) -> str:
    """A bar with its meaning in words beside it."""
    share, left = work(rows)
    valid = [row for row in rows if row["state"] != "invalid"]
    over = sum(map(is_ended, valid))
    active, queued = (sum(row["state"] in states for row in valid) for states in (TRAINING, (QUEUED,)))
    words = [f"{over} of {len(valid)} runs ended"] if valid else ["no runs yet"]
    if active:
        words.append(f"{active} training")
    if queued:
        words.append(f"{queued} queued")
    if (invalid := len(rows) - len(valid)) > 0:
        words.append(f"{invalid} invalid")
    if (running or active) and left:
        words.append(f"about {duration(left)} left")
    said = ", ".join(words)
    return (
        '<div style="display:flex;align-items:center;gap:12px;font-size:12px;'
        'font-family:var(--jp-ui-font-family,sans-serif)">'
        f'<progress value="{share:.3f}" max="1" aria-label="{said}" style="flex:1;min-width:80px;height:14px;'
        f'accent-color:var(--jp-brand-color1,#0072b2)"></progress>'
        f'<span style="min-width:26em;padding-right:8px">{said}</span></div>'
    )
