"""A comparison for people, and as plain data."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from meshwright.tools.command import format_table
from meshwright.tools.compare.comparison import Comparison, CurveDifference
from meshwright.tools.run_figures import Figures, Rate

SHOWN = 40  # lines of a config's or a plan's differences


def as_text(comparison: Comparison) -> str:
    """The verdict first, then what it rests on."""
    a, b = comparison.a, comparison.b
    lines = [comparison.verdict, f"  first:  {a.folder}", f"  second: {b.folder}", ""]
    lines += [format_table(("", "first", "second", "second / first"), _side_by_side(*comparison.figures)), ""]
    lines += [f"data: {comparison.data}", *(_curve_words(curve) for curve in comparison.curves)]
    for title, found in (("config", comparison.config), ("plan", comparison.plan)):
        lines += [
            f"{title}: {'no difference' if not found else ''}".rstrip(),
            *(f"- {line}" for line in found[:SHOWN]),
        ]
        if len(found) > SHOWN:
            lines.append(f"- and {len(found) - SHOWN} more")
    return "\n".join([*lines, *comparison.notes])


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Plain data; null for what was not finite or not measured, and `largest_difference` null where only one
    is finite."""
    return {
        "a": str(comparison.a.folder),
        "b": str(comparison.b.folder),
        "same": comparison.same,
        "verdict": comparison.verdict,
        "band": comparison.band and comparison.band.name,
        "steps": len(comparison.steps),
        "data": {"first_step_that_differs": comparison.other_data, "words": comparison.data},
        "curves": {curve.key: _curve_json(curve) for curve in comparison.curves},
        "not_compared": dict(comparison.missing),
        "figures": {
            name: _figures_json(figures) for name, figures in zip("ab", comparison.figures, strict=True)
        },
        "config": list(comparison.config),
        "plan": list(comparison.plan),
        "notes": list(comparison.notes),
    }


def _curve_words(curve: CurveDifference) -> str:
    if curve.first is None:
        return f"{curve.key}: equal at all {curve.steps} steps"
    step, one, other = curve.first
    at, most = curve.largest
    apart = f"by {most:.3g}" if math.isfinite(most) else "where only one is finite"
    beyond = (
        f"; beyond the band from step {curve.beyond} on" if curve.beyond is not None else "; within the band"
    )
    return (
        f"{curve.key}: first differs at step {step} ({one:.6g} and {other:.6g}), most at step {at}, "
        f"{apart}{beyond}"
    )


def _curve_json(curve: CurveDifference) -> dict[str, Any]:
    first = curve.first and {
        "step": curve.first[0],
        "a": _finite(curve.first[1]),
        "b": _finite(curve.first[2]),
    }
    return {
        "steps": curve.steps,
        "first_difference": first,
        "largest_step": curve.largest[0],
        "largest_difference": _finite(curve.largest[1]),
        "first_step_beyond_band": curve.beyond,
        "rtol": curve.tolerance.rtol,
        "atol": curve.tolerance.atol,
    }


def _side_by_side(a: Figures, b: Figures) -> list[tuple[str, str, str, str]]:
    rows: list[tuple[str, Callable[[Figures], float | None], str]] = [
        ("last step", lambda f: f.step, ",.0f"),
        ("loss", lambda f: f.loss, ".4f"),
        ("eval loss", lambda f: f.eval_loss, ".4f"),
        ("tokens/s", lambda f: _median(f.tokens_per_s), ",.0f"),
        ("step time, s", lambda f: _median(f.step_time_s), ".4g"),
        ("peak memory, GiB", lambda f: f.peak_memory_gib, ".2f"),
        ("MFU", lambda f: f.mfu, ".1%"),
    ]
    return [
        _beside(words, read(a), read(b), form)
        for words, read, form in rows
        if read(a) is not None or read(b) is not None
    ]


def _beside(words: str, a: float | None, b: float | None, form: str) -> tuple[str, str, str, str]:
    ratio = (
        f"{b / a:.3f}"
        if a and b is not None and math.isfinite(a) and math.isfinite(b) and words != "last step"
        else ""
    )
    return words, _number(a, form), _number(b, form), ratio


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form) if math.isfinite(value) else "not finite"


def _median(rate: Rate | None) -> float | None:
    return None if rate is None else rate.median


def _figures_json(figures: Figures) -> dict[str, Any]:
    return {
        "step": figures.step,
        "loss": _finite(figures.loss),
        "eval_loss": _finite(figures.eval_loss),
        "tokens_per_s": _median(figures.tokens_per_s),
        "step_time_s": _median(figures.step_time_s),
        "peak_memory_gib": figures.peak_memory_gib,
        "mfu": figures.mfu,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def summary(comparisons: Sequence[Comparison]) -> str:
    """Of several runs against the first, a line for each."""
    return "\n".join(f"{comparison.b.folder}: {comparison.verdict}" for comparison in comparisons)
