"""A sweep's report as one HTML page that stands alone (no script, nothing from elsewhere), with charts: loss
against tokens and time, rate, memory, and predicted against measured."""

from collections import Counter

from meshwright.parallel.planner.timeline_plot import to_svg
from meshwright.tools.charts import MARKERS, Bar, Curve, draw_bars, draw_curves, draw_errors, style_of
from meshwright.tools.run_reader import Figures, Rate, number_words, series, tokens_per_step, training_s
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
<p>{{ report.rows | length }} runs of {{ report.config }}: {{ told }}. What differs:
{{ report.keys | join(", ") or "nothing but chance" }}. Devices: {{ devices or "not known yet" }}.</p>
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
<p>Rates and times: median after the warm-up, ± half of the distance between the quartiles. Predicted: by the
planner; figures for tiny or eager models on a CPU are outside what it is fitted for. Loss against time counts
the steps themselves, without start, evaluations and checkpoints. A cross: a loss that was not finite.</p>
<div class="charts">{% for title, svg in charts %}
<figure role="img" aria-label="{{ title }}">{{ svg | safe }}</figure>
{% endfor %}</div></body></html>
"""
SIGNS = dict(zip(MARKERS, "●■▲◆★", strict=True))
ERRORS = {"step_time_s": "step time", "peak_memory_gib": "memory"}
NOTHING = Figures(0, None, None, None, None, None, None, {})


def make_page(report: SweepReport) -> str:
    """The whole document; names and reasons, in which anything can stand, are escaped."""
    from jinja2 import Environment

    cells = {row.name: _cells(row) for row in report.rows}
    page = Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
    return page.render(
        report=report,
        told=", ".join(f"{n} {state}" for state, n in Counter(row.state for row in report.rows).items()),
        devices=", ".join(dict.fromkeys(row.device for row in report.rows if row.device)),
        head=[name for name in _cells(report.rows[0]) if any(one[name] for one in cells.values())],
        cells=cells,
        signs=[(SIGNS[style.marker], style.color) for style in map(style_of, range(len(report.rows)))],
        charts=draw_charts(report),
    )


def _cells(row: ReportRow) -> dict[str, str]:
    """What is known of a run, by the words over its column."""
    found = row.figures or NOTHING
    return dict(row.varied) | {
        "state": row.state,
        "step": f"{found.step}" + (f"/{row.steps_asked}" if row.steps_asked else ""),
        "loss": number_words(found.loss, ".4f"),
        "eval loss": number_words(found.eval_loss, ".4f"),
        "tokens/s": _rate(found.tokens_per_s, ",.0f"),
        "step time, s": _rate(found.step_time_s, ".3f"),
        "predicted step time": _predicted(found, "step_time_s"),
        "peak memory, GiB": number_words(found.peak_memory_gib, ",.2f"),
        "predicted memory": _predicted(found, "peak_memory_gib"),
    }


def _rate(rate: Rate | None, form: str) -> str:
    return "" if rate is None else f"{rate.median:{form}} ± {rate.spread / 2:.0%}"


def _predicted(found: Figures, name: str) -> str:
    value, error = found.predicted.get(name), number_words(found.error_of(name), "+.0%")
    return number_words(value, ".3g") + (f" ({error})" if error else "")


def draw_charts(report: SweepReport) -> list[tuple[str, str]]:
    """Titles and SVG of all of them, in the order in which one asks."""
    by_tokens, by_time, rates, memory = list[Curve](), list[Curve](), list[Bar](), list[Bar]()
    for number, row in enumerate(report.rows):
        found, style = row.figures or NOTHING, style_of(number)
        # The evaluation before training has no loss; where no time or tokens are known, a step has no place.
        losses = series(row.run.rows, "loss") if row.run else {}
        tokens, times = (tokens_per_step(row.run), training_s(row.run.rows)) if row.run else (None, {})
        by_tokens.append(Curve([(step * tokens, y) for step, y in losses.items() if tokens], style))
        by_time.append(Curve([(times[step], y) for step, y in losses.items() if step in times], style))
        gib, rate = found.peak_memory_gib, found.tokens_per_s
        memory.append(Bar(row.name, gib, number_words(gib, ",.2f") or "no figure", style))
        median, low, high = (rate.median, rate.low, rate.high) if rate else (None, None, None)
        rates.append(Bar(row.name, median, _rate(rate, ",.0f") or "no figure", style, low, high))
    charts = [
        draw_curves("Loss against tokens", "tokens", by_tokens),
        draw_curves("Loss against time", "seconds of training steps", by_time),
        draw_bars("Tokens/s, of all processes: median and quartiles", rates),
        draw_bars("Peak memory per process, GiB", memory),
    ]
    known = {row.name: row.figures for row in report.rows if row.figures and row.figures.predicted}
    errors = {words: [one.error_of(key) for one in known.values()] for key, words in ERRORS.items()}
    charts += [draw_errors("Predicted against measured", [*known], errors)] if known else []
    return [(chart.axes[0].get_title("left"), to_svg(chart)) for chart in charts]
