"""Two runs beside each other: data, curves, configs and plans, how far apart they may lie, and one sentence
that says whether they are the same training."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.tools.plan.compare import diff_plans, in_words
from meshwright.tools.run_reader import Figures, RunFolder, changed_keys, figures_of, series
from meshwright.tools.sweep.preflight import change_words
from meshwright.train.errors import ConfigError

CURVES = ("loss", "grad_norm", "eval_loss")  # what is compared, by the names in a row
REDUCED = ("bfloat16", "float8")


@dataclass(frozen=True)
class Tolerance:
    """Two values are alike where they lie no further apart than atol + rtol x the first one's size."""

    rtol: float
    atol: float

    def allows(self, a: float, b: float) -> bool:
        """Values that are not finite are alike where neither is."""
        return distance(a, b) <= self.width(a)

    def width(self, a: float) -> float:
        """How far beside `a` a value may lie."""
        return self.atol + (self.rtol * abs(a) if math.isfinite(a) else 0.0)


@dataclass(frozen=True)
class ToleranceBand:
    """A tolerance for each curve, under a name that completes "the same training ..."."""

    name: str
    tolerances: Mapping[str, Tolerance]


def _band(name: str, loss: Tolerance, grad_norm: Tolerance) -> ToleranceBand:
    return ToleranceBand(name, {"loss": loss, "eval_loss": loss, "grad_norm": grad_norm})


BITWISE = _band("bit for bit", Tolerance(0, 0), Tolerance(0, 0))
# What tests/distributed/test_parity.py holds every mesh to, at every step, against one plain process.
FLOAT32 = _band("within float32 re-ordering noise", Tolerance(0, 5e-5), Tolerance(1e-5, 0))
# What parameters and moments kept in bfloat16 may do (tests/distributed/test_bfloat16_state.py: 0.02 nats),
# of which computing in it alone is a part; and sqrt(2) times what its roundings do to a gradient's norm
# (2.9%, derived in test_parity.py).
BFLOAT16 = _band("within what bfloat16 rounds", Tolerance(0, 0.02), Tolerance(0.042, 0))


def own_band(rtol: float, atol: float) -> ToleranceBand:
    """The same tolerance for all curves."""
    return _band(f"within rtol {rtol:g}, atol {atol:g}", Tolerance(rtol, atol), Tolerance(rtol, atol))


def bands_for(a: RunFolder, b: RunFolder) -> tuple[ToleranceBand, ...]:
    """Bands from the narrowest to the widest that explains a difference between these two: bfloat16's only
    where one of them computes, keeps or reduces in less than float32."""
    return (BITWISE, FLOAT32, BFLOAT16) if _rounds(a) or _rounds(b) else (BITWISE, FLOAT32)


def distance(a: float, b: float) -> float:
    """0 where neither is finite; infinite where one is not."""
    if math.isfinite(a) and math.isfinite(b):
        return abs(a - b)
    return math.inf if math.isfinite(a) or math.isfinite(b) else 0.0


def narrowest(
    bands: Sequence[ToleranceBand], curves: Mapping[str, Sequence[tuple[float, float]]]
) -> ToleranceBand | None:
    """The first band that holds every pair of every curve."""
    for band in bands:
        if all(band.tolerances[key].allows(a, b) for key, pairs in curves.items() for a, b in pairs):
            return band
    return None


def _rounds(run: RunFolder) -> bool:
    """Whether anything of it is less than float32; of a run without a plan its config says it."""
    if run.plan is not None:
        dtypes = {dtype for unit in run.plan.units for dtype in (unit.param_dtype, unit.reduce_dtype)}
        said = [*dtypes, run.plan.storage_dtype, "float8" if run.plan.float8.linears else ""]
    else:
        said = [
            run.config.get(f"parallel.{key}", "") for key in ("param_dtype", "reduce_dtype", "storage_dtype")
        ]
    said.append(run.config.get("optim.state_dtype", ""))
    return any(dtype in REDUCED or dtype == "auto" for dtype in said)


@dataclass(frozen=True)
class CurveDifference:
    """One curve of both runs, at the steps that both report.

    Args:
        steps: how many those are
        first: the first step at which they differ at all, with both values; None where none does
        largest: at which step, and how much at most, in the curve's unit; infinite where only one is finite
        beyond: the first step outside the widest band that would do; None where there is none
        tolerance: that band's
    """

    key: str
    steps: int
    first: tuple[int, float, float] | None
    largest: tuple[int, float]
    beyond: int | None
    tolerance: Tolerance


