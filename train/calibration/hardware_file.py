"""The hardware file of a measured machine: the measured keys of `Hardware`, and the others as the file of
another machine has them."""

import datetime
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.planner.hardware import Hardware, HostCosts, Link
from meshwright.parallel.yaml_io import to_yaml
from meshwright.train.calibration.collectives import Seconds, fit_link
from meshwright.train.memory import memory_limit_bytes

DIGITS = 4  # significant digits: more than repeated measurements agree on


@dataclass(frozen=True)
class Calibration:
    """A measured machine.

    Args:
        device, name: torch's device type, and the device's name
        cores: of a CPU, which the processes share; 0 if each has its own device
        processes: that measured `compute` at the same time
        compute: the result of measure_compute, medians over the processes
        collectives_s: seconds of collectives; empty for a single process
        has_mfu: whether the peak of this GPU is known
    """

    device: str
    name: str
    cores: int
    processes: int
    compute: Mapping[str, Any]
    collectives_s: Seconds
    has_mfu: bool = True


def hardware_text(title: str, measured: Calibration, base: Hardware) -> str:
    """Return the text of the hardware file of a machine; what was not measured is that of `base`."""
    values = measured_values(measured, base)
    others = {key: value for key, value in vars(base).items() if key not in ("name", *values)}
    lines = [title, f"Measured {datetime.date.today()}, torch {torch.__version__}, {measured.name}."]
    if measured.device == "cpu":
        lines.append(f"Rates are those of one core, with {measured.processes} processes that compute.")
    if copied := sorted(base.matmul.keys() - measured.compute["matmul"].keys()):
        lines.append(f"{', '.join(copied)}: as in {base.name}.yaml, memory_efficiency as measured.")
    if measured.collectives_s:
        lines.append(f"node: fitted to collectives_s, mean error {fit_link(measured.collectives_s)[1]:.0%}.")
    lines.append(f"As in {base.name}.yaml: {', '.join(others)}.")
    entries = (_entry(key, value) for key, value in {**values, **others}.items())
    return "".join([*(f"# {line}\n" for line in lines), *entries])


def _entry(key: str, value: Any) -> str:
    plain = _plain(value)
    # None writes collections of scalars on one line
    flow_style = None if isinstance(plain, list | dict) else False
    return to_yaml({key: plain}, default_flow_style=flow_style, width=math.inf)


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


def measured_values(measured: Calibration, base: Hardware) -> dict[str, Any]:
    """Return the measured keys of Hardware. Of a dtype that was not measured the base has the shares of its
    peak, and the measured one stands for its memory bandwidth."""
    compute = measured.compute
    curves = {dtype: _curve(products) for dtype, products in compute["matmul"].items()}
    if measured.device == "cpu":
        bytes_s = compute["copy_bytes_s"]
        best = {dtype: max(rate for _, rate in curve) / 1e12 for dtype, curve in curves.items()}
        peaks = {**base.peak_tflops, **best}
        values = _cpu_values(measured, peaks, bytes_s)
    else:
        bytes_s, peaks = 1e9 * base.memory_gb_s, dict(base.peak_tflops)
        values = {
            "device_names": [measured.name] if measured.has_mfu else [],
            "memory_gib": torch.cuda.get_device_properties(0).total_memory / GIB,
            "operation_s": compute["operation_s"],
        }
    matmul = {d: [(size, rate / 1e12 / peaks[d]) for size, rate in curve] for d, curve in curves.items()}
    values["matmul"] = {**base.matmul, **matmul}
    for key in ("attention_forward", "attention_backward"):
        shares = {dtype: rate / 1e12 / peaks[dtype] for dtype, rate in compute[key].items()}
        values[key] = {**getattr(base, key), **shares}
    moved = {dtype: rate / bytes_s for dtype, rate in compute["memory_bytes_s"].items()}
    unmeasured = dict.fromkeys(base.memory_efficiency, next(iter(moved.values())))
    launching = {name: compute[name] for name in ("operator_s", "kernel_s", "graph_s")}
    slower = compute["operator_s"] / base.host.operator_s  # than the base's host, in FSDP2 too
    values |= {
        "memory_efficiency": {**unmeasured, **moved},
        "optimizer_efficiency": compute["optimizer_bytes_s"] / bytes_s,
        "host": HostCosts(**launching, unit_s=base.host.unit_s * slower),
        "reserved_gib": compute["taken_gib"],
        "collectives_s": measured.collectives_s,
        "fitted": [],
    }
    return values | ({"node": fit_link(measured.collectives_s)[0]} if measured.collectives_s else {})


def _curve(products: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the operations per second by GFLOP of a product: medians over products of equal size."""
    by_size: dict[float, list[float]] = {}
    for size, rate in products:
        by_size.setdefault(size, []).append(rate)
    return [(size, statistics.median(rates)) for size, rates in sorted(by_size.items())]


def _cpu_values(measured: Calibration, peaks: Mapping[str, float], copy_bytes_s: float) -> dict[str, Any]:
    """Return what only a CPU has measured: its peak and its bandwidth are the best rates. It has no MFU."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "device_names": [],
        "memory_gib": min(total, memory_limit_bytes() or total) / GIB,
        "memory_gb_s": copy_bytes_s / 1e9,
        "host_gb_s": copy_bytes_s / 1e9,
        "peak_tflops": peaks,
        "operation_s": 0.0,  # a CPU launches what it computes: host has the costs
        "cores": measured.cores,
    }
