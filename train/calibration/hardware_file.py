"""The hardware file of a measured machine: the measured keys of `Hardware`, then the others as the file of
another machine has them, with their sources."""

import datetime
import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.planner.hardware import HARDWARE_FOLDER, Hardware, HostCosts, Link, seconds_at
from meshwright.parallel.yaml_io import to_yaml
from meshwright.train.calibration.collectives import Seconds, fit_link
from meshwright.train.calibration.fsdp_unit import EVENTS, UnitTiming
from meshwright.train.memory import memory_limit_bytes

DIGITS = 4  # significant digits: more than repeated measurements agree on


@dataclass(frozen=True)
class Calibration:
    """A measured machine.

    Args:
        device, name: torch's device type, and the device's name
        count: devices, or cores of a CPU
        compute: the result of measure_compute of each process
        collectives_s: seconds of collectives; empty for a single process
        units: of FSDP2 around a tiny and a large unit
        threads: of each process on a CPU
        has_mfu: whether the peak of this GPU is known
    """

    device: str
    name: str
    count: int
    compute: Sequence[Mapping[str, Any]]
    collectives_s: Seconds
    units: Sequence[UnitTiming]
    threads: int = 1
    has_mfu: bool = True

    @property
    def cores(self) -> int:
        """The cores that the processes share; 0 if each has its own device."""
        return self.count if self.device == "cpu" else 0

    def median(self, key: str) -> float:
        """Return the median of a figure over the processes."""
        return statistics.median(process[key] for process in self.compute)

    def rates(self, key: str) -> dict[str, float]:
        """Return the median rates of a device, or of a core of a CPU, by dtype."""
        return {
            dtype: statistics.median(process[key][dtype] for process in self.compute) / self.threads
            for dtype in self.compute[0][key]
        }


def hardware_text(title: str, measured: Calibration, base: Hardware) -> str:
    """Return the text of the hardware file of a machine; what was not measured is that of `base`, with its
    sources."""
    values = measured_values(measured, base)
    others = (HARDWARE_FOLDER / f"{base.name}.yaml").read_text(encoding="utf-8")
    entries = re.findall(r"^((\w+):.*\n(?:[ -].*\n)*)", others, re.MULTILINE)
    lines = [title, f"Measured {datetime.date.today()}, torch {torch.__version__}, {measured.name}."]
    if measured.device == "cpu":
        lines.append(f"Rates are those of one core, with {len(measured.compute)} processes that compute.")
    if copied := sorted(base.matmul.keys() - measured.compute[0]["matmul"].keys()):
        lines.append(f"{', '.join(copied)}: as in {base.name}.yaml, memory_efficiency as measured.")
    if measured.collectives_s:
        lines.append(f"node: fitted to collectives_s, mean error {fit_link(measured.collectives_s)[1]:.0%}.")
    return "".join(
        [
            *(f"# {line}\n" for line in lines),
            *(_entry(key, value) for key, value in values.items()),
            f"# Not measured; from {base.name}.yaml:\n",
            *(entry for entry, key in entries if key not in values),
        ]
    )


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
    curves = {dtype: _curve(measured, dtype) for dtype in measured.compute[0]["matmul"]}
    if measured.device == "cpu":
        bytes_s = measured.median("copy_bytes_s") / measured.threads
        best = {dtype: max(rate for _, rate in curve) / 1e12 for dtype, curve in curves.items()}
        peaks = {**base.peak_tflops, **best}
        values = _cpu_values(measured, peaks, bytes_s)
    else:
        bytes_s, peaks = 1e9 * base.memory_gb_s, dict(base.peak_tflops)
        values = _gpu_values(measured)
    matmul = {d: [(size, rate / 1e12 / peaks[d]) for size, rate in curve] for d, curve in curves.items()}
    values["matmul"] = {**base.matmul, **matmul}
    for key in ("attention_forward", "attention_backward"):
        shares = {dtype: rate / 1e12 / peaks[dtype] for dtype, rate in measured.rates(key).items()}
        values[key] = {**getattr(base, key), **shares}
    moved = {dtype: rate / bytes_s for dtype, rate in measured.rates("memory_bytes_s").items()}
    unmeasured = dict.fromkeys(base.memory_efficiency, next(iter(moved.values())))
    values |= {
        "memory_efficiency": {**unmeasured, **moved},
        "optimizer_efficiency": measured.median("optimizer_bytes_s") / measured.threads / bytes_s,
        "host": host_costs(measured),
        "reserved_gib": measured.median("taken_gib"),
        "collectives_s": measured.collectives_s,
        "fitted": [],
    }
    return values | ({"node": fit_link(measured.collectives_s)[0]} if measured.collectives_s else {})


