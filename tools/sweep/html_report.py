"""A sweep's report as one HTML page that stands alone (no script, nothing from elsewhere), with charts: loss
against tokens and time, rate, memory, and predicted against measured."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from meshwright.parallel.planner.timeline_plot import to_svg
from meshwright.tools.charts import MARKERS, Bar, Curve, Style, draw_bars, draw_curves, draw_errors, style_of
from meshwright.tools.run_reader import (
    PREDICTED,
    Figures,
    Rate,
    RunFolder,
    series,
    tokens_per_step,
    training_s,
)
from meshwright.tools.sweep.results import ReportRow, SweepReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ERRORS = {"step_time_s": "step time", "peak_memory_gib": "memory"}
SIGNS = dict(zip(MARKERS, "●■▲◆★", strict=True))


def draw_charts(rows: Sequence[ReportRow]) -> dict[str, "Figure"]:
    """All of them with their titles, in the order in which one asks."""
    styles = [style_of(number) for number in range(len(rows))]
    pairs = list(zip(rows, styles, strict=True))
    curves = {
        "Loss against tokens": ("tokens", _tokens),
        "Loss against time": ("seconds of training steps", _seconds),
    }
    bars = {
        "Tokens/s, of all processes: median and quartiles": _rate_bar,
        "Peak memory per process, GiB": _memory_bar,
    }
    charts = {
        title: draw_curves(title, words, [_loss_curve(row, style, place) for row, style in pairs])
        for title, (words, place) in curves.items()
    }
    charts |= {
        title: draw_bars(title, [make_bar(row, style) for row, style in pairs])
        for title, make_bar in bars.items()
    }
    names = [name for name in PREDICTED if name in ERRORS]
    known = [
        row for row in rows if row.figures and any(row.figures.error_of(name) is not None for name in names)
    ]
    errors = {ERRORS[name]: [row.figures.error_of(name) for row in known if row.figures] for name in names}
    title = "Predicted against measured"
    return charts | ({title: draw_errors(title, [row.name for row in known], errors)} if known else {})


def _loss_curve(row: ReportRow, style: Style, place: Callable[[RunFolder], Mapping[int, float]]) -> Curve:
    """A curve of the rows that were trained; the evaluation before training is not among them."""
    if row.run is None:
        return Curve((), style)
    losses, places = series(row.run.rows, "loss"), place(row.run)
    return Curve([(places[step], loss) for step, loss in losses.items() if step in places], style)


def _tokens(run: RunFolder) -> dict[int, float]:
    """Trained so far, at each step."""
    each = tokens_per_step(run)
    return {} if each is None else {step: step * each for step in run.rows}


def _seconds(run: RunFolder) -> dict[int, float]:
    return training_s(run.rows)


def _rate_bar(row: ReportRow, style: Style) -> Bar:
    rate = row.figures.tokens_per_s if row.figures else None
    if rate is None:
        return Bar(row.name, None, "no figure", style)
    return Bar(
        row.name, rate.median, f"{rate.median:,.0f} ± {rate.spread / 2:.0%}", style, rate.low, rate.high
    )


def _memory_bar(row: ReportRow, style: Style) -> Bar:
    memory = row.figures.peak_memory_gib if row.figures else None
    return Bar(row.name, memory, "no figure" if memory is None else f"{memory:.2f}", style)


_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --faint: #595959; --grid: #e3e3e3; --paper: #ffffff; --card: #ffffff;
  --back: #f4f4f4; --bad: #a63a00; --good: #00664b; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --faint: #a8a8a8; --grid: #3a3a3a; --paper: #1c1c1c;
  --card: #1c1c1c; --back: #111111; --bad: #ff9a5c; --good: #4fd3ab; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 1rem clamp(0.75rem, 3vw, 2.5rem) 3rem; background: var(--back); color: var(--ink);
  font: 15px/1.45 Helvetica, Arial, "Liberation Sans", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; margin: 0.5rem 0 0.2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 1.6rem 0 0.5rem; }
p { margin: 0.2rem 0; max-width: 75ch; overflow-wrap: anywhere; }
.faint { color: var(--faint); }
.card { background: var(--card); border: 1px solid var(--grid); border-radius: 6px; }
.scroll { overflow-x: auto; }
:focus-visible { outline: 3px solid #56b4e9; outline-offset: 2px; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: 0.5rem 0.55rem; color: var(--faint); }
th, td { padding: 0.4rem 0.55rem; text-align: left; vertical-align: top; border-top: 1px solid var(--grid); white-space: nowrap; }
thead th { font-weight: 600; vertical-align: bottom; white-space: normal; }
tbody th { font-weight: 600; position: sticky; left: 0; background: var(--card); max-width: 20rem; white-space: normal;
  overflow-wrap: anywhere; min-width: 8rem; }
td.number, th.number { text-align: right; }
ul.reasons { margin: 0.7rem 0; padding-left: 1.2rem; max-width: 95ch; overflow-wrap: anywhere; }
small { color: var(--faint); font-size: 0.8em; }
.bad { color: var(--bad); } .good { color: var(--good); }
.charts { display: grid; gap: 0.9rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr));
  align-items: start; }
figure { margin: 0; padding: 0.5rem; }
figure svg { width: 100%; height: auto; display: block; max-width: 640px; margin: 0 auto; }
ul.legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; list-style: none; margin: 0 0 0.7rem; padding: 0; }
.legend li { overflow-wrap: anywhere; }
"""  # noqa: E501
_NOTHING = Figures(0, None, None, None, None, None, None, {})
_GOOD, _BAD = ("finished",), ("failed", "refused")


