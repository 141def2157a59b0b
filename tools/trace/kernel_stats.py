"""A row for each kernel, with a readable name, the unit that a compiled graph is of, and how what is known of
its calls adds up."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from meshwright.tools.trace.roofline import OperatorWork, Roof

LONGEST = 64  # characters
COMPILED = re.compile(r"## Call CompiledFxGraph (\w+) ##")
HASH_SHOWN = 8  # characters of a graph's hash: enough to find it in inductor's cache
_PARENTHESES = re.compile(r"\(anonymous namespace\)::|\(anonymous class\)")
# Of a template's arguments, the words that say what it computes, and those that only seem to.
_TELLING = re.compile(
    r"\w*Functor\w*|\w*(?:Ops|FwdSm\d+|BwdSm\d+)\b|\w*(?:gemm|Gemm|GEMM)\w*|\w{3,}_kernel\w*"
)
_VAGUE = re.compile(
    r"gemm|gpu_kernel_impl\w*|gpu_kernel|enable_\w+|\w+_traits|device_kernel|elementwise_kernel"
)
_NUMBERED = re.compile(r"(.+)\.\d+")


@cache
def short_name(kernel: str) -> str:
    """A kernel's name for a table: without types, namespaces and addresses; Triton's, cuBLAS's and cuDNN's as
    they are, with their middle left out where they are long."""
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
    """Both ends of a long name: Triton's end with a number that tells them apart."""
    if len(name) <= LONGEST:
        return name
    half = (LONGEST - 1) // 2
    return f"{name[:half]}…{name[-half:]}"


def graph_name(graph: str, places: Collection[tuple[str, str]]) -> str:
    """Of a compiled graph by its hash, and the units and phases that its calls were in ("", "": in none): the
    one that all share, as "compiled forward of layers.*", else the start of its hash."""
    units, phases = {unit for unit, _ in places}, {phase for _, phase in places}
    stems = {found[1] if (found := _NUMBERED.fullmatch(unit)) else unit for unit in units}
    if "" in units or len(stems) != 1 or len(phases) != 1:
        return f"compiled graph {graph[:HASH_SHOWN]}"
    unit = min(units) if len(units) == 1 else f"{min(stems)}.*"
    return f"compiled {min(phases)} of {unit}"


@dataclass(frozen=True)
class KernelRow:
    """A kernel, or operator, in a step on average.

    Args:
        name: readable; "(causal: half)" where causal attention is counted as half of its operations
        calls_per_step: how often it ran
        seconds_per_step: how long, all calls together
        share: of the seconds of all kernels of its sort: that compute, or that communicate
        tflops: 10^12 operations per second; None where those of a call are not known
        gb_s: 10^9 bytes read or written per second, or, of a collective, the bus bandwidth as nccl-tests
            count it; None likewise, and where they are more than the device's memory can have moved
        roof_share: the time that it would take at the device's roof / the time that it took; None where that
            is not known
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
    """Calls that are counted together: of one kernel or operator, each doing this work, None where that is
    not known.

    Args:
        communication: whether it is a collective
        launched: whether the trace has their launches; of those that it has not, nothing can be known
        thread: on a CPU, -1 on a GPU
        place: the unit and phase that a call of a compiled graph was in
    """

    name: str
    work: OperatorWork | None = None
    communication: bool = False
    launched: bool = True
    thread: int = -1
    place: tuple[str, str] = ("", "")


Calls = tuple[CallKey, int, int]  # how many of a key, and how long they took, in nanoseconds


def rank_rows(calls: Iterable[Calls], steps: int, most: int, roof: Roof | None) -> list[KernelRow]:
    """A row for each name that takes longest: at most so many that compute, then at most so many
    collectives."""
    sorts: dict[bool, dict[str, list[Calls]]] = {False: defaultdict(list), True: defaultdict(list)}
    for key, count, ns in calls:
        sorts[key.communication][key.name].append((key, count, ns))
    rows = []
    for names in sorts.values():
        took = {name: sum(ns for _, _, ns in parts) for name, parts in names.items()}
        for name in sorted(names, key=lambda name: (-took[name], name))[:most]:
            share = took[name] / sum(took.values()) if took[name] else 0.0
            rows.append(_row(names[name], steps, share, roof))
    return rows


def _row(calls: Sequence[Calls], steps: int, share: float, roof: Roof | None) -> KernelRow:
    """Of the calls of one name in so many steps."""
    launched = [each for each in calls if each[0].launched]
    flops = _rate(launched, lambda work: work.flops)
    moved = _rate(launched, lambda work: work.bytes)
    roof_share = _rate(launched, lambda work: roof.least_s(work) if roof else None)
    if flops is None and (roof_share or 0) > 1:  # it stayed in a cache, or was not read as a whole
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
    """Amount per second, if it is known of every call."""
    amounts = [(amount_of(key.work) if key.work else None, count) for key, count, _ in calls]
    all_ns = sum(ns for _, _, ns in calls)
    if not all_ns or any(amount is None for amount, _ in amounts):
        return None
    return sum(amount * count for amount, count in amounts if amount is not None) / (all_ns * 1e-9)