def _cpu_values(measured: Calibration, peaks: Mapping[str, float], copy_bytes_s: float) -> dict[str, Any]:
    """Return what only a CPU has measured: its peak and its bandwidth are the best rates. It has no MFU."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "device_names": [],
        "memory_gib": min(total, memory_limit_bytes() or total) / GIB,
        "memory_gb_s": copy_bytes_s / 1e9,
        "host_gb_s": copy_bytes_s / 1e9,
        "peak_tflops": peaks,
        "copy_efficiency": copy_share(measured, copy_bytes_s),
        "operation_s": 0.0,  # a CPU launches what it computes: host has the costs
        "cores": measured.cores,
    }


def _gpu_values(measured: Calibration) -> dict[str, Any]:
    return {
        "device_names": [measured.name] if measured.has_mfu else [],
        "memory_gib": torch.cuda.get_device_properties(0).total_memory / GIB,
        "operation_s": measured.median("operation_s"),
    }


def _curve(measured: Calibration, dtype: str) -> list[tuple[float, float]]:
    """Return the operations per second of a core, by GFLOP of a product: medians over the processes, and then
    over products of equal size."""
    by_size: dict[float, list[float]] = {}
    for product in zip(*(process["matmul"][dtype] for process in measured.compute), strict=True):
        by_size.setdefault(product[0][0], []).append(statistics.median(rate for _, rate in product))
    return [(size, statistics.median(rates) / measured.threads) for size, rates in sorted(by_size.items())]


def host_costs(measured: Calibration) -> HostCosts:
    """Return the costs of launching, medians over the processes. FSDP2's is what a tiny unit takes besides
    its collectives."""
    unit_s = _alone_s(measured.units[0], measured) / EVENTS
    operator_s, kernel_s, graph_s = map(measured.median, ("operator_s", "kernel_s", "graph_s"))
    return HostCosts(operator_s, kernel_s, graph_s, unit_s)


def copy_share(measured: Calibration, copy_bytes_s: float) -> float:
    """Return the share of the memory bandwidth that FSDP2's copies reach: those of a large unit, without its
    collectives and FSDP2's fixed cost. At most 1."""
    _, large = measured.units
    seconds = _alone_s(large, measured) - EVENTS * host_costs(measured).unit_s
    alone_s = large.copied_bytes / copy_bytes_s
    return alone_s / max(seconds, alone_s)


def _alone_s(unit: UnitTiming, measured: Calibration) -> float:
    """Return the seconds of a probed unit without its collectives, gathered twice and reduced once, on a core
    of its own: processes that share cores took turns. On a GPU the seconds are the host's alone."""
    if not measured.cores:
        return unit.seconds
    collectives_s = 0.0
    if curves := measured.collectives_s:
        gather_s = seconds_at(curves["all_gather"][unit.members], unit.gathered_bytes)
        scatter_s = seconds_at(curves["reduce_scatter"][unit.members], unit.reduced_bytes)
        collectives_s = 2 * gather_s + scatter_s
    return max(0.0, unit.seconds - collectives_s) / max(1.0, unit.members / measured.cores)
