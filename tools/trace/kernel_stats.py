"""A row per kernel: readable names, the units of compiled graphs, and totals over the calls."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from meshwright.tools.trace.roofline import OperatorWork, Roof

MAX_NAME = 64  # characters
COMPILED = re.compile(r"## Call CompiledFxGraph (\w+) ##")
HASH_SHOWN = 8  # characters of a graph's hash, enough to find it in inductor's cache
_PARENTHESES = re.compile(r"\(anonymous namespace\)::|\(anonymous class\)")
# Words in template arguments that name the computation, and generic ones that do not.
_TELLING = re.compile(
    r"\w*Functor\w*|\w*(?:Ops|FwdSm\d+|BwdSm\d+)\b|\w*(?:gemm|Gemm|GEMM)\w*|\w{3,}_kernel\w*"
)
_VAGUE = re.compile(
    r"gemm|gpu_kernel_impl\w*|gpu_kernel|enable_\w+|\w+_traits|device_kernel|elementwise_kernel"
)
_NUMBERED = re.compile(r"(.+)\.\d+")


@cache
def short_name(kernel: str) -> str:
    """Shorten a kernel's name for a table: drop types, namespaces and addresses; keep names of Triton,
    cuBLAS and cuDNN, with the middle of long ones left out."""
    name = _PARENTHESES.sub("", kernel).removeprefix("void ").strip()
    if "<" not in name and "(" not in name:
        return _cut(name)
    head = re.split(r"[<(]", name, maxsplit=1)[0].rpartition("::")[2].strip() or name
    inside = name[name.index(head) + len(head) :]
    telling = [word for word in _TELLING.findall(inside) if not _VAGUE.fullmatch(word) and word != head]
    if head in ("Kernel", "Kernel2", "device_kernel") and telling:
        return _cut(telling[0])
    return _cut(" ".join([head, *telling[:1]]))


def _cut(name: str) -> str:
    """Keep both ends of a long name, because Triton's names end with the number that distinguishes them."""
    if len(name) <= MAX_NAME:
        return name
    half = (MAX_NAME - 1) // 2
    return f"{name[:half]}…{name[-half:]}"


def graph_name(graph: str, places: Collection[tuple[str, str]]) -> str:
    """Name a compiled graph after the units and phases of its calls ("", "" for a call outside any), such
    as "compiled forward of layers.*"; if they differ, after the start of its hash."""
    units, phases = {unit for unit, _ in places}, {phase for _, phase in places}
    stems = {match[1] if (match := _NUMBERED.fullmatch(unit)) else unit for unit in units}
    if "" in units or len(stems) != 1 or len(phases) != 1:
        return f"compiled graph {graph[:HASH_SHOWN]}"
    unit = min(units) if len(units) == 1 else f"{min(stems)}.*"
    return f"compiled {min(phases)} of {unit}"


@dataclass(frozen=True)
class KernelRow:
    """A kernel or operator, averaged per step.

    Args:
        name: readable; with "(causal: half)" if causal attention counts half of its operations
        calls_per_step: number of calls
        seconds_per_step: duration of all calls
        share: share of the time of all compute kernels or, for a collective, of all collectives
        tflops: 10^12 operations per second; None if the operations of a call are not known
        gb_s: 10^9 bytes read and written per second or, for a collective, the bus bandwidth as nccl-tests
            defines it; None if not known, or if the device's memory could not have moved that much
        roof_share: time at the device's roofline / measured time; None if not known
        communication: whether it is a collective
    """

    name: str
    calls_per_step: float
    seconds_per_step: float
    share: float
    tflops: float | None
    gb_s: float | None
    roof_share: float | None
    communication: bool = False


class CallKey(NamedTuple):
    """Calls that are counted together: one kernel or operator, with the same work (None if not known).

    Args:
        communication: whether it is a collective
        launched: whether the trace has the launches; without them the work is not known
        thread: the CPU thread; -1 on a GPU
        place: unit and phase in which a compiled graph was called
    """

    name: str
    work: OperatorWork | None = None
    communication: bool = False
    launched: bool = True
    thread: int = -1
    place: tuple[str, str] = ("", "")


Calls = tuple[CallKey, int, int]  # key, number of calls, total nanoseconds


def rank_rows(calls: Iterable[Calls], steps: int, most: int, roof: Roof | None) -> list[KernelRow]:
    """Return a row for each of the `most` longest compute kernels, then likewise for collectives."""
    sorts: dict[bool, dict[str, list[Calls]]] = {False: defaultdict(list), True: defaultdict(list)}
    for key, count, ns in calls:
        sorts[key.communication][key.name].append((key, count, ns))
    rows = []
    for names in sorts.values():
        total_ns = {name: sum(ns for _, _, ns in parts) for name, parts in names.items()}
        for name in sorted(names, key=lambda name: (-total_ns[name], name))[:most]:
            share = total_ns[name] / sum(total_ns.values()) if total_ns[name] else 0.0
            rows.append(_row(names[name], steps, share, roof))
    return rows


def _row(calls: Sequence[Calls], steps: int, share: float, roof: Roof | None) -> KernelRow:
    """Sum the calls of one name over `steps` steps."""
    launched = [each for each in calls if each[0].launched]
    flops = _rate(launched, lambda work: work.flops)
    moved = _rate(launched, lambda work: work.bytes)
    roof_share = _rate(launched, lambda work: roof.least_s(work) if roof else None)
    if flops is None and (roof_share or 0) > 1:  # the data stayed in a cache, or was read only in part
        moved = roof_share = None
    name, _, communication, *_ = calls[0][0]
    return KernelRow(
        f"{name} (causal: half)" if any(key.work and key.work.halved for key, _, _ in calls) else name,
        sum(count for _, count, _ in calls) / steps,
        sum(ns for _, _, ns in calls) * 1e-9 / steps,
        share,
        flops and flops / 1e12,
        moved and moved / 1e9,
        roof_share,
        communication,
    )


def _rate(calls: Sequence[Calls], amount_of: Callable[[OperatorWork], float | None]) -> float | None:
    """Return the amount per second; None unless it is known for every call."""
    amounts = [(amount_of(key.work) if key.work else None, count) for key, count, _ in calls]
    all_ns = sum(ns for _, _, ns in calls)
    if not all_ns or any(amount is None for amount, _ in amounts):
        return None
    return sum(amount * count for amount, count in amounts if amount is not None) / (all_ns * 1e-9)
