"""The record of `bench gpu` as tables."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.tools.bench.gpu.cases import PARTS, Curves, EndToEnd, GpuCase, PeerRun
from meshwright.tools.bench.speed.kernel_table import table_text
from meshwright.tools.bench.train_run import MFUS, spread
from meshwright.tools.cli import format_table

RATE = "tokens_per_s_per_rank"
# of each part: what its rows say, by key and format; a key below another is written with a dot
PART_COLUMNS: Mapping[str, Mapping[str, str]] = {
    "rooflines": {"tflop_s": ",.1f", "spread": ".1%"},
    "attention": {
        "forward_tflop_s": ",.1f",
        "backward_tflop_s": ",.1f",
        "forward.median_s": ".3e",
        "both.median_s": ".3e",
        "both.spread": ".1%",
    },
    "head and loss": {"median_s": ".3e", "over_plain_compiled": ".3f", "extra_gib": ".2f", "spread": ".1%"},
    "optimizer": {"class": "", "median_s": ".3e", "gb_s": ",.0f", "spread": ".1%"},
}


def gpu_text(figures: Mapping[str, Any], cases: Sequence[GpuCase]) -> str:
    """All tables of what is measured, then what failed and what is absent or not measured yet."""
    found = figures["cases"]
    measured = [case for case in cases if found.get(case.name, {}).get("runs")]
    parts = [f"shape: {figures['shape']}"]
    parts += _runs_table(
        [case for case in measured if isinstance(case.work, EndToEnd) and not case.profiled], found
    )
    parts += _peers_table([case for case in measured if isinstance(case.work, PeerRun)], found)
    parts += [
        f"{case.name}\n{part_table(case.name, found[case.name]['runs'][-1])}"
        for case in measured
        if case.name in PARTS
    ]
    parts += [
        f"{case.name}\n{table_text(found[case.name]['runs'][-1]['kernels'])}"
        for case in measured
        if case.profiled
    ]
    parts += [
        _curves_text(case.name, found[case.name]["runs"][-1])
        for case in measured
        if isinstance(case.work, Curves)
    ]
    parts += ["\n".join(_missing(cases, found))]
    return "\n\n".join(part for part in parts if part)


def summary(case: Mapping[str, Any]) -> dict[str, Any]:
    """Median over the runs of a case; the spread is between the runs where there are several, else within the
    one."""
    runs = case["runs"]
    rates = [run[RATE] for run in runs]
    middle = statistics.median(rates)
    return {
        "rate": middle,
        "runs": len(runs),
        "spread": spread(rates, middle) if len(runs) > 1 else runs[0]["spread"],
        "peak_memory_gib": runs[-1]["peak_memory_gib"],
        "reserved_memory_gib": runs[-1].get("reserved_memory_gib"),
        **{name: _middle([run[name] for run in runs]) for name in MFUS},
    }


def _runs_table(cases: Sequence[GpuCase], found: Mapping[str, Any]) -> list[str]:
    head = (
        "run of ours",
        "tokens/s",
        "spread",
        "runs",
        "MFU full",
        "causal",
        "GiB",
        "predicted GiB",
        "step ms",
        "predicted ms",
    )
    rows = []
    for case in cases:
        run, whole = found[case.name]["runs"][-1], summary(found[case.name])
        predicted = run["predicted"] or {}
        rows.append(
            (
                case.name,
                *_rate_cells(whole),
                _cell(whole["peak_memory_gib"], ".1f"),
                _cell(predicted.get("peak_memory_gib"), ".1f"),
                _cell(1e3 * run["step_times_s"][-1], ",.0f"),
                _cell(_in_ms(predicted.get("step_time_s")), ",.0f"),
            )
        )
    return [format_table(head, rows)] if rows else []


def _peers_table(cases: Sequence[GpuCase], found: Mapping[str, Any]) -> list[str]:
    head = ("peer", "tokens/s", "spread", "runs", "MFU full", "causal", "GiB", "ours / it", "ours")
    rows = []
    for case in cases:
        assert isinstance(case.work, PeerRun)
        theirs, rival = summary(found[case.name]), found.get(case.work.rival.name, {})
        ratio = summary(rival)["rate"] / theirs["rate"] if rival.get("runs") else None
        gib = theirs["peak_memory_gib"] or theirs["reserved_memory_gib"]
        rows.append(
            (case.name, *_rate_cells(theirs), _cell(gib, ".1f"), _cell(ratio, ".3f"), case.work.rival.name)
        )
    return [format_table(head, rows)] if rows else []


def _curves_text(name: str, figures: Mapping[str, Any]) -> str:
    run, beside = figures["last_mean"]
    return (
        f"{name}\nat the end {run:.4f} beside {beside:.4f} nats; apart by {figures['last_difference']:.4f} "
        f"there, by {figures['largest_difference']:.4f} at most (means of 50 steps)"
    )


def part_table(part: str, figures: Mapping[str, Any]) -> str:
    """A row for each way that was measured, with its figures or the reason why there are none."""
    columns = PART_COLUMNS[part]
    ways = {name: value for name, value in figures.items() if isinstance(value, dict)}
    ways |= {row["layer"]: row for row in figures.get("products", ())}
    rows = [
        (name, *(_cell(_at(value, key), form) for key, form in columns.items()), value.get("reason", "")[:60])
        for name, value in ways.items()
    ]
    last = f"\ncopy: {figures['copy_gb_s']:,.0f} GB/s read and written" if "copy_gb_s" in figures else ""
    return format_table(("way", *columns, ""), rows) + last


def _missing(cases: Sequence[GpuCase], found: Mapping[str, Any]) -> Iterator[str]:
    for case in cases:
        kept = found.get(case.name)
        if kept is None:
            yield f"not measured yet: {case.name}"
        elif kept["reason"]:
            yield f"{kept['state']}: {case.name}: {kept['reason'].splitlines()[-1].strip()}"


def _rate_cells(whole: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{whole['rate']:,.0f}",
        f"{whole['spread']:.1%}",
        str(whole["runs"]),
        *(_cell(whole[name], ".1%") for name in MFUS),
    )


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def _at(value: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key, or None."""
    inner: Any = value
    for name in key.split("."):
        inner = inner.get(name) if isinstance(inner, dict) else None
    return inner


def _middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
