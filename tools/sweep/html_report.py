"""A sweep's results as one self-contained HTML page, without scripts or external files: the verdict, the
runs from the best to the worst, and charts."""

from collections import Counter
from pathlib import Path

from meshwright.parallel.planner.timeline_plot import to_svg
from meshwright.tools.charts import MARKERS, Bar, Curve, draw_bars, draw_curves, style_of
from meshwright.tools.run_reader import FIGURES, format_number, series, tokens_per_step, training_s
from meshwright.tools.sweep.results import SweepResults, rate_text

SIGNS = dict(zip(MARKERS, "●■▲◆★", strict=True))


def make_page(sweep: SweepResults) -> str:
    """Return the HTML document. Names and reasons, which may contain any text, are escaped."""
    from jinja2 import Environment

    cells = {row.run.name: {**row.varied, "state": row.state, **row.texts()} for row in sweep.runs}
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return (
        Environment(autoescape=True, trim_blocks=True)
        .from_string(template)
        .render(
            sweep=sweep,
            best=FIGURES[sweep.spec.best][0],
            counts=", ".join(f"{n} {state}" for state, n in Counter(row.state for row in sweep.runs).items()),
            devices=", ".join(dict.fromkeys(row.device for row in sweep.runs if row.device)),
            head=[name for name in next(iter(cells.values())) if any(row[name] for row in cells.values())],
            cells=cells,
            signs=[(SIGNS[style.marker], style.color) for style in map(style_of, range(len(sweep.runs)))],
            charts=draw_charts(sweep),
        )
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