@dataclass(frozen=True)
class RunComparison:
    """What there is to say of two runs.

    Args:
        verdict: one line
        same: within a band that explains it
        band: the narrowest that holds all curves; None: none does, or the data is not the same
        steps: that both report
        missing: curves that one of them has and that were not compared, each with the folders that report it
        data: in words; `other_data`: the first step at which they read other sequences, None where none is
            known
        config, plan, notes: lines
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
    """`bands`: from narrow to wide, instead of those that suit the runs' dtypes; `until`: the last step to
    look at. Raises ConfigError where no step or no curve is in both."""
    steps = tuple(step for step in a.steps if step in set(b.steps) and (until is None or step <= until))
    if not steps:
        raise ConfigError(
            f"no step is in both: {a.folder} reports {_steps_words(a)}, {b.folder} {_steps_words(b)}. "
            "Compare runs whose metrics.every have steps in common"
        )
    bands = tuple(bands or bands_for(a, b))
    other_data, data = _compare_data(a, b, steps)
    pairs = {key: _pairs(a, b, key, until) for key in CURVES}
    pairs = {key: found for key, found in pairs.items() if found}
    if not pairs:
        raise ConfigError(
            f"nothing to compare: no step of both {a.folder} and {b.folder} has a number for "
            f"{', '.join(CURVES)}"
        )
    missing = _missing(a, b, pairs, until)
    curves = tuple(_difference(key, found, bands[-1].tolerances[key]) for key, found in pairs.items())
    band = narrowest(bands, {key: [(one, other) for _, one, other in found] for key, found in pairs.items()})
    same = band is not None and other_data is None
    verdict = _verdict(band, bands[-1], curves, other_data, len(steps), missing)
    untold = (f"{key} is not compared: {words}" for key, words in missing.items())
    notes = (*_grown(curves, steps), *untold, *_notes(a), *_notes(b), *_unshared(a, b, steps))
    return RunComparison(
        a,
        b,
        verdict,
        same,
        band if same else None,
        bands,
        steps,
        curves,
        missing,
        data,
        other_data,
        (figures_of(a), figures_of(b)),
        tuple(change_words(changed_keys(a.config, b.config))),
        _plan_words(a, b),
        notes,
    )


def _pairs(a: RunFolder, b: RunFolder, key: str, until: int | None) -> list[tuple[int, float, float]]:
    """Step and both values, where both have one."""
    one, other = series(a.rows, key), series(b.rows, key)
    return [
        (step, one[step], other[step]) for step in one if step in other and (until is None or step <= until)
    ]


def _missing(a: RunFolder, b: RunFolder, compared: Iterable[str], until: int | None) -> dict[str, str]:
    """Curves that were not compared although a run has them, and why."""
    why = dict[str, str]()
    for key in CURVES:
        has = [
            run.folder
            for run in (a, b)
            if any(until is None or step <= until for step in series(run.rows, key))
        ]
        if has and key not in compared:
            why[key] = f"only {has[0]} reports it" if len(has) == 1 else "no step of both has it"
    return why


def _difference(key: str, pairs: Sequence[tuple[int, float, float]], tolerance: Tolerance) -> CurveDifference:
    first = next((pair for pair in pairs if distance(*pair[1:]) > 0), None)
    largest = max(((step, distance(one, other)) for step, one, other in pairs), key=lambda found: found[1])
    beyond = next((step for step, one, other in pairs if not tolerance.allows(one, other)), None)
    return CurveDifference(key, len(pairs), first, largest, beyond, tolerance)


def _compare_data(a: RunFolder, b: RunFolder, steps: Sequence[int]) -> tuple[int | None, str]:
    """The first step at which they read other sequences, and the same in words."""
    hashes = [(step, a.rows[step].get("data_hash"), b.rows[step].get("data_hash")) for step in steps]
    known = [found for found in hashes if found[1] and found[2]]
    if not known:
        return None, "not compared: no step in both has a data_hash"
    other = next((step for step, one, two in known if one != two), None)
    if other is None:
        return None, f"the same sequences at all {len(known)} steps that are in both and have a data_hash"
    return other, f"other sequences at step {other}, by its data_hash" + (
        " (the first in both)" if other == known[0][0] else ""
    )


def _verdict(
    band: ToleranceBand | None,
    widest: ToleranceBand,
    curves: Sequence[CurveDifference],
    other_data: int | None,
    steps: int,
    missing: Mapping[str, str],
) -> str:
    if other_data is not None:
        return f"different: they read other data, at step {other_data} at the latest"
    if band is not None:
        most = ", ".join(f"{curve.key} {curve.largest[1]:.2g}" for curve in curves if curve.largest[1] > 0)
        apart = f"; furthest apart: {most}" if most else ""
        known = f" in {' and '.join(curve.key for curve in curves)}" if missing else ""
        untold = "".join(f"; {key} is not compared" for key in missing)
        return f"the same training {band.name}{known}, at {steps} steps{apart}{untold}"
    worst = min((curve for curve in curves if curve.beyond is not None), key=lambda curve: curve.beyond or 0)
    return (
        f"different: at step {worst.beyond} {worst.key} is not {widest.name} "
        f"({_allowed_words(worst.tolerance)}); {_furthest_words(worst)}"
    )


def _furthest_words(curve: CurveDifference) -> str:
    step, most = curve.largest
    if not math.isfinite(most):
        return f"at step {step} only one of them is finite"
    return f"furthest apart at step {step}: {most:.3g}"


def _grown(curves: Sequence[CurveDifference], steps: Sequence[int]) -> list[str]:
    """What to think of runs that were alike at first."""
    beyond = min((curve.beyond for curve in curves if curve.beyond is not None), default=steps[0])
    alike = [step for step in steps if step < beyond]
    if not alike:
        return []
    until = f"until then they are alike, at {len(alike)} steps, up to step {alike[-1]}"
    if not all(math.isfinite(curve.largest[1]) for curve in curves):  # no rounding makes one of two NaN
        return [until]
    return [
        f"{until}. Rounding grows so from step to step, as fast as the training is unstable; a fault that "
        "sets in late looks the same. Runs in float32 tell the two apart: their noise begins some thousand "
        "times smaller"
    ]


def _allowed_words(tolerance: Tolerance) -> str:
    """What a tolerance says, in words."""
    parts = [f"{tolerance.atol:g}"] if tolerance.atol or not tolerance.rtol else []
    parts += [f"{tolerance.rtol:.2g} of its size"] if tolerance.rtol else []
    return " + ".join(parts)


def _plan_words(a: RunFolder, b: RunFolder) -> tuple[str, ...]:
    if a.plan is not None and b.plan is not None:
        return tuple(map(in_words, diff_plans(a.plan, b.plan)))
    return tuple(f"{run.folder}: {run.plan_problem}" for run in (a, b) if run.plan is None)


def _notes(run: RunFolder) -> list[str]:
    """What to know of a run: whether it still goes, was resumed, or has lines that cannot be read."""
    notes, name = list[str](), run.folder
    if run.status is None:
        notes.append(f"{name} has no status.json")
    elif run.status.state != "finished":
        reason = f" ({run.status.reason})" if run.status.reason else ""
        notes.append(f"{name} is {run.status.state} at step {run.status.step}{reason}")
    if run.status is not None and run.status.resumed_from is not None:
        notes.append(f"{name} went on from the checkpoint of step {run.status.resumed_from}")
    if run.unreadable:
        notes.append(f"{name}/metrics.jsonl has {run.unreadable} lines that are no rows, which are left out")
    if bad := [step for step, loss in series(run.rows, "loss").items() if not math.isfinite(loss)]:
        notes.append(f"{name} has a loss that is not finite at {len(bad)} steps, first at step {bad[0]}")
    return notes


def _unshared(a: RunFolder, b: RunFolder, steps: Sequence[int]) -> list[str]:
    """Steps that only one has are not compared."""
    alone = [(run, len(run.steps) - len(steps)) for run in (a, b) if len(run.steps) > len(steps)]
    return [
        f"{run.folder} has {count} reported steps that are not compared (it has {_steps_words(run)})"
        for run, count in alone
    ]


def _steps_words(run: RunFolder) -> str:
    steps = run.steps
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}" if steps else "no step"