def make_page(report: SweepReport) -> str:
    """The whole document."""
    counts = {
        state: sum(row.state == state for row in report.rows)
        for state in dict.fromkeys(row.state for row in report.rows)
    }
    told = ", ".join(f"{count} {state}" for state, count in counts.items())
    name = escape(report.name)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{name}: {len(report.rows)} runs</title>",
            f"<style>{_STYLE}{_signs(len(report.rows))}</style>",
            "</head>",
            "<body>",
            "<main>",
            f"<h1>{name}</h1>",
            f"<p>{len(report.rows)} runs of {escape(report.config)}: {told}.</p>",
            f'<p class="faint">What differs: {escape(", ".join(report.keys) or "nothing but chance")}. '
            "Devices: "
            f"{escape(', '.join(_devices(report)) or 'not known yet')}.</p>",
            "<h2>Runs</h2>",
            _table(report),
            _reasons(report),
            "<h2>Charts</h2>",
            _legend(report),
            '<div class="charts">',
            *_figures(report),
            "</div>",
            _notes(),
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _devices(report: SweepReport) -> list[str]:
    return list(dict.fromkeys(row.device for row in report.rows if row.device))


def _table(report: SweepReport) -> str:
    exposed = any(row.exposed_share is not None for row in report.rows)
    head = [
        ("run", ""),
        *((key, "") for key in report.keys),
        ("state", ""),
        ("step", "number"),
        ("loss", "number"),
        ("eval loss", "number"),
        ("tokens/s", "number"),
        ("step time, s", "number"),
        ("peak memory, GiB", "number"),
        *([("exposed", "number")] if exposed else []),
    ]
    cells = "".join(f'<th scope="col"{_class(kind)}>{_breakable(words)}</th>' for words, kind in head)
    rows = "\n".join(_table_row(number, row, report, exposed) for number, row in enumerate(report.rows))
    return (
        f'<div class="card scroll" role="region" aria-label="Table of runs" tabindex="0">\n<table>\n'
        "<caption>Rates and times: median after the warm-up, ± half of the distance between the "
        "quartiles.</caption>\n"
        f"<thead><tr>{cells}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n</div>"
    )


def _table_row(number: int, row: ReportRow, report: SweepReport, exposed: bool) -> str:
    figures = row.figures or _NOTHING
    step = f"{figures.step}" + (f"/{row.steps_asked}" if row.steps_asked else "")
    cells = [_cell(escape(row.varied[key])) for key in report.keys]
    cells += [_cell(_state_words(row)), _cell(step, "number")]
    cells += [_cell(_loss_words(value), "number") for value in (figures.loss, figures.eval_loss)]
    cells.append(_cell(_rate_words(figures.tokens_per_s, 0), "number"))
    cells.append(
        _cell(_rate_words(figures.step_time_s, 3) + _predicted_words(figures, "step_time_s"), "number")
    )
    memory = "" if figures.peak_memory_gib is None else f"{figures.peak_memory_gib:,.2f}"
    cells.append(_cell(memory + _predicted_words(figures, "peak_memory_gib"), "number"))
    if exposed:
        cells.append(_cell("" if row.exposed_share is None else f"{row.exposed_share:.1%}", "number"))
    return f'<tr><th scope="row" class="r{number}">{escape(row.name)}</th>{"".join(cells)}</tr>'


def _breakable(key: str) -> str:
    """A long key may go over several lines, at its dots and underscores."""
    return escape(key).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _cell(words: str, kind: str = "") -> str:
    return f"<td{_class(kind)}>{words}</td>"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _state_words(row: ReportRow) -> str:
    return f'<span class="{_state_kind(row)}">{row.state}</span>'


def _state_kind(row: ReportRow) -> str:
    return "good" if row.state in _GOOD else "bad" if row.state in _BAD else "faint"


def _loss_words(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if math.isfinite(value) else '<span class="bad">not finite</span>'


def _rate_words(rate: Rate | None, digits: int) -> str:
    return "" if rate is None else f"{rate.median:,.{digits}f} <small>± {rate.spread / 2:.0%}</small>"


def _predicted_words(figures: Figures, name: str) -> str:
    """On a line of its own."""
    if name not in figures.predicted:
        return ""
    error = figures.error_of(name)
    beside = "" if error is None else f" ({error:+.0%})"
    return f"<br><small>predicted {figures.predicted[name]:.3g}{beside}</small>"


def _reasons(report: SweepReport) -> str:
    """Why runs have not finished, in full; "" where all have."""
    items = [
        f"<li><strong>{escape(row.name)}</strong> {_state_words(row)}: {escape(row.reason)}</li>"
        for row in report.rows
        if row.reason
    ]
    return f'<ul class="reasons">{"".join(items)}</ul>' if items else ""


def _legend(report: SweepReport) -> str:
    items = (f'<li class="r{number}">{escape(row.name)}</li>' for number, row in enumerate(report.rows))
    return f'<ul class="legend" aria-label="Signs of the runs">{"".join(items)}</ul>'


def _signs(count: int) -> str:
    """Each run's colour and marker, before its name wherever it stands."""
    styles = enumerate(map(style_of, range(count)))
    return "\n".join(
        f'.r{number}::before {{ content: "{SIGNS[style.marker]} "; color: {style.color}; }}'
        for number, style in styles
    )


def _figures(report: SweepReport) -> Iterator[str]:
    for title, figure in draw_charts(report.rows).items():
        svg = to_svg(figure).replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
        yield f'<figure class="card">{svg}</figure>'


def _notes() -> str:
    return (
        '<p class="faint">Loss against time counts the steps themselves, without start, evaluations and '
        "checkpoints. "
        "Predicted: by the planner; figures for tiny or eager models on a CPU are outside what it is fitted "
        "for. A cross "
        "above a curve is a step whose loss was not finite.</p>"
    )
