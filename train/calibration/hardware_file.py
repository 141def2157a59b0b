"""Write the results of a calibration as a hardware file: the keys of `Hardware`, each with a comment that
names the source of its value."""

import dataclasses
import datetime
import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.planner.hardware import HARDWARE_FOLDER, Hardware, Link
from meshwright.train.calibration.compute import CollectiveTiming, fit_link
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
        entry = yaml.safe_dump({key: value}, default_flow_style=flow_style, sort_keys=False, width=math.inf)
        text += entry.replace("\n", f"  # {values[key].source}\n", 1)
    return text


def _plain(value: Any) -> Any:
    """Return a value as plain YAML data, floats with DIGITS significant digits."""
    match value:
        case float():
            return float(f"{value:.{DIGITS}g}")
        case Link():
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
    """The measured values. `compute`: the result of measure_compute of each process; `timings`: of
    collectives, empty for a single GPU."""

    compute: Sequence[Mapping[str, Any]]
    timings: Sequence[CollectiveTiming]


@dataclass(frozen=True)
class CalibratedMachine:
    """The measured machine: torch's device type, the device's name, and the number of devices (of cores on a
    CPU)."""

    device: str
    name: str
    count: int
    quick: bool


def cpu_values(
    machine: CalibratedMachine, result: CalibrationResult, base: Hardware
) -> dict[str, SourcedValue]:
    """Return the values of a CPU. All but the network is measured, rates per core; a peak is the best
    measured rate."""
    stamp = _stamp(machine)
    curves = product_curves(result.compute)
    peaks = {dtype: max(rate for _, rate in curve) / 1e12 for dtype, curve in curves.items()}
    copy, taken = (median_of(result.compute, key) for key in ("copy_bytes_s", "taken_gib"))
    return {
        "device_names": SourcedValue([], "empty: a CPU has no MFU"),
        "memory_gib": SourcedValue(_cpu_memory_gib(), f"{stamp}: of the entire machine"),
        "memory_gb_s": SourcedValue(
            copy / 1e9, f"{stamp}: of one core, copying 128 MiB while {len(result.compute)} processes do so"
        ),
        "peak_tflops": SourcedValue(peaks, f"{stamp}: of one core, the best of the matrix products below"),
        **_rates(stamp, result, curves, peaks),
        "attention_kernels": _copied("attention_kernels", base),
        "memory_efficiency": _memory_efficiency(stamp, result, copy),
        "node": _node(stamp, result.timings),
        "network": _copied("network", base),
        "host_gb_s": SourcedValue(copy / 1e9, "equal to memory_gb_s: a copy within memory"),
        "host_memory_gib": SourcedValue(0.0, "a CPU's memory is the host's"),
        "overlaps": SourcedValue(False, "gloo's threads use the cores of the computation"),
        "slowdown": SourcedValue(0.0, "no computation overlaps a collective"),
        "reserved_share": SourcedValue(0.0, "the C allocator returns freed memory"),
        "reserved_gib": SourcedValue(
            taken, f"{stamp}: resident memory of Python, torch and its compiler before the model is built"
        ),
        "cores": SourcedValue(machine.count, f"{stamp}: cores that a process may use"),
        "fitted": SourcedValue([], "no value in this file is fitted to runs"),
    }


def gpu_values(
    machine: CalibratedMachine, result: CalibrationResult, base: Hardware
) -> dict[str, SourcedValue]:
    """Return the values of a GPU. Shares of the base's peaks are measured, and the links within the node if
    it has several GPUs."""
    stamp, curves = _stamp(machine), product_curves(result.compute)
    values = {item.name: _copied(item.name, base) for item in dataclasses.fields(base) if item.name != "name"}
    memory_gib = torch.cuda.get_device_properties(0).total_memory / GIB
    values |= {
        "device_names": SourcedValue([machine.name], "torch.cuda.get_device_name()"),
        "memory_gib": SourcedValue(memory_gib, "total_memory as CUDA reports it"),
        **_rates(stamp, result, curves, base.peak_tflops, base),
        "memory_efficiency": _memory_efficiency(stamp, result, 1e9 * base.memory_gb_s),
        "reserved_gib": SourcedValue(
            median_of(result.compute, "taken_gib"),
            f"{stamp}: context and libraries, before the model is built",
        ),
        "fitted": SourcedValue([], "no value in this file is fitted to runs"),
    }
    return values | ({"node": _node(stamp, result.timings)} if result.timings else {})


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
    result: CalibrationResult,
    curves: Mapping[str, Any],
    peaks: Mapping[str, float],
    base: Hardware | None = None,
) -> dict[str, SourcedValue]:
    """Return matmul and attention as shares of the peaks, and operation_s. Dtypes that were not measured are
    copied from the base."""
    matmul = {
        dtype: [(size, rate / 1e12 / peaks[dtype]) for size, rate in curve] for dtype, curve in curves.items()
    }
    copied = {dtype: curve for dtype, curve in base.matmul.items() if dtype not in matmul} if base else {}
    note = f"; {', '.join(copied)}: as in {base.name}.yaml" if base and copied else ""
    how = f"{stamp}: GFLOP and share of the peak, medians, forward and both gradients together{note}"
    values = {"matmul": SourcedValue({**matmul, **copied}, how)}
    for key in ATTENTION:
        shares = {
            dtype: statistics.median(process[key][dtype] for process in result.compute) / 1e12 / peaks[dtype]
            for dtype in curves
        }
        values[key] = SourcedValue(shares, f"{stamp}: the model's causal attention, several lengths")
    source = f"{stamp}: per operation of a chain on one number, forward and backward"
    return {**values, "operation_s": SourcedValue(median_of(result.compute, "operation_s"), source)}


def _memory_efficiency(stamp: str, result: CalibrationResult, copy_bytes_s: float) -> SourcedValue:
    share = median_of(result.compute, "memory_bytes_s") / copy_bytes_s
    return SourcedValue(
        share, f"{stamp}: norm, SwiGLU and AdamW, compiled, counting bytes that must be read and written"
    )


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
    return ", ".join([*parts, "--quick"] if machine.quick else parts)


def _cpu_memory_gib() -> float:
    """Return the host memory in GiB, or the container's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, memory_limit_bytes() or total) / GIB
