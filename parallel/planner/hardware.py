"""Machine kinds: one small YAML each in configs/hardware, every number with its source.

A file has the keys of `Hardware` but its name, which is the file's. A curve is a list of pairs, or one number
that holds for every size.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

from meshwright.parallel.errors import PlanError
from meshwright.parallel.yaml_io import YamlError, load_mapping

HARDWARE_FOLDER = Path(__file__).resolve().parents[2] / "configs" / "hardware"
MOST_FITTED = 4
COLLECTIVES = frozenset({"all_gather", "reduce_scatter", "all_reduce"})
RATES = ("matmul", "attention_forward", "attention_backward")  # shares of the peak, by dtype
Curve = tuple[tuple[float, float], ...]  # (size, share) in ascending order of size


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

    gb_s: float
    latency_s: float
    efficiency: Mapping[str, Curve]


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
    memory_gib: float
    memory_gb_s: float
    peak_tflops: Mapping[str, float]
    matmul: Mapping[str, Curve]
    attention_forward: Mapping[str, float]
    attention_backward: Mapping[str, float]
    attention_kernels: Mapping[str, float]
    memory_efficiency: float
    operation_s: float
    node: Link
    network: Link
    host_gb_s: float
    host_memory_gib: float
    overlaps: bool
    slowdown: float
    reserved_share: float
    reserved_gib: float
    cores: int
    fitted: tuple[str, ...]


def share_at(curve: Curve, size: float) -> float:
    """The curve's share at a size, interpolated over the logarithm of the size, and its ends' beyond them."""
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
    reader = _Reader()
    values = reader.keys(load_mapping(path), "", [item.name for item in dataclasses.fields(Hardware)][1:])
    hardware = (
        Hardware(name=path.stem, **{key: reader.value(key, value) for key, value in values.items()})
        if values
        else None
    )
    if hardware is None or reader.mistakes or reader.check(hardware):
        raise YamlError("\n".join(f"{path}: {mistake}" for mistake in reader.mistakes))
    return hardware


class _Reader:
    """Turns a file's values into those of Hardware, and keeps what is wrong with them."""

    def __init__(self) -> None:
        self.mistakes: list[str] = []

    def keys(self, mapping: Any, place: str, wanted: list[str]) -> dict[str, Any]:
        """The mapping, if it has exactly the wanted keys, else nothing."""
        if not isinstance(mapping, dict):
            self.mistakes.append(
                f"{place} must be a mapping with the keys {', '.join(wanted)}, not {mapping!r}"
            )
            return {}
        before = len(self.mistakes)
        for key in mapping.keys() - set(wanted):
            near = difflib.get_close_matches(str(key), wanted, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(wanted)}."
            self.mistakes.append(f"unknown key {_join(place, key)}. {hint}")
        self.mistakes += [f"{_join(place, key)} is missing" for key in wanted if key not in mapping]
        return mapping if len(self.mistakes) == before else {}

    def value(self, key: str, value: Any) -> Any:
        """One top-level key's value."""
        match key:
            case "device_names" | "fitted":
                return self.words(key, value)
            case "node" | "network":
                return self.link(key, value)
            case "peak_tflops" | "attention_forward" | "attention_backward" | "attention_kernels":
                return {
                    dtype: self.number(_join(key, dtype), rate)
                    for dtype, rate in self.mapping(key, value).items()
                }
            case "matmul":
                return {
                    dtype: self.curve(_join(key, dtype), shares)
                    for dtype, shares in self.mapping(key, value).items()
                }
            case "overlaps":
                return self.overlaps(value)
            case _:
                return self.number(key, value)

    def number(self, place: str, value: Any) -> float:
        """A number that is not negative."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            self.mistakes.append(f"{place} must be a number, 0 or more, not {value!r}")
            return 0.0
        return value if place == "cores" else float(value)

    def overlaps(self, value: Any) -> bool:
        if not isinstance(value, bool):
            self.mistakes.append(f"overlaps must be true or false, not {value!r}")
        return value is True

    def words(self, place: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            self.mistakes.append(f"{place} must be a list of words, not {value!r}")
            return ()
        return tuple(value)

    def mapping(self, place: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.mistakes.append(f"{place} must be a mapping, not {value!r}")
            return {}
        return value

    def link(self, place: str, value: Any) -> Link:
        parts = self.keys(value, place, [item.name for item in dataclasses.fields(Link)])
        if not parts:
            return Link(0.0, 0.0, {})
        gb_s, latency_s = (self.number(_join(place, key), parts[key]) for key in ("gb_s", "latency_s"))
        shares = self.keys(parts["efficiency"], _join(place, "efficiency"), sorted(COLLECTIVES))
        curves = {name: self.curve(f"{place}.efficiency.{name}", share) for name, share in shares.items()}
        return Link(gb_s, latency_s, curves)

    def curve(self, place: str, value: Any) -> Curve:
        """Pairs in ascending order, each share above 0; one number is a pair for every size."""
        pairs = value if isinstance(value, list) else [[1, value]]
        if not pairs or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            self.mistakes.append(f"{place} must be a number or a list of pairs [size, share], not {value!r}")
            return ((1.0, 1.0),)
        curve = tuple((self.number(place, size), self.number(place, share)) for size, share in pairs)
        sizes = [size for size, _ in curve]
        if sizes[0] <= 0 or sizes != sorted(set(sizes)) or not all(share > 0 for _, share in curve):
            self.mistakes.append(
                f"{place}: sizes must be above 0 and ascend, and shares must be above 0: {value!r}"
            )
        return curve

    def check(self, kind: Hardware) -> list[str]:
        """What is wrong between keys, or with a value that must be above 0."""
        for key in ("memory_gib", "memory_gb_s", "memory_efficiency", "host_gb_s"):
            if not getattr(kind, key):
                self.mistakes.append(f"{key} must be above 0")
        self.mistakes += [
            f"{place}.gb_s must be above 0" for place in ("node", "network") if not getattr(kind, place).gb_s
        ]
        for key in RATES:
            shares = getattr(kind, key)
            self.mistakes += [
                f"{key}.{dtype}: peak_tflops has no such dtype" for dtype in shares.keys() - kind.peak_tflops
            ]
            self.mistakes += [
                f"{key}.{dtype} is missing" for dtype in ("bfloat16", "float32") if not shares.get(dtype)
            ]
        if not kind.attention_kernels or not all(kind.attention_kernels.values()):
            self.mistakes.append("attention_kernels must name a kernel, and each one's share must be above 0")
        if not isinstance(kind.cores, int):
            self.mistakes.append(f"cores must be a whole number, not {kind.cores!r}")
        if len(kind.fitted) > MOST_FITTED:
            self.mistakes.append(
                f"fitted names {len(kind.fitted)} values: more than {MOST_FITTED} prove nothing"
            )
        return self.mistakes


def _join(place: str, key: object) -> str:
    return f"{place}.{key}" if place else str(key)
