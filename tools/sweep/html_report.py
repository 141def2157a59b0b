"""A sweep's report as one self-contained HTML page, without scripts or external files. Charts: loss
against tokens and time, throughput, memory, predicted against measured."""

from collections import Counter

from meshwright.parallel.planner.timeline_plot import to_svg
from meshwright.tools.charts import MARKERS, Bar, Curve, draw_bars, draw_curves, draw_errors, style_of
from meshwright.tools.run_reader import Figures, Rate, format_number, series, tokens_per_step, training_s
from meshwright.tools.sweep.results import ReportRow, SweepReport

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ report.name }}: {{ report.rows | length }} runs</title><style>
:root { color-scheme: light; }
body { margin: 1rem 3vw; font: 15px/1.45 sans-serif; overflow-wrap: anywhere; } .table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 0.4rem 0.5rem; text-align: left; vertical-align: top; border-bottom: 1px solid #ccc; }
tbody th { position: sticky; left: 0; background: white; min-width: 8rem; overflow-wrap: anywhere; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); }
figure { margin: 0; } svg { width: 100%; height: auto; max-width: 640px; } td { white-space: nowrap; }
.failed, .refused { color: #a63a00; } .finished { color: #00664b; }
{% for sign, color in signs %}
.run{{ loop.index }}::before { content: "{{ sign }}\\a0"; color: {{ color }}; }
{% endfor %}
</style></head><body><h1>{{ report.name }}</h1>
<p>{{ report.rows | length }} runs of {{ report.config }}: {{ counts }}. Varied keys:
{{ report.keys | join(", ") or "none" }}. Devices: {{ devices or "not known yet" }}.</p>
<div class="table" role="region" aria-label="Table of runs" tabindex="0"><table>
<thead><tr><th scope="col">run</th>{% for key in head %}
<th scope="col">{{ key | e | replace(".", ".<wbr>" | safe) | replace("_", "_<wbr>" | safe) }}</th>
{% endfor %}</tr></thead><tbody>
{% for row in report.rows %}
<tr><th scope="row" class="run{{ loop.index }}">{{ row.name }}</th>
{% for key in head %}
<td class="{{ row.state if key == "state" }}">{{ cells[row.name][key] }}</td>
{% endfor %}</tr>
{% endfor %}</tbody></table></div>
<ul>{% for row in report.rows if row.reason %}
<li><b>{{ row.name }}</b> <span class="{{ row.state }}">{{ row.state }}</span>: {{ row.reason }}</li>
{% endfor %}</ul>
<p>Rates and times: median after warm-up, ± half the interquartile range. Predicted: by the planner, which is
not calibrated for tiny or eager models on a CPU. Loss against time counts step times only, without startup,
evaluation and checkpoints. A cross marks a loss that was not finite.</p>
<div class="charts">{% for title, svg in charts %}
<figure role="img" aria-label="{{ title }}">{{ svg | safe }}</figure>
{% endfor %}</div></body></html>
"""
SIGNS = dict(zip(MARKERS, "●■▲◆★", strict=True))
ERRORS = {"step_time_s": "step time", "peak_memory_gib": "memory"}
NOTHING = Figures(0, None, None, None, None, None, None, {})


def make_page(report: SweepReport) -> str:
    """Return the HTML document. Names and reasons, which may contain any text, are escaped."""
    from jinja2 import Environment

    cells = {row.name: _cells(row) for row in report.rows}
    page = Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
    return page.render(
        report=report,
        counts=", ".join(f"{n} {state}" for state, n in Counter(row.state for row in report.rows).items()),
        devices=", ".join(dict.fromkeys(row.device for row in report.rows if row.device)),
        head=[name for name in _cells(report.rows[0]) if any(row[name] for row in cells.values())],
        cells=cells,
        signs=[(SIGNS[style.marker], style.color) for style in map(style_of, range(len(report.rows)))],
        charts=draw_charts(report),
    )


def _cells(row: ReportRow) -> dict[str, str]:
    """Return the cells of a run's row by column title."""
    figures = row.figures or NOTHING
    return dict(row.varied) | {
        "state": row.state,
        "step": f"{figures.step}" + (f"/{row.steps_asked}" if row.steps_asked else ""),
        "loss": format_number(figures.loss, ".4f"),
        "eval loss": format_number(figures.eval_loss, ".4f"),
        "tokens/s": _rate(figures.tokens_per_s, ",.0f"),
        "step time, s": _rate(figures.step_time_s, ".3f"),
        "predicted step time": _predicted(figures, "step_time_s"),
        "peak memory, GiB": format_number(figures.peak_memory_gib, ",.2f"),
        "predicted memory": _predicted(figures, "peak_memory_gib"),
    }


def _rate(rate: Rate | None, form: str) -> str:
    return "" if rate is None else f"{rate.median:{form}} ± {rate.spread / 2:.0%}"


def _predicted(figures: Figures, name: str) -> str:
    value, error = figures.predicted.get(name), format_number(figures.error_of(name), "+.0%")
    return format_number(value, ".3g") + (f" ({error})" if error else "")


def draw_charts(report: SweepReport) -> list[tuple[str, str]]:
    """Return title and SVG of every chart."""
    by_tokens, by_time, rates, memory = list[Curve](), list[Curve](), list[Bar](), list[Bar]()
    for number, row in enumerate(report.rows):
        summary, style = row.figures or NOTHING, style_of(number)
        # The evaluation before training has no loss. A step without known time or tokens is not drawn.
        losses = series(row.run.rows, "loss") if row.run else {}
        tokens, times = (tokens_per_step(row.run), training_s(row.run.rows)) if row.run else (None, {})
        by_tokens.append(Curve([(step * tokens, y) for step, y in losses.items() if tokens], style))
        by_time.append(Curve([(times[step], y) for step, y in losses.items() if step in times], style))
        gib, rate = summary.peak_memory_gib, summary.tokens_per_s
        memory.append(Bar(row.name, gib, format_number(gib, ",.2f") or "no figure", style))
        median, low, high = (rate.median, rate.low, rate.high) if rate else (None, None, None)
        rates.append(Bar(row.name, median, _rate(rate, ",.0f") or "no figure", style, low, high))
    charts = [
        draw_curves("Loss against tokens", "tokens", by_tokens),
        draw_curves("Loss against time", "seconds of training steps", by_time),
        draw_bars("Tokens/s, of all processes: median and quartiles", rates),
        draw_bars("Peak memory per process, GiB", memory),
    ]
    known = {row.name: row.figures for row in report.rows if row.figures and row.figures.predicted}
    errors = {label: [figures.error_of(key) for figures in known.values()] for key, label in ERRORS.items()}
    charts += [draw_errors("Predicted against measured", [*known], errors)] if known else []
    return [(chart.axes[0].get_title("left"), to_svg(chart)) for chart in charts]
