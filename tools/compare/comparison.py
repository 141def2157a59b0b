"""Compare two runs: data, curves, configs and plans, the tolerance bands, and a one-line verdict on
whether they are the same training."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.parallel.plan.serialize import diff_plans
from meshwright.tools.run_reader import Figures, RunFolder, changed_keys, describe_changes, figures_of, series
from meshwright.train.errors import ConfigError

CURVES = ("loss", "grad_norm", "eval_loss")  # as named in a row
REDUCED = ("bfloat16", "float8")


@dataclass(frozen=True)
class Tolerance:
    """Two values agree if they differ by at most atol + rtol x the absolute value of the first."""

    rtol: float
    atol: float

    def allows(self, a: float, b: float) -> bool:
        """Whether two values agree. Values that are not finite agree if neither is finite."""
        return distance(a, b) <= self.width(a)

    def width(self, a: float) -> float:
        """Return the largest difference from `a` that is allowed."""
        return self.atol + (self.rtol * abs(a) if math.isfinite(a) else 0.0)


@dataclass(frozen=True)
class ToleranceBand:
    """A tolerance for each curve, and a name that completes "the same training ..."."""

    name: str
    tolerances: Mapping[str, Tolerance]


def _band(name: str, loss: Tolerance, grad_norm: Tolerance) -> ToleranceBand:
    return ToleranceBand(name, {"loss": loss, "eval_loss": loss, "grad_norm": grad_norm})


BITWISE = _band("bit for bit", Tolerance(0, 0), Tolerance(0, 0))
# The tolerance of tests/distributed/test_parity.py: every mesh, at every step, against a single process.
FLOAT32 = _band("within float32 re-ordering noise", Tolerance(0, 5e-5), Tolerance(1e-5, 0))
# Loss: the tolerance for parameters and moments stored in bfloat16 (tests/distributed/test_parity.py:
# 0.02 nats), which includes computing in it. Gradient norm: sqrt(2) times the effect of bfloat16 rounding on
# it (2.9%, derived in test_parity.py).
BFLOAT16 = _band("within bfloat16 rounding", Tolerance(0, 0.02), Tolerance(0.042, 0))


def custom_band(rtol: float, atol: float) -> ToleranceBand:
    """Return a band with the same tolerance for all curves."""
    return _band(f"within rtol {rtol:g}, atol {atol:g}", Tolerance(rtol, atol), Tolerance(rtol, atol))


def bands_for(a: RunFolder, b: RunFolder) -> tuple[ToleranceBand, ...]:
    """Return the bands from the narrowest to the widest that can explain a difference between two runs:
    bfloat16's only if one of them uses, or with auto may use, a dtype below float32."""
    low_precision = any(dtype in (*REDUCED, "auto") for dtype in [*_dtypes(a), *_dtypes(b)])
    return (BITWISE, FLOAT32, BFLOAT16) if low_precision else (BITWISE, FLOAT32)


def _dtypes(run: RunFolder) -> list[Any]:
    """Return the dtypes in which a run computes, reduces and stores, by its plan or else its config."""
    keys = ("optim.state_dtype", "parallel.param_dtype", "parallel.reduce_dtype", "parallel.storage_dtype")
    configured = [run.config.get(key, "") for key in keys]
    if run.plan is None:
        return configured
    of_units = [dtype for unit in run.plan.units for dtype in (unit.param_dtype, unit.reduce_dtype)]
    float8 = ["float8"] if run.plan.float8.linears else []
    return [configured[0], *of_units, run.plan.storage_dtype, *float8]


def distance(a: float, b: float) -> float:
    """Return the absolute difference; 0 if neither value is finite, infinite if only one is."""
    if math.isfinite(a) and math.isfinite(b):
        return abs(a - b)
    return math.inf if math.isfinite(a) or math.isfinite(b) else 0.0


@dataclass(frozen=True)
class CurveDifference:
    """How one curve of two runs differs.

    Args:
        steps: number of steps at which both have a value
        first: step and both values at the first difference; None if there is none
        largest: step and size of the largest difference, in the curve's unit; infinite if only one value is
            finite
        beyond: first step outside the widest applicable band; None if there is none
        tolerance: that band's tolerance
    """

    key: str
    steps: int
    first: tuple[int, float, float] | None
    largest: tuple[int, float]
    beyond: int | None
    tolerance: Tolerance


