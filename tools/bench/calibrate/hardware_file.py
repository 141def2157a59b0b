"""What a calibration found, as a hardware file: the keys of `Hardware`, each with a comment that says where
its value comes from."""

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
from meshwright.tools.bench.calibrate.measure import CollectiveTiming, fit_link
from meshwright.train.cgroups import memory_limit_bytes

DIGITS = 4  # significant: more than repeats agree on


@dataclass(frozen=True)
class Noted:
    """A value of `Hardware`, and where it comes from."""

    value: Any
    source: str


def hardware_text(title: str, values: Mapping[str, Noted]) -> str:
    """The file, with a `title` on top; `values` by key of Hardware, all but the name. Each one's source
    stands behind its key."""
    text = f"# {title}\n"
    for key in (item.name for item in dataclasses.fields(Hardware) if item.name != "name"):
        value = _plain(values[key].value)
        inline = None if isinstance(value, list | dict) else False  # None: what holds nothing nested
        written = yaml.safe_dump({key: value}, default_flow_style=inline, sort_keys=False, width=math.inf)
        text += written.replace("\n", f"  # {values[key].source}\n", 1)
    return text


def _plain(value: Any) -> Any:
    """As YAML has it, numbers of DIGITS significant digits."""
    match value:
        case float():
            return float(f"{value:.{DIGITS}g}")
        case Link():
            return _plain(vars(value))
        case Mapping():
            return {key: _plain(inner) for key, inner in value.items()}
        case ((_, share),):  # a curve of one point holds everywhere
            return _plain(share)
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case _:
            return value


