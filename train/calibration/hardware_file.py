"""Write the results of a calibration as a hardware file: the keys of `Hardware`, each with a comment that
names the source of its value."""

import dataclasses
import datetime
import math
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.planner.hardware import HARDWARE_FOLDER, Hardware, HostCosts, Link, seconds_at
from meshwright.parallel.yaml_io import to_yaml
from meshwright.train.calibration.collectives import CollectiveTiming, curves_of, fit_link
from meshwright.train.calibration.host import EVENTS, UnitTiming
from meshwright.train.cgroups import memory_limit_bytes

DIGITS = 4  # significant digits: more than repeated measurements agree on


@dataclass(frozen=True)
class SourcedValue:
    """A value of `Hardware` and its source."""

    value: Any
    source: str


def hardware_text(title: str, values: Mapping[str, SourcedValue]) -> str:
    """Return the text of a hardware file: `title` on top, then every key of Hardware except the name, with
    its source as a comment after the key."""
    text = f"# {title}\n"
    for key in (item.name for item in dataclasses.fields(Hardware) if item.name != "name"):
        value = _plain(values[key].value)
        # None writes collections of scalars on one line
        flow_style = None if isinstance(value, list | dict) else False
        entry = to_yaml({key: value}, default_flow_style=flow_style, width=math.inf)
        text += entry.replace("\n", f"  # {values[key].source}\n", 1)
    return text


def _plain(value: Any) -> Any:
    """Return a value as plain YAML data, floats with DIGITS significant digits."""
    match value:
        case float():
            return float(f"{value:.{DIGITS}g}")
        case Link() | HostCosts():
            return _plain(vars(value))
        case Mapping():
            return {key: _plain(inner) for key, inner in value.items()}
        case ((_, share),):  # a curve with one point is constant
            return _plain(share)
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case _:
            return value


