"""A sweep's results as one self-contained HTML page, without scripts or external files: the verdict, the
runs from the best to the worst, and charts."""

from collections import Counter

from meshwright.parallel.planner.timeline_plot import to_svg
from meshwright.tools.charts import MARKERS, Bar, Curve, draw_bars, draw_curves, style_of
from meshwright.tools.run_reader import format_number, series, tokens_per_step, training_s
from meshwright.tools.sweep.results import BEST, SweepResults, rate_text

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ sweep.name }}: {{ sweep.runs | length }} runs</title><style>
:root { color-scheme: light; }
body { margin: 1rem 3vw; font: 15px/1.45 sans-serif; overflow-wrap: anywhere; } .table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 0.4rem 0.5rem; text-align: left; vertical-align: top; border-bottom: 1px solid #ccc; }
tbody th { position: sticky; left: 0; background: white; min-width: 8rem; overflow-wrap: anywhere; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); }
figure { margin: 0; } svg { width: 100%; height: auto; max-width: 640px; } td { white-space: nowrap; }
li { white-space: pre-line; }
.failed, .refused { color: #a63a00; } .finished { color: #00664b; }
{% for sign, color in signs %}
.run{{ loop.index }}::before { content: "{{ sign }}\\a0"; color: {{ color }}; }
{% endfor %}
</style></head><body><h1>{{ sweep.name }}</h1>
<p><b>{{ sweep.verdict }}</b></p>
<p>{{ sweep.runs | length }} runs of {{ sweep.spec.config }}, by {{ best }}: {{ counts }}. Varied keys:
{{ sweep.runs[0].varied | join(", ") or "none" }}. Devices: {{ devices or "not known yet" }}.</p>
<div class="table" role="region" aria-label="Table of runs" tabindex="0"><table>
<thead><tr><th scope="col">run</th>{% for key in head %}
<th scope="col">{{ key | e | replace(".", ".<wbr>" | safe) | replace("_", "_<wbr>" | safe) }}</th>
{% endfor %}</tr></thead><tbody>
{% for row in sweep.runs %}
<tr><th scope="row" class="run{{ loop.index }}">{{ row.run.name }}</th>
{% for key in head %}
<td class="{{ row.state if key == "state" }}">{{ cells[row.run.name][key] }}</td>
{% endfor %}</tr>
{% endfor %}</tbody></table></div>
<ul>{% for row in sweep.runs if row.reason %}
<li><b>{{ row.run.name }}</b> <span class="{{ row.state }}">{{ row.state }}</span>: {{ row.reason }}</li>
{% endfor %}</ul>
<p>Rates and times: median after warm-up, ± half the interquartile range within the run; runs of the same
variant may differ by more. Loss against time counts step times only, without startup, evaluation and
checkpoints. A cross marks a loss that was not finite.</p>
<div class="charts">{% for title, svg in charts %}
<figure role="img" aria-label="{{ title }}">{{ svg | safe }}</figure>
{% endfor %}</div></body></html>
"""
SIGNS = dict(zip(MARKERS, "●■▲◆★", strict=True))


def make_page(sweep: SweepResults) -> str:
    """Return the HTML document. Names and reasons, which may contain any text, are escaped."""
    from jinja2 import Environment

    cells = {row.run.name: {**row.varied, "state": row.state, **row.texts()} for row in sweep.runs}
    page = Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
    return page.render(
        sweep=sweep,
        best=BEST[sweep.spec.best][1],
        counts=", ".join(f"{n} {state}" for state, n in Counter(row.state for row in sweep.runs).items()),
        devices=", ".join(dict.fromkeys(row.device for row in sweep.runs if row.device)),
        head=[name for name in next(iter(cells.values())) if any(row[name] for row in cells.values())],
        cells=cells,
        signs=[(SIGNS[style.marker], style.color) for style in map(style_of, range(len(sweep.runs)))],
        charts=draw_charts(sweep),
    )


def draw_charts(sweep: SweepResults) -> list[tuple[str, str]]:
    """Return title and SVG of every chart."""
    by_tokens, by_time, rates, memory = list[Curve](), list[Curve](), list[Bar](), list[Bar]()
    for number, row in enumerate(sweep.runs):
        style, rows = style_of(number), row.folder.rows if row.folder else {}
        # The evaluation before training has no loss. A step without known time or tokens is not drawn.
        losses, times = series(rows, "loss"), training_s(rows)
        tokens = tokens_per_step(row.folder) if row.folder else None
        by_tokens.append(Curve([(step * tokens, y) for step, y in losses.items() if tokens], style))
        by_time.append(Curve([(times[step], y) for step, y in losses.items() if step in times], style))
        gib, rate = row.figures.peak_memory_gib, row.figures.tokens_per_s
        memory.append(Bar(row.run.name, gib, format_number(gib, ",.2f") or "no figure", style))
        median, low, high = (rate.median, rate.low, rate.high) if rate else (None, None, None)
        rates.append(Bar(row.run.name, median, rate_text(rate, ",.0f") or "no figure", style, low, high))
    charts = [
        draw_curves("Loss against tokens", "tokens", by_tokens),
        draw_curves("Loss against time", "seconds of training steps", by_time),
        draw_bars("Tokens/s, of all processes: median and quartiles", rates),
        draw_bars("Peak memory per process, GiB", memory),
    ]
    return [(chart.axes[0].get_title("left"), to_svg(chart)) for chart in charts]
