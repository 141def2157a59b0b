"""Fit the constants of the published runs' machines that no source tells, all together, and measure what the
fit is worth: errors on the rows that it saw, and on rows and sources that it did not see. The runs of this
project's own H200 are a source to which nothing is fitted.

Every other number of those machines has a source of its own in configs/hardware. A fit minimizes the squared
logarithms of predicted / measured tokens per second (Gauss-Newton). Each constant starts from a published
value or an estimate; a weak prior keeps it there if the rows do not determine it.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.published import (
    FITTED,
    MEMORY_OF,
    OWN_KIND,
    PublishedRun,
    own_runs,
    predict_own_tokens_per_s,
    predict_reserved_gib,
    predict_tokens_per_s,
    published_rows,
)
from benchmarks.support.harness import RECORDS, BenchResult, Measurement, run_benchmark
from meshwright.parallel.planner.accuracy import (
    CPU,
    ERRORS_FILE,
    MEMORY,
    ONE_GPU,
    UNSEEN,
    UNSEEN_GPU,
    kind_of_run,
)
from meshwright.parallel.planner.hardware import COLLECTIVES, Hardware, load_hardware
from meshwright.tools.cli import format_table

Kinds = Mapping[str, Hardware]
ITERATIONS = 5
STEP = 0.02  # of a constant, for its derivative
PRIOR = 0.005  # error of a prediction that weighs as much as a constant e times its start
QUANTILE_90 = 1.645  # of the normal distribution, on both sides
TORCHTITAN, KEMPNERFORGE = "h100-500w-torchtitan", "h200-kempnerforge"


@dataclass(frozen=True)
class Constant:
    """A fitted constant.

    Args:
        name: what it is
        keys: hardware file -> key
        start: its value without a fit
        reason: why no source tells it
        put: returns the kinds with another value
    """

    name: str
    keys: Mapping[str, str]
    start: float
    reason: str
    put: Callable[[Kinds, float], Kinds]


def _network(kinds: Kinds, share: float) -> Kinds:
    kind = kinds[KEMPNERFORGE]
    network = replace(kind.network, efficiency=dict.fromkeys(COLLECTIVES, share))
    return {**kinds, KEMPNERFORGE: replace(kind, network=network)}


def _network_slowdown(kinds: Kinds, share: float) -> Kinds:
    both = {name: replace(kinds[name], network_slowdown=share) for name in (TORCHTITAN, KEMPNERFORGE)}
    return {**kinds, **both}


CONSTANTS = (
    Constant(
        "share of 400 Gb/s that KempnerForge's network reaches",
        {KEMPNERFORGE: "network.efficiency"},
        0.8,
        "the rate of its adapters is not published",
        _network,
    ),
    Constant(
        "slowdown of compute by collectives between nodes",
        {TORCHTITAN: "network_slowdown", KEMPNERFORGE: "network_slowdown"},
        0.16,
        "published only for collectives within a node",
        _network_slowdown,
    ),
)
# Fitted to the published memory: what torchtitan's allocator reserves beyond the predicted pools.
RESERVED = {TORCHTITAN: "reserved_share"}


def fit(rows: Sequence[PublishedRun], kinds: Kinds) -> list[float]:
    """Return the value of each of CONSTANTS."""
    start = [constant.start for constant in CONSTANTS]
    values = list(start)
    for _ in range(ITERATIONS):
        here = _log_errors(rows, kinds, values)
        moved = [_log_errors(rows, kinds, list(values * (1 + STEP * row))) for row in np.eye(len(values))]
        slopes = [(there - here) / math.log1p(STEP) for there in moved]
        away = np.log(np.array(values) / start)
        matrix = np.vstack([np.array(slopes).T, PRIOR * np.eye(len(values))])
        change = np.linalg.lstsq(matrix, -np.concatenate([here, PRIOR * away]), rcond=None)[0]
        values = [value * math.exp(x) for value, x in zip(values, change, strict=True)]
    return values


def with_values(kinds: Kinds, values: Sequence[float]) -> Kinds:
    """Return the kinds with these values of CONSTANTS."""
    for constant, value in zip(CONSTANTS, values, strict=True):
        kinds = constant.put(kinds, value)
    return kinds


def _log_errors(rows: Sequence[PublishedRun], kinds: Kinds, values: Sequence[float]) -> np.ndarray:
    kinds = with_values(kinds, values)
    return np.array(
        [math.log(predict_tokens_per_s(row, kinds[row.kind]) / row.tokens_per_s_per_gpu) for row in rows]
    )


def fit_reserved(rows: Sequence[PublishedRun], kinds: Kinds) -> float:
    """Return the share that the allocator reserves beyond its predicted pools, from the published memory."""
    kind = replace(kinds[TORCHTITAN], reserved_share=0.0)
    known = [row for row in rows if row.peak_memory_gib and row.framework in MEMORY_OF]
    logs = [math.log(row.peak_memory_gib / predict_reserved_gib(row, kind)) for row in known]
    return math.expm1(statistics.mean(logs))


@dataclass(frozen=True)
class Errors:
    """Relative errors of predicted tokens per second."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean of the absolute errors."""
        return statistics.mean(map(abs, self.values))

    @property
    def worst(self) -> float:
        """The largest absolute error."""
        return max(map(abs, self.values))

    @property
    def interval(self) -> tuple[float, float]:
        """The interval that holds 90% of such errors, if they are distributed normally."""
        middle = statistics.mean(self.values)
        width = QUANTILE_90 * statistics.stdev(self.values)
        return middle - width, middle + width


