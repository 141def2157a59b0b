"""A sweep's charts: loss against tokens and time, rate, memory, and predicted against measured."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from meshwright.parallel.planner.plot.shapes import Picture, Shape, Text, rectangle
from meshwright.parallel.planner.plot.timeline import FAINT, GRID, INK
from meshwright.tools.plot import (
    BAR_ROW,
    BODY,
    MARK,
    SMALL,
    TOP,
    WIDTH,
    Bar,
    Curve,
    Style,
    draw_bars,
    draw_curves,
    empty_chart,
    fit_words,
    marker,
    style_of,
)
from meshwright.tools.run_figures import PREDICTED
from meshwright.tools.run_folder import RunFolder, series, tokens_per_step, training_s
from meshwright.tools.sweep.rows import ReportRow

ERROR_LEFT, ERROR_RIGHT = 20, WIDTH - 20  # of the panel of errors
ERROR_STYLES = {"step_time_s": Style("#0072b2", "circle"), "peak_memory_gib": Style("#e69f00", "square")}
ERROR_WORDS = {"step_time_s": "step time", "peak_memory_gib": "memory"}
MOST_ERROR = 1.0  # shown; a worse one is painted at the edge, and its figure beside it says it


def draw_charts(rows: Sequence[ReportRow]) -> list[Picture]:
    """All of them, in the order in which one asks."""
    styles = [style_of(number) for number in range(len(rows))]
    pairs = list(zip(rows, styles, strict=True))
    by_tokens, by_time = (
        [_loss_curve(row, style, place) for row, style in pairs] for place in (_tokens, _seconds)
    )
    charts = [
        draw_curves("Loss against tokens", "tokens", by_tokens),
        draw_curves("Loss against time", "seconds of training steps", by_time),
        draw_bars(
            "Tokens/s, of all processes: median and quartiles",
            [_rate_bar(row, style) for row, style in pairs],
        ),
        draw_bars("Peak memory per process, GiB", [_memory_bar(row, style) for row, style in pairs]),
    ]
    predicted = [
        row
        for row in rows
        if row.figures and any(row.figures.error_of(name) is not None for name in PREDICTED)
    ]
    return [*charts, draw_errors(predicted)] if predicted else charts


def draw_errors(rows: Sequence[ReportRow]) -> Picture:
    """A row for each run: how far what was predicted lies below (left) or above what was measured."""
    title = "Predicted against measured"
    errors = [[row.figures.error_of(name) if row.figures else None for name in PREDICTED] for row in rows]
    known = [abs(error) for pair in errors for error in pair if error is not None]
    if not known:
        return empty_chart(title)
    most = min(max(0.1, math.ceil(max(known) * 10) / 10), MOST_ERROR)
    shapes: list[Shape] = [Text(8, 20, title, BODY, INK, bold=True), *_error_legend()]
    bottom = TOP + 14 + len(rows) * BAR_ROW
    for share in (-most, -most / 2, 0.0, most / 2, most):
        x = _error_x(share, most)
        shapes.append(rectangle(x - 0.5, TOP + 14, 1, bottom - TOP - 14, FAINT if share == 0 else GRID))
        words = "as measured" if share == 0 else f"{share:+.0%}"
        shapes.append(Text(x, bottom + 15, words, SMALL, FAINT, "middle"))
    for number, (row, pair) in enumerate(zip(rows, errors, strict=True)):
        shapes += _error_row(row.name, pair, most, TOP + 14 + number * BAR_ROW)
    return Picture(WIDTH, round(bottom + 26), tuple(shapes))


def _error_legend() -> Iterator[Shape]:
    x = 14.0
    for name in PREDICTED:
        yield marker((x, TOP), ERROR_STYLES[name])
        yield Text(x + 9, TOP + 4, ERROR_WORDS[name], SMALL, INK)
        x += 90


def _error_row(name: str, errors: Sequence[float | None], most: float, top: float) -> Iterator[Shape]:
    pairs = [(key, error) for key, error in zip(PREDICTED, errors, strict=True) if error is not None]
    words = ", ".join(f"{ERROR_WORDS[key]} {error:+.0%}" for key, error in pairs)
    yield Text(8, top + 11, fit_words(name, SMALL, WIDTH - 190), SMALL, FAINT)
    yield Text(WIDTH - 8, top + 11, words, SMALL, INK, "end")
    middle = _error_x(0.0, most)
    for number, (key, error) in enumerate(pairs):
        x, y = _error_x(max(-most, min(error, most)), most), top + 17 + 7 * number
        yield rectangle(min(x, middle), y - 1, abs(x - middle), 2, ERROR_STYLES[key].color)
        about = f"{name}: predicted {ERROR_WORDS[key]} lies {error:+.1%} beside the measured"
        yield marker((x, y), ERROR_STYLES[key], about, MARK - 0.5)


def _error_x(share: float, most: float) -> float:
    return (ERROR_LEFT + ERROR_RIGHT) / 2 + share / most * (ERROR_RIGHT - ERROR_LEFT) / 2


def _loss_curve(row: ReportRow, style: Style, place: Callable[[RunFolder], Mapping[int, float]]) -> Curve:
    """A curve of the rows that were trained; the evaluation before training is not among them."""
    if row.run is None:
        return Curve(row.name, (), style)
    losses, places = series(row.run.rows, "loss"), place(row.run)
    return Curve(row.name, [(places[step], loss) for step, loss in losses.items() if step in places], style)


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
