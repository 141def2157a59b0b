"""Machine kinds: one small YAML each in configs/hardware, every number with its source.

A file has the keys of `Hardware` but its name, which is the file's. A curve is a list of pairs, or one number
that holds for every size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Annotated

import msgspec

from meshwright.parallel.errors import PlanError
from meshwright.parallel.structure import Amount, Natural, Positive, report, structure, wrong_keys
from meshwright.parallel.yaml_io import YamlError, load_mapping

HARDWARE_FOLDER = Path(__file__).resolve().parents[2] / "configs" / "hardware"
MOST_FITTED = 4
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
RATES = ("matmul", "attention_forward", "attention_backward")  # shares of the peak, by dtype
# (size, share) in ascending order of size; or one share for every size
Curve = Annotated[tuple[tuple[Positive, Positive], ...], msgspec.Meta(min_length=1)]


@dataclass(frozen=True)
class Link:
    """What collectives run over: between the devices of a node, or between nodes.

    Args:
        gb_s: bandwidth in one direction in 10^9 bytes per second: per device within a node, per node between
            nodes
        latency_s: seconds that each hop of a ring adds
        efficiency: share of the bandwidth that each collective reaches: all_gather, reduce_scatter,
            all_reduce; a curve over the number of members in a node (of `node`) or the number of nodes (of
            `network`)
    """

    gb_s: Positive
    latency_s: Amount
    efficiency: Mapping[str, Curve | Positive]


@dataclass(frozen=True)
class Hardware:
    """One kind of device, and the machines it stands in.

    Args:
        device_names: what torch calls it
        memory_gib: of one device
        memory_gb_s: bandwidth of its memory, 10^9 bytes per second
        peak_tflops: dense matmul rate by dtype of the inputs
        matmul: share of the peak that a product reaches, by dtype: a curve over its size in GFLOP
        attention_forward, attention_backward: share of the peak that causal attention reaches, by dtype, with
            its best kernel
        attention_kernels: the best kernel and others, each with its rate as a share of the best one's, which
            is the first
        memory_efficiency: share of the memory's bandwidth that other operations reach
        operation_s: seconds that every operation takes beyond its work
        node, network: the links
        host_gb_s: what copies between device and host memory reach, each way, 10^9 bytes per second
        host_memory_gib: of host memory what each device can fill beside its own; 0 where there is none
            beside, as on a CPU
        overlaps: whether collectives run beside computation (streams on a GPU), or stop it (gloo on a CPU)
        slowdown: share of its speed that computation loses while a collective runs beside it
        reserved_share, reserved_gib: share of the peak that the allocator reserves beyond it, and what the
            process takes before, in GiB
        cores: of a CPU, that its processes share; 0 where each process has a device of its own. A CPU's rates
            are those
            of one core while the others are as busy: a process has cores / processes of them
        fitted: the keys whose values were fitted to published runs, at most four
    """

    name: str
    device_names: tuple[str, ...]
    memory_gib: Positive
    memory_gb_s: Positive
    peak_tflops: Mapping[str, Positive]
    matmul: Mapping[str, Curve | Positive]
    attention_forward: Mapping[str, Positive]
    attention_backward: Mapping[str, Positive]
    attention_kernels: Mapping[str, Positive]
    memory_efficiency: Positive
    operation_s: Amount
    node: Link
    network: Link
    host_gb_s: Positive
    host_memory_gib: Amount
    overlaps: bool
    slowdown: Amount
    reserved_share: Amount
    reserved_gib: Amount
    cores: Natural
    fitted: Annotated[tuple[str, ...], msgspec.Meta(max_length=MOST_FITTED)]


def share_at(curve: Curve | float, size: float) -> float:
    """The curve's share at a size, interpolated over the logarithm of the size, and its ends' beyond them."""
    if isinstance(curve, float):
        return curve
    if size <= curve[0][0]:
        return curve[0][1]
    for (low, share), (high, next_share) in pairwise(curve):
        if size <= high:
            return share + (next_share - share) * log(size / low) / log(high / low)
    return curve[-1][1]


@cache
def load_hardware() -> Mapping[str, Hardware]:
    """All known kinds by name. Raises PlanError for a file that describes none."""
    try:
        return {path.stem: read_hardware(path) for path in sorted(HARDWARE_FOLDER.glob("*.yaml"))}
    except YamlError as error:
        raise PlanError(f"machine kind {error}") from None


def find_hardware(device_name: str) -> Hardware | None:
    """The kind that torch's `device_name` is, or None: an unknown device gets no guess."""
    return next((kind for kind in load_hardware().values() if device_name in kind.device_names), None)


def read_hardware(path: Path) -> Hardware:
    """The kind that a file describes. Raises YamlError with all of its mistakes, each naming its key."""
    data = load_mapping(path)
    if "name" in data:
        raise YamlError(f"{path}: unknown key name: the file's own name is the kind's, so leave it out")
    try:
        hardware = structure(Hardware, {**data, "name": path.stem}, str(path))
    except ValueError as error:
        raise YamlError(str(error)) from None
    if mistakes := list(_find_contradictions(hardware)):
        raise YamlError(report(str(path), mistakes))
    return hardware


def _find_contradictions(kind: Hardware) -> Iterator[str]:
    """What is wrong between keys, and in curves."""
    curves = {f"matmul.{dtype}": curve for dtype, curve in kind.matmul.items()}
    for place, link in (("node", kind.node), ("network", kind.network)):
        yield from wrong_keys(link.efficiency, COLLECTIVES, f"{place}.efficiency")
        curves |= {f"{place}.efficiency.{name}": curve for name, curve in link.efficiency.items()}
    for place, curve in curves.items():
        sizes = [] if isinstance(curve, float) else [size for size, _ in curve]
        if sizes != sorted(set(sizes)):
            yield f"{place}: sizes must ascend: {sizes}"
    for key in RATES:
        shares = getattr(kind, key)
        yield from (
            f"{key}.{dtype}: peak_tflops has no such dtype" for dtype in shares.keys() - kind.peak_tflops
        )
        yield from (f"{key}.{dtype} is missing" for dtype in ("bfloat16", "float32") if dtype not in shares)
    if not kind.attention_kernels:
        yield "attention_kernels must name a kernel"