@dataclass(frozen=True)
class FitReport:
    """The fit to all rows and its errors.

    Args:
        values: of CONSTANTS
        reserved_share: fitted to the published memory
        unfitted: errors with all constants at their starts
        seen: errors on the rows that were fitted
        left_out: error on each row by a fit to the others
        left_out_source: by source, the errors on its rows by a fit to the other sources
        own: errors on the runs of `own_runs`
    """

    values: tuple[float, ...]
    reserved_share: float
    unfitted: Errors
    seen: Errors
    left_out: Errors
    left_out_source: Mapping[str, Errors]
    own: Errors


def report_fit(rows: Sequence[PublishedRun], kinds: Kinds) -> FitReport:
    """Fit to all rows, to all but each, and to all but each source."""

    def errors(tested: Sequence[PublishedRun], values: Sequence[float]) -> Errors:
        return Errors(tuple(map(float, np.expm1(_log_errors(tested, kinds, values)))))

    values = fit(rows, kinds)
    left_out = [
        errors([row], fit([*rows[:i], *rows[i + 1 :]], kinds)).values[0] for i, row in enumerate(rows)
    ]
    sources = dict.fromkeys(row.framework for row in rows)
    by_source = {
        source: errors(
            [row for row in rows if row.framework == source],
            fit([row for row in rows if row.framework != source], kinds),
        )
        for source in sources
    }
    own = [predict_own_tokens_per_s(case, kinds[OWN_KIND]) / rate - 1 for case, rate in own_runs().items()]
    return FitReport(
        tuple(values),
        fit_reserved(rows, kinds),
        errors(rows, [constant.start for constant in CONSTANTS]),
        errors(rows, values),
        Errors(tuple(left_out)),
        by_source,
        Errors(tuple(own)),
    )


def fit_text(report: FitReport, rows: Sequence[PublishedRun]) -> str:
    """Return the constants and the errors as tables."""
    constants = [
        (constant.name, f"{constant.start:.3g}", f"{value:.3g}", _places(constant.keys))
        for constant, value in zip(CONSTANTS, report.values, strict=True)
    ]
    reserved = f"{report.reserved_share:.3g}"
    constants.append(("memory reserved beyond the pools", "0", reserved, _places(RESERVED)))
    groups = error_groups(report, rows)
    cells = [
        (name, str(len(e.values)), f"{e.mean:.1%}", f"{e.worst:.1%}", f"{low:+.1%} to {high:+.1%}")
        for name, e in groups.items()
        for low, high in [e.interval]
    ]
    by_row = [
        (row.name, f"{seen:+.1%}", f"{unseen:+.1%}")
        for row, seen, unseen in zip(rows, report.seen.values, report.left_out.values, strict=True)
    ]
    by_row += [
        (f"own H200, {case}", "-", f"{e:+.1%}") for case, e in zip(own_runs(), report.own.values, strict=True)
    ]
    return "\n\n".join(
        [
            format_table(("fitted constant", "start", "value", "in configs/hardware"), constants),
            format_table(("error of tokens per second", "rows", "mean", "worst", "90% interval"), cells),
            format_table(("row", "seen", "left out"), by_row),
        ]
    )


def error_groups(report: FitReport, rows: Sequence[PublishedRun]) -> dict[str, Errors]:
    """Return the errors by what was fitted and what was tested: of all rows, and of each source."""
    groups = {"own H200, nothing fitted": report.own, "nothing fitted": report.unfitted}
    for name, errors in (
        ("seen: fitted to all rows", report.seen),
        ("unseen: each row by a fit to the others", report.left_out),
    ):
        groups[name] = errors
        for source in report.left_out_source:
            of_source = (e for e, row in zip(errors.values, rows, strict=True) if row.framework == source)
            groups[f"- {source}, {name}"] = Errors(tuple(of_source))
    for source, errors in report.left_out_source.items():
        groups[f"unseen: {source} by a fit to the rest"] = errors
    return groups


def _places(keys: Mapping[str, str]) -> str:
    return ", ".join(f"{kind}.yaml: {key}" for kind, key in keys.items())


def fit_figures(report: FitReport, rows: Sequence[PublishedRun]) -> dict[str, Any]:
    """Return the report as plain data."""
    return {
        "constants": {
            constant.name: {"value": value, "start": constant.start, "keys": dict(constant.keys)}
            for constant, value in zip(CONSTANTS, report.values, strict=True)
        },
        "reserved_share": report.reserved_share,
        "rows": [row.name for row in rows],
        **{
            name: {"errors": e.values, "mean": e.mean, "worst": e.worst, "interval_90": e.interval}
            for name, e in error_groups(report, rows).items()
        },
    }