def source_in(path: Path, key: str) -> str:
    """Return the comment after a key of a hardware file; "" if there is none."""
    match = re.search(rf"^{key}:[^#\n]*# (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else ""


ATTENTION = ("attention_forward", "attention_backward")


@dataclass(frozen=True)
class CalibrationResult:
    """The measured values.

    Args:
        compute: the result of measure_compute of each process
        timings: of collectives; empty for a single process
        units: of FSDP2 around a tiny and a large unit
    """

    compute: Sequence[Mapping[str, Any]]
    timings: Sequence[CollectiveTiming]
    units: Sequence[UnitTiming]


@dataclass(frozen=True)
class CalibratedMachine:
    """The measured machine.

    Args:
        device: torch's device type
        name: of the device
        count: devices, or cores of a CPU
        threads: of each measured process
        note: what limits the measurement, for the sources; "" for nothing
    """

    device: str
    name: str
    count: int
    threads: int = 1
    note: str = ""


def measured_values(
    machine: CalibratedMachine, result: CalibrationResult, base: Hardware
) -> dict[str, SourcedValue]:
    """Return the values of the machine: what was measured, and the rest from `base`."""
    values = {item.name: _copied(item.name, base) for item in dataclasses.fields(base) if item.name != "name"}
    values |= (
        _cpu_values(machine, result, base) if machine.device == "cpu" else _gpu_values(machine, result, base)
    )
    stamp = _stamp(machine)
    values["host"] = SourcedValue(
        host_costs(result, machine.count if machine.device == "cpu" else 0),
        f"{stamp}: an eager operator, a kernel and a call of a compiled graph, FSDP2",
    )
    values["fitted"] = SourcedValue([], "no value in this file is fitted to runs")
    values["collectives_s"] = SourcedValue(curves_of(result.timings), f"{stamp}: medians, bytes and seconds")
    if result.timings:
        values["node"] = _node(stamp, result.timings)
    return values


def _cpu_values(
    machine: CalibratedMachine, result: CalibrationResult, base: Hardware
) -> dict[str, SourcedValue]:
    """Return the values of a CPU, rates per core; a peak is the best measured rate."""
    stamp = _stamp(machine)
    compute = [_per_core(process, machine.threads) for process in result.compute]
    curves = product_curves(compute)
    peaks = {dtype: max(rate for _, rate in curve) / 1e12 for dtype, curve in curves.items()}
    copy = median_of(compute, "copy_bytes_s")
    return {
        "device_names": SourcedValue([], "empty: a CPU has no MFU"),
        "memory_gib": SourcedValue(_cpu_memory_gib(), f"{stamp}: of the entire machine"),
        "memory_gb_s": SourcedValue(
            copy / 1e9, f"{stamp}: of one core, copying while {len(compute)} processes do so"
        ),
        "peak_tflops": SourcedValue(
            {**base.peak_tflops, **peaks}, f"{stamp}: of one core, the best of the matrix products below"
        ),
        **_rates(stamp, compute, curves, peaks, base),
        **_memory_shares(stamp, compute, copy, base),
        "copy_efficiency": SourcedValue(
            copy_share(result, copy, machine.count),
            f"{stamp}: copies of FSDP2, from a sharded unit without computation",
        ),
        "operation_s": SourcedValue(0.0, "a CPU launches what it computes: host has the costs"),
        "host_gb_s": SourcedValue(copy / 1e9, "equal to memory_gb_s: a copy within memory"),
        "reserved_gib": SourcedValue(
            median_of(compute, "taken_gib"), f"{stamp}: resident memory of a process without a model"
        ),
        "cores": SourcedValue(machine.count, f"{stamp}: cores that a process may use"),
    }


def _per_core(process: Mapping[str, Any], threads: int) -> dict[str, Any]:
    """Return the rates of a process with several threads as those of one core."""

    def scaled(value: Any, key: str) -> Any:
        match value:
            case Mapping():
                return {name: scaled(inner, key) for name, inner in value.items()}
            case list():
                return [(size, rate / threads) for size, rate in value]
            case _:
                return value / threads if key in PER_CORE else value

    return {key: scaled(value, key) for key, value in process.items()}


PER_CORE = {"matmul", *ATTENTION, "copy_bytes_s", "memory_bytes_s", "optimizer_bytes_s"}


def _gpu_values(
    machine: CalibratedMachine, result: CalibrationResult, base: Hardware
) -> dict[str, SourcedValue]:
    """Return the values of a GPU: shares of the base's peaks."""
    stamp, curves = _stamp(machine), product_curves(result.compute)
    memory_gib = torch.cuda.get_device_properties(0).total_memory / GIB
    return {
        "device_names": SourcedValue([machine.name], "torch.cuda.get_device_name()"),
        "memory_gib": SourcedValue(memory_gib, "total_memory as CUDA reports it"),
        **_rates(stamp, result.compute, curves, base.peak_tflops, base),
        **_memory_shares(stamp, result.compute, 1e9 * base.memory_gb_s, base),
        "operation_s": SourcedValue(
            median_of(result.compute, "operation_s"), f"{stamp}: a chain of operators on one number"
        ),
        "reserved_gib": SourcedValue(
            median_of(result.compute, "taken_gib"), f"{stamp}: context and libraries, without a model"
        ),
    }


def host_costs(result: CalibrationResult, cores: int = 0) -> HostCosts:
    """Return the costs of launching, medians over the processes. FSDP2's is what a tiny unit takes besides
    its collectives. `cores` of a CPU; 0 if each process has its own device."""
    tiny, _ = result.units
    operator_s, kernel_s, graph_s = (
        median_of(result.compute, key) for key in ("operator_s", "kernel_s", "graph_s")
    )
    unit_s = _alone_s(tiny, result, cores) / EVENTS
    return HostCosts(operator_s, kernel_s, graph_s, unit_s)


def copy_share(result: CalibrationResult, copy_bytes_s: float, cores: int) -> float:
    """Return the share of the memory bandwidth that FSDP2's copies reach: those of a large unit, without its
    collectives and FSDP2's fixed cost. At most 1."""
    _, large = result.units
    seconds = _alone_s(large, result, cores) - EVENTS * host_costs(result, cores).unit_s
    alone_s = large.copied_bytes / copy_bytes_s
    return alone_s / max(seconds, alone_s)


def _alone_s(unit: UnitTiming, result: CalibrationResult, cores: int) -> float:
    """Return the seconds of a probed unit without its collectives, on a core of its own: processes that share
    cores took turns."""
    turns = max(1.0, unit.members / cores) if cores else 1.0
    return max(0.0, unit.seconds - _collectives_s(unit, result.timings)) / turns


def _collectives_s(unit: UnitTiming, timings: Sequence[CollectiveTiming]) -> float:
    """Return the seconds of a probed unit's collectives: gathered twice, reduced once."""
    if not unit.waits or not timings:
        return 0.0
    by_op = curves_of(timings)
    gather_s, scatter_s = (
        seconds_at(by_op[op][unit.members], size)
        for op, size in (("all_gather", unit.gathered_bytes), ("reduce_scatter", unit.reduced_bytes))
    )
    return 2 * gather_s + scatter_s


def product_curves(compute: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return curves by dtype: (GFLOP, operations per second) in ascending order, the median over processes
    and then over products of equal size."""
    curves = {}
    for dtype in compute[0]["matmul"]:
        by_size: dict[float, list[float]] = {}
        for product in zip(*(process["matmul"][dtype] for process in compute), strict=True):
            by_size.setdefault(product[0][0], []).append(statistics.median(rate for _, rate in product))
        curves[dtype] = [(size, statistics.median(rates)) for size, rates in sorted(by_size.items())]
    return curves


def _node(stamp: str, timings: Sequence[CollectiveTiming]) -> SourcedValue:
    link, error = fit_link(timings)
    members = "/".join(map(str, sorted({timing.members for timing in timings})))
    return SourcedValue(
        link,
        f"{stamp}: between {members} processes, latency and bandwidth fitted to medians of several sizes, "
        f"mean error {error:.0%}",
    )


def _rates(
    stamp: str,
    compute: Sequence[Mapping[str, Any]],
    curves: Mapping[str, Any],
    peaks: Mapping[str, float],
    base: Hardware,
) -> dict[str, SourcedValue]:
    """Return matmul and attention as shares of the peaks, of dtypes that were not measured the base's."""
    note = _note_copied(base.matmul.keys() - curves.keys(), base)
    matmul = {
        dtype: [(size, rate / 1e12 / peaks[dtype]) for size, rate in curve] for dtype, curve in curves.items()
    }
    how = f"{stamp}: GFLOP and share of the peak, medians, forward and both gradients together{note}"
    values = {"matmul": SourcedValue({**base.matmul, **matmul}, how)}
    for key in ATTENTION:
        shares = {
            dtype: statistics.median(process[key][dtype] for process in compute) / 1e12 / peaks[dtype]
            for dtype in curves
        }
        how = f"{stamp}: the model's causal attention{note}"
        values[key] = SourcedValue({**getattr(base, key), **shares}, how)
    return values


def _memory_shares(
    stamp: str, compute: Sequence[Mapping[str, Any]], full_bytes_s: float, base: Hardware
) -> dict[str, SourcedValue]:
    """Return the shares of the bandwidth of element-wise operations and of AdamW. The measured dtype stands
    for one that was not measured."""
    measured = compute[0]["memory_bytes_s"]
    shares = {
        dtype: statistics.median(process["memory_bytes_s"][dtype] for process in compute) / full_bytes_s
        for dtype in measured
    }
    unmeasured = {
        dtype: next(iter(shares.values())) for dtype in base.memory_efficiency if dtype not in shares
    }
    also = f"; {', '.join(unmeasured)}: as {next(iter(shares))}" if unmeasured else ""
    return {
        "memory_efficiency": SourcedValue(
            {**unmeasured, **shares},
            f"{stamp}: norm and SwiGLU, compiled, counting bytes that must be read and written{also}",
        ),
        "optimizer_efficiency": SourcedValue(
            median_of(compute, "optimizer_bytes_s") / full_bytes_s, f"{stamp}: torch's fused AdamW"
        ),
    }


def _note_copied(dtypes: Iterable[str], base: Hardware) -> str:
    names = ", ".join(sorted(dtypes))
    return f"; {names}: as in {base.name}.yaml" if names else ""


def _copied(key: str, base: Hardware) -> SourcedValue:
    """Return the base's value with the source in its file, preceded by the file's name unless the source
    already names a file."""
    source = source_in(HARDWARE_FOLDER / f"{base.name}.yaml", key)
    where = "" if source.startswith("as in ") else f"as in {base.name}.yaml: "
    return SourcedValue(getattr(base, key), where + (source or "no source given"))


def median_of(compute: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the median of a figure over the processes."""
    return statistics.median(process[key] for process in compute)


def _stamp(machine: CalibratedMachine) -> str:
    parts = [f"measured {datetime.date.today().isoformat()}", f"torch {torch.__version__}", machine.name]
    return ", ".join([*parts, machine.note] if machine.note else parts)


def _cpu_memory_gib() -> float:
    """Return the host memory in GiB, or the container's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, memory_limit_bytes() or total) / GIB