@dataclass(frozen=True)
class RunComparison:
    """The result of comparing two runs.

    Args:
        verdict: one line
        same: whether the data is the same and some band contains all curves
        band: the narrowest band that contains all curves; None if none does or if the data differs
        steps: the steps that both report
        missing: curves that were not compared although a run reports them, with the reason
        data: whether the runs read the same sequences, as text
        other_data: first step at which they read different sequences; None if none is known
        config, plan, notes: lines of text
    """

    a: RunFolder
    b: RunFolder
    verdict: str
    same: bool
    band: ToleranceBand | None
    bands: tuple[ToleranceBand, ...]
    steps: tuple[int, ...]
    curves: tuple[CurveDifference, ...]
    missing: Mapping[str, str]
    data: str
    other_data: int | None
    figures: tuple[Figures, Figures]
    config: tuple[str, ...]
    plan: tuple[str, ...]
    notes: tuple[str, ...]


def compare_runs(
    a: RunFolder, b: RunFolder, bands: Sequence[ToleranceBand] | None = None, until: int | None = None
) -> RunComparison:
    """Compare two runs, up to the step `until`. `bands`: from narrow to wide; by default those that suit the
    runs' dtypes. Raises ConfigError if no step or no curve is in both."""
    last = math.inf if until is None else until
    steps = tuple(step for step in a.steps if step in set(b.steps) and step <= last)
    if not steps:
        raise ConfigError(
            f"no common step: {a.folder} reports {_describe_steps(a)}, {b.folder} reports "
            f"{_describe_steps(b)}: compare runs that have logged the same steps (metrics.every)"
        )
    pairs, missing = _common_points(a, b, last)
    bands = tuple(bands or bands_for(a, b))
    curves = tuple(_difference(key, points, bands[-1].tolerances[key]) for key, points in pairs.items())
    values = [(key, x, y) for key, points in pairs.items() for _, x, y in points]
    contain = (band for band in bands if all(band.tolerances[key].allows(x, y) for key, x, y in values))
    band = next(contain, None)
    other_data, data = _compare_data(a, b, steps)
    if other_data is not None:
        band, verdict = None, f"different: the runs read different data at step {other_data}, or earlier"
    elif band is not None:
        verdict = _sameness(band, curves, len(steps), missing)
    else:
        verdict = _difference_verdict(bands[-1], curves)
    omitted = (f"{key} is not compared: {reason}" for key, reason in missing.items())
    return RunComparison(
        a,
        b,
        verdict,
        band is not None,
        band,
        bands,
        steps,
        curves,
        missing,
        data,
        other_data,
        figures=(figures_of(a), figures_of(b)),
        config=tuple(describe_changes(changed_keys(a.config, b.config))),
        plan=_plan_differences(a, b),
        notes=(*_agreement_notes(curves, steps), *omitted, *_notes(a, b, len(steps))),
    )


def _common_points(
    a: RunFolder, b: RunFolder, last: float
) -> tuple[dict[str, list[tuple[int, float, float]]], dict[str, str]]:
    """Return the curves of both runs up to step `last`, as steps with both values; and why other curves that
    a run reports cannot be compared. Raises ConfigError if no curve is in both."""
    pairs, missing = dict[str, list[tuple[int, float, float]]](), dict[str, str]()
    for key in CURVES:
        first, second = (
            {step: value for step, value in series(run.rows, key).items() if step <= last} for run in (a, b)
        )
        if common := [(step, first[step], second[step]) for step in first if step in second]:
            pairs[key] = common
        elif first or second:
            only = f"only {(a if first else b).folder} reports it"
            missing[key] = "no common step has it" if first and second else only
    if not pairs:
        raise ConfigError(
            f"no common curve: {a.folder} and {b.folder} have no step at which both have a number for "
            f"{', '.join(CURVES)}: compare runs that report one of them"
        )
    return pairs, missing


def _difference(key: str, pairs: Sequence[tuple[int, float, float]], tolerance: Tolerance) -> CurveDifference:
    first = next((pair for pair in pairs if distance(*pair[1:]) > 0), None)
    largest = max(((step, distance(x, y)) for step, x, y in pairs), key=lambda entry: entry[1])
    beyond = next((step for step, x, y in pairs if not tolerance.allows(x, y)), None)
    return CurveDifference(key, len(pairs), first, largest, beyond, tolerance)