# What a user predicts such machines with, who knows their data sheets.
DATA_SHEETS = {"torchtitan": "h100-sxm", "KempnerForge": "h200"}


def reached_shares(rows: Sequence[PublishedRun], kinds: Kinds) -> dict[PublishedRun, float]:
    """Return the measured speed of each run as a share of the bound by the data sheet of its machine."""
    bounds = {name: replace(kinds[name], reached=1.0) for name in DATA_SHEETS.values()}
    return {
        row: row.tokens_per_s_per_gpu / predict_tokens_per_s(row, bounds[DATA_SHEETS[row.framework]])
        for row in rows
    }


def carried_errors(
    report: FitReport, rows: Sequence[PublishedRun], by_data_sheet: Sequence[PublishedRun], kinds: Kinds
) -> dict[str, Errors]:
    """Return the errors that predictions carry, by the kind of run: of CPUs as recorded last; of one GPU on
    our own; of several GPUs on each published run by a fit to the others; on clusters of which no run was
    seen by their data sheets, with the share that the other runs on such machines reached; and on GPUs of
    which no run was seen with the share of the H100's. And of all of these by the kind of machine."""
    errors: dict[str, list[float]] = {}
    recorded = max(RECORDS.glob("*-predictions.json")).read_text(encoding="utf-8")
    errors[CPU] = [row["error"] for row in json.loads(recorded)["figures"]["rows"]]
    errors[ONE_GPU] = [*report.own.values]
    errors[OWN_KIND] = [*report.own.values]
    for row, error in zip(rows, report.left_out.values, strict=True):
        errors.setdefault(row.kind, []).append(error)
    clusters = [(row, e) for row, e in zip(rows, report.left_out.values, strict=True) if row.n_gpus > 1]
    for row, error in clusters:
        errors.setdefault(kind_of_run(0, row.n_gpus, row.gpus_per_node), []).append(error)
    shares = reached_shares([row for row, _ in clusters], kinds)
    for row, share in shares.items():
        others = [s for other, s in shares.items() if other.framework == row.framework and other != row]
        sheet = DATA_SHEETS[row.framework]
        expected = 1.0 if kinds[sheet].reached == 1.0 else statistics.median(others)
        for name in (UNSEEN, sheet):
            errors.setdefault(name, []).append(expected / share - 1)
    for row in by_data_sheet:
        error = predict_tokens_per_s(row, kinds[row.kind]) / row.tokens_per_s_per_gpu - 1
        for name in (UNSEEN if row.kind in DATA_SHEETS.values() else UNSEEN_GPU, row.kind):
            errors.setdefault(name, []).append(error)
    torchtitan = replace(kinds[TORCHTITAN], reserved_share=report.reserved_share)
    errors[MEMORY] = [
        predict_reserved_gib(row, torchtitan) / row.peak_memory_gib - 1
        for row in rows
        if row.peak_memory_gib and row.framework in MEMORY_OF
    ]
    return {kind: Errors(tuple(values)) for kind, values in errors.items()}


def errors_table(errors: Mapping[str, Errors]) -> str:
    """Return the text of configs/hardware/errors.csv."""
    lines = (
        f"{kind},{len(e.values)},{e.mean:.3f},{min(e.values):.3f},{max(e.values):.3f}\n"
        for kind, e in errors.items()
    )
    return "rows,runs,mean,lowest,highest\n" + "".join(lines)


def fit_published(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Fit the constants to all published runs."""
    published, kinds = published_rows(), load_hardware()
    rows, by_data_sheet = ([row for row in published if (row.kind in FITTED) == of] for of in (True, False))
    report = report_fit(rows, kinds)
    table = errors_table(carried_errors(report, rows, by_data_sheet, kinds))
    if options.write:
        ERRORS_FILE.write_text(table, encoding="utf-8")
    shares = reached_shares(rows, kinds)
    reached = []
    for name, kind in DATA_SHEETS.items():
        median = statistics.median(share for row, share in shares.items() if row.framework == name)
        reached.append(f"reached, {kind}.yaml: {median:.3f}, the median of {name}'s runs")
    text = "\n\n".join([fit_text(report, rows), "\n".join(reached), table])
    return BenchResult(None, fit_figures(report, rows), text)


def add_fit_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `fit`."""
    text = "write the errors that predictions carry to configs/hardware/errors.csv"
    parser.add_argument("--write", action="store_true", help=text)


MEASUREMENT = Measurement(
    "fit",
    add_fit_options,
    fit_published,
    description=(
        "Fit those constants of the published runs' machines that no source tells to the published tokens "
        "per second, all together, and print their values and the errors on seen and unseen rows: by a fit "
        "to all other rows, and by a fit to the other sources. The values are put into configs/hardware by "
        "hand. It takes about two minutes."
    ),
    takes_keys=False,
)

if __name__ == "__main__":
    run_benchmark(MEASUREMENT)
