"""What a run has come to in a few figures: loss, rate, time and memory, and what was predicted of them."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.tools.run_folder import Row, RunFolder, series

# not counted in rates: compilation, caches and allocators settle in the first ones, as in tools.bench
WARM_UP_STEPS = 4
PREDICTED = ("step_time_s", "peak_memory_gib")  # what the planner predicts, by the names of a row


@dataclass(frozen=True)
class Rate:
    """Median over reports after the warm-up, and half of them lie between `low` and `high` (the
    quartiles)."""

    median: float
    low: float
    high: float
    reports: int

    @property
    def spread(self) -> float:
        """(high - low) / median; 0 where the median is."""
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Figures:
    """Of one run; None where no row says it, NaN where it was not finite.

    Args:
        step: the last one reported
        loss, eval_loss: the last ones
        tokens_per_s: over all processes
        step_time_s: of an optimizer step
        peak_memory_gib: of the fullest process
        predicted: what a planner has predicted, by the names of `PREDICTED`
    """

    step: int
    loss: float | None
    eval_loss: float | None
    tokens_per_s: Rate | None
    step_time_s: Rate | None
    peak_memory_gib: float | None
    mfu: float | None
    predicted: Mapping[str, float]

    def measured(self, name: str) -> float | None:
        """The figure that belongs to a predicted one."""
        if name == "step_time_s":
            return self.step_time_s.median if self.step_time_s else None
        return self.peak_memory_gib

    def error_of(self, name: str) -> float | None:
        """How far what was predicted lies beside what was measured: (predicted - measured) / measured."""
        measured = self.measured(name)
        return self.predicted[name] / measured - 1 if name in self.predicted and measured else None


def figures_of(run: RunFolder, predicted: Mapping[str, float] | None = None) -> Figures:
    """Of a run's rows. `predicted`: where its own rows say nothing of that."""
    counted = warmed_up(run.rows)
    memory = series(run.rows, "peak_memory_gib")
    own = {
        name: values[max(values)] for name in PREDICTED if (values := series(run.rows, f"predicted_{name}"))
    }
    mfu = [value for value in series(counted, "mfu").values() if math.isfinite(value)]
    return Figures(
        step=max(run.steps, default=0),
        loss=_last(series(run.rows, "loss")),
        eval_loss=_last(series(run.rows, "eval_loss")),
        tokens_per_s=_rate(series(counted, "tokens_per_s")),
        step_time_s=_rate(series(counted, "step_time_s")),
        peak_memory_gib=max((value for value in memory.values() if math.isfinite(value)), default=None),
        mfu=statistics.median(mfu) if mfu else None,
        predicted={**(predicted or {}), **own},
    )


def warmed_up(rows: Mapping[int, Row]) -> dict[int, Row]:
    """Rows whose rates count: without the first report, whose steps include compiling, and the first
    WARM_UP_STEPS steps; all there are where that leaves none."""
    reported = [step for step, row in rows.items() if "step_time_s" in row]
    counted = [step for step in reported[1:] if step > WARM_UP_STEPS] or reported[-1:]
    return {step: rows[step] for step in counted}


def _rate(values: Mapping[int, float]) -> Rate | None:
    finite = sorted(value for value in values.values() if math.isfinite(value))
    if not finite:
        return None
    low, middle, high = (
        statistics.quantiles(finite, n=4, method="inclusive") if len(finite) > 1 else [finite[0]] * 3
    )
    return Rate(middle, low, high, len(finite))


def _last(values: Mapping[int, float]) -> float | None:
    return values[max(values)] if values else None