def source_in(path: Path, key: str) -> str:
    """What the comment behind a key of a hardware file says; "" if there is none."""
    match = re.search(rf"^{key}:[^#\n]*# (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else ""


ATTENTION = ("attention_forward", "attention_backward")


@dataclass(frozen=True)
class Found:
    """What was measured: `compute` of each process, as calibrate_compute gives it; collectives, if there were
    any to measure."""

    compute: Sequence[Mapping[str, Any]]
    timings: Sequence[CollectiveTiming]


@dataclass(frozen=True)
class CalibratedMachine:
    """What is measured: torch's device, its name, and how many there are (a CPU counts its cores)."""

    device: str
    name: str
    count: int
    quick: bool


def cpu_values(machine: CalibratedMachine, found: Found, base: Hardware) -> dict[str, Noted]:
    """A CPU: all but the network is measured; a rate's peak is the best that was measured. Rates are those of
    a core."""
    stamp = _stamp(machine)
    curves = product_curves(found.compute)
    peaks = {dtype: max(rate for _, rate in curve) / 1e12 for dtype, curve in curves.items()}
    copy, taken = (middle(found.compute, key) for key in ("copy_bytes_s", "taken_gib"))
    return {
        "device_names": Noted([], "never a device's name: a CPU has no MFU"),
        "memory_gib": Noted(_cpu_memory_gib(), f"{stamp}: of the whole machine"),
        "memory_gb_s": Noted(
            copy / 1e9, f"{stamp}: of one core, a copy of 128 MiB while {len(found.compute)} processes do so"
        ),
        "peak_tflops": Noted(peaks, f"{stamp}: of one core, the best of the products below"),
        **_rates(stamp, found, curves, peaks),
        "attention_kernels": _taken_over("attention_kernels", base),
        "memory_efficiency": _memory_efficiency(stamp, found, copy),
        "node": _node(stamp, found.timings),
        "network": _taken_over("network", base),
        "host_gb_s": Noted(copy / 1e9, "memory_gb_s: a copy from memory to memory"),
        "host_memory_gib": Noted(0.0, "a CPU's memory is the host's"),
        "overlaps": Noted(False, "gloo's threads take the cores from the computation"),
        "slowdown": Noted(0.0, "nothing runs beside a collective"),
        "reserved_share": Noted(0.0, "the C allocator gives back what is freed"),
        "reserved_gib": Noted(
            taken, f"{stamp}: resident memory of Python, torch and its compiler before a model is made"
        ),
        "cores": Noted(machine.count, f"{stamp}: that a process may use"),
        "fitted": Noted([], "nothing in this file is fitted to runs"),
    }


def gpu_values(machine: CalibratedMachine, found: Found, base: Hardware) -> dict[str, Noted]:
    """A GPU: shares of the base's peaks are measured, and the links within the node where it has several."""
    stamp, curves = _stamp(machine), product_curves(found.compute)
    values = {
        item.name: _taken_over(item.name, base) for item in dataclasses.fields(base) if item.name != "name"
    }
    memory_gib = torch.cuda.get_device_properties(0).total_memory / GIB
    values |= {
        "device_names": Noted([machine.name], "torch.cuda.get_device_name()"),
        "memory_gib": Noted(memory_gib, "total_memory as CUDA reports it"),
        **_rates(stamp, found, curves, base.peak_tflops, base),
        "memory_efficiency": _memory_efficiency(stamp, found, 1e9 * base.memory_gb_s),
        "reserved_gib": Noted(
            middle(found.compute, "taken_gib"), f"{stamp}: context and libraries, before a model is made"
        ),
        "fitted": Noted([], "nothing in this file is fitted to runs"),
    }
    return values | ({"node": _node(stamp, found.timings)} if found.timings else {})


def product_curves(compute: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """By dtype: (GFLOP, operations per second) in ascending order; the median over processes, then over equal
    sizes."""
    curves = {}
    for dtype in compute[0]["matmul"]:
        by_size: dict[float, list[float]] = {}
        for same in zip(*(one["matmul"][dtype] for one in compute), strict=True):
            by_size.setdefault(same[0][0], []).append(statistics.median(rate for _, rate in same))
        curves[dtype] = [(size, statistics.median(rates)) for size, rates in sorted(by_size.items())]
    return curves


def _node(stamp: str, timings: Sequence[CollectiveTiming]) -> Noted:
    link, error = fit_link(timings)
    members = "/".join(map(str, sorted({timing.members for timing in timings})))
    return Noted(
        link,
        f"{stamp}: between {members} processes, latency and bandwidth fitted to medians of several sizes, "
        f"{error:.0%} off on average",
    )


def _rates(
    stamp: str,
    found: Found,
    curves: Mapping[str, Any],
    peaks: Mapping[str, float],
    base: Hardware | None = None,
) -> dict[str, Noted]:
    """Shares of the peaks; dtypes that are not measured are the base's. `operation_s` besides."""
    matmul = {
        dtype: [(size, rate / 1e12 / peaks[dtype]) for size, rate in curve] for dtype, curve in curves.items()
    }
    others = {dtype: curve for dtype, curve in base.matmul.items() if dtype not in matmul} if base else {}
    note = f"; {', '.join(others)}: as in {base.name}.yaml" if base and others else ""
    how = f"{stamp}: GFLOP and share, medians, forward and both gradients together{note}"
    values = {"matmul": Noted({**matmul, **others}, how)}
    for key in ATTENTION:
        shares = {
            dtype: statistics.median(one[key][dtype] for one in found.compute) / 1e12 / peaks[dtype]
            for dtype in curves
        }
        values[key] = Noted(shares, f"{stamp}: the model's causal attention, several lengths")
    source = f"{stamp}: of a chain of operations on one number, forward and backward"
    return {**values, "operation_s": Noted(middle(found.compute, "operation_s"), source)}


def _memory_efficiency(stamp: str, found: Found, copy_bytes_s: float) -> Noted:
    share = middle(found.compute, "memory_bytes_s") / copy_bytes_s
    return Noted(
        share, f"{stamp}: norm, SwiGLU and AdamW, compiled, of bytes that have to be read and written"
    )


def _taken_over(key: str, base: Hardware) -> Noted:
    """The base's value, with its file's own source, and once the file's name."""
    source = source_in(HARDWARE_FOLDER / f"{base.name}.yaml", key)
    where = "" if source.startswith("as in ") else f"as in {base.name}.yaml: "
    return Noted(getattr(base, key), where + (source or "it names no source"))


def middle(compute: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.median(one[key] for one in compute)


def _stamp(machine: CalibratedMachine) -> str:
    parts = [f"measured {datetime.date.today().isoformat()}", f"torch {torch.__version__}", machine.name]
    return ", ".join([*parts, "--quick"] if machine.quick else parts)


def _cpu_memory_gib() -> float:
    """What the machine has, or a container may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, memory_limit_bytes() or total) / GIB