def _compare_data(a: RunFolder, b: RunFolder, steps: Sequence[int]) -> tuple[int | None, str]:
    """Return the first step at which the runs read different sequences, and the result as text."""
    hashes = [(step, a.rows[step].get("data_hash"), b.rows[step].get("data_hash")) for step in steps]
    known = [entry for entry in hashes if entry[1] and entry[2]]
    if not known:
        return None, "not compared: no common step has a data_hash"
    changed = next((step for step, first, second in known if first != second), None)
    if changed is None:
        return None, f"the same sequences at all {len(known)} common steps that have a data_hash"
    return changed, f"different sequences at step {changed}, by data_hash" + (
        " (the first common step that has one)" if changed == known[0][0] else ""
    )


def _sameness(
    band: ToleranceBand, curves: Sequence[CurveDifference], steps: int, missing: Mapping[str, str]
) -> str:
    """Return the verdict on runs of which the band contains all curves."""
    most = ", ".join(f"{curve.key} {curve.largest[1]:.2g}" for curve in curves if curve.largest[1] > 0)
    differences = f"; largest difference: {most}" if most else ""
    known = f" in {' and '.join(curve.key for curve in curves)}" if missing else ""
    omitted = "".join(f"; {key} is not compared" for key in missing)
    return f"the same training {band.name}{known}, at {steps} steps{differences}{omitted}"


def _difference_verdict(widest: ToleranceBand, curves: Sequence[CurveDifference]) -> str:
    worst = min((curve for curve in curves if curve.beyond is not None), key=lambda curve: curve.beyond or 0)
    step, size = worst.largest
    atol, rtol = worst.tolerance.atol, worst.tolerance.rtol  # as "0.01 + 1e-05 of its size"
    allowed = [f"{atol:g}"] * bool(atol or not rtol) + [f"{rtol:.2g} of its size"] * bool(rtol)
    largest = f"largest difference at step {step}: {size:.3g}"
    return (
        f"different: at step {worst.beyond} {worst.key} is not {widest.name} ({' + '.join(allowed)}); "
        f"{largest if math.isfinite(size) else f'at step {step} only one value is finite'}"
    )


def _agreement_notes(curves: Sequence[CurveDifference], steps: Sequence[int]) -> list[str]:
    """Describe how far runs agree that differ later."""
    beyond = min((curve.beyond for curve in curves if curve.beyond is not None), default=steps[0])
    agreed = [step for step in steps if step < beyond]
    if not agreed:
        return []
    until = f"the runs agree at {len(agreed)} steps, up to step {agreed[-1]}"
    if not all(math.isfinite(curve.largest[1]) for curve in curves):  # not by rounding
        return [until]
    return [
        f"{until}. Rounding noise can grow like this from step to step, faster in an unstable training; a "
        "fault that begins late looks the same. Runs in float32 distinguish the two: their noise starts "
        "about a thousand times smaller"
    ]


def _plan_differences(a: RunFolder, b: RunFolder) -> tuple[str, ...]:
    if a.plan is not None and b.plan is not None:
        return tuple(f"{key}: {of_a} -> {of_b}" for key, (of_a, of_b) in diff_plans(a.plan, b.plan).items())
    return tuple(f"{run.folder}: {run.plan_problem}" for run in (a, b) if run.plan is None)


def _notes(a: RunFolder, b: RunFolder, common: int) -> Iterator[str]:
    """Describe the runs' irregularities: not finished, resumed, unreadable lines, losses not finite; then the
    steps that only one run reports, which are not compared."""
    for run in (a, b):
        name, status = run.folder, run.status
        if status is None:
            yield f"{name} has no status.json"
        elif status.state != "finished":
            reason = f" ({status.reason})" if status.reason else ""
            yield f"{name} is {status.state} at step {status.step}{reason}"
        if status is not None and status.resumed_from is not None:
            yield f"{name} resumed from the checkpoint of step {status.resumed_from}"
        if run.unreadable:
            yield f"{name}/metrics.jsonl has {run.unreadable} lines that are not rows; they are ignored"
        if bad := [step for step, loss in series(run.rows, "loss").items() if not math.isfinite(loss)]:
            yield f"{name} has a loss that is not finite at {len(bad)} steps, first at step {bad[0]}"
    for run in (a, b):
        if count := len(run.steps) - common:
            steps = f"it has {_describe_steps(run)}"
            yield f"{run.folder} has {count} reported steps that are not compared ({steps})"


def _describe_steps(run: RunFolder) -> str:
    steps = run.steps
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}" if steps else "no step"
