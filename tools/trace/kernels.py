"""The kernels that take the time of a profiled step, and how near each comes to its device's roofline.

On a GPU: kernels, each with the operator that launched it, by their common external id. On a CPU: operators,
each without the operators that it called. For a compiled graph that leaves its fused loops; matrix products
and attention have their own rows. Events are read in the order in which the profiler writes them: by thread,
by start, callers before callees.

torch's `key_averages` cannot replace this table: it has no dtypes, no bytes and no operations of attention,
counts waits for collectives and autograd's wrappers as operators, and costs the profiled run 0.04 to 0.1 ms
per event.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from meshwright.parallel.planner.hardware import Hardware
from meshwright.tools.trace.events import (
    DEVICE_WORK,
    MESH,
    bytes_sent,
    collective_of,
    counts_as_compute,
    family_of,
    find_collective,
    is_wait,
    parse_label,
    span_of,
)
from meshwright.tools.trace.roofline import OperatorWork, least_s, work_of

MOST_ROWS = 12  # compute kernels, and as many collectives
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
# Bytes per link as a share of the larger side, in a group of n ranks: nccl-tests, doc/PERFORMANCE.md
BUS_SHARE = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}  # times (n - 1) / n
FULL_SIZE = frozenset({"broadcast", "reduce", "send", "recv"})  # share 1
Event = dict[str, Any]


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


# work of each (None if not known), number of calls, all their ns
Calls = tuple[OperatorWork | None, int, int]


@dataclass(slots=True)
class _OpenCall:
    """An operator that has started; `name` is "" if it only waits; `inside_ns`: in those that it called."""

    name: str
    work: OperatorWork | None
    start_ns: int
    end_ns: int
    inside_ns: int = 0


class KernelTable:
    """The calls of each GPU kernel or CPU operator. Memory: a few numbers per operator that launched GPU
    kernels, and a row per name, work and thread."""

    def __init__(self) -> None:
        self._counts = defaultdict[tuple[bool, str, OperatorWork | None, int], list[int]](lambda: [0, 0])
        self._open = defaultdict[int, list[_OpenCall]](list)  # by thread
        self._places = dict[int, tuple[str, int]]()  # by thread: the unit's forward or backward, and its end
        self._gloo_threads = set[int]()
        self._works = dict[OperatorWork, OperatorWork]()  # one object for equal ones
        self._work_of_call = dict[int, OperatorWork]()  # by external id
        self._longest = dict[int, tuple[int, str]]()  # by external id: ns and name of a kernel
        self._has_gpu = False

    def add(self, event: Event) -> None:
        """Add an event of a trace, in the order of the file. An event that the profiler does not write raises
        KeyError, TypeError, ValueError, IndexError, OverflowError or AttributeError."""
        category = event.get("cat")
        if category == "cpu_op":
            self._add_operator(event, event["name"], int(event["tid"]))
        elif category == "user_annotation":
            self._add_annotation(event, event["name"], int(event["tid"]))
        elif category in DEVICE_WORK:
            self._has_gpu = True
            self._add_kernel(event, event["name"], event.get("args") or {})

    def rows(self, steps: int, device: Hardware | None, most: int = MOST_ROWS) -> list[KernelRow]:
        """Return the rows for a profile of `steps` steps: at most `most` compute kernels that take
        longest, then at most `most` collectives. Call once, after the last event."""
        for number in self._open:
            self._end_calls(number, math.inf)
        for external, (ns, name) in self._longest.items():
            self._count(name, ns, self._work_of_call.get(external))
        sorts: dict[bool, dict[str, list[Calls]]] = {False: defaultdict(list), True: defaultdict(list)}
        for (communication, name, work, thread), (count, ns) in self._counts.items():
            if communication or (thread < 0 if self._has_gpu else thread not in self._gloo_threads):
                sorts[communication][name].append((work, count, ns))
        rows = []
        for communication, names in sorts.items():
            total_ns = {name: sum(ns for _, _, ns in parts) for name, parts in names.items()}
            all_ns = sum(total_ns.values()) or 1
            for name in sorted(names, key=lambda name: (-total_ns[name], name))[:most]:
                rows.append(_row(name, names[name], steps, total_ns[name] / all_ns, device, communication))
        return rows

    def _count(
        self,
        name: str,
        ns: int,
        work: OperatorWork | None = None,
        thread: int = -1,
        communication: bool = False,
    ) -> None:
        counts = self._counts[communication, name, work, thread]
        counts[0] += 1
        counts[1] += ns

    def _add_annotation(self, event: Event, name: str, thread: int) -> None:
        """Record a unit's forward or backward, or count a gloo collective, whose bytes are unknown."""
        start_ns, end_ns = span_of(event)
        if name.startswith("gloo:"):
            self._gloo_threads.add(thread)
            self._count(name.replace(":", " "), end_ns - start_ns, communication=True)
        elif (label := parse_label(name)) and label[0] in ("forward", "backward"):
            self._places[thread] = (f"{label[0]} of {family_of(label[1])}", end_ns)

    def _add_operator(self, event: Event, name: str, thread: int) -> None:
        """Count an operator that computes or waits; record any operator's work, which its kernels may do."""
        work = work_of(event)
        if work and (external := (event.get("args") or {}).get("External id")):
            self._work_of_call[int(external)] = self._works.setdefault(work, work)
        waits = is_wait(name)
        if not waits and not counts_as_compute(name):
            return
        start_ns, end_ns = span_of(event)
        self._end_calls(thread, start_ns)
        stack = self._open[thread]
        if stack:
            stack[-1].inside_ns += end_ns - start_ns
        if match := COMPILED.fullmatch(name):
            place, until_ns = self._places.get(thread, ("", 0))
            name = f"compiled {place}" if start_ns < until_ns else f"compiled graph {match[1][:HASH_SHOWN]}"
        stack.append(_OpenCall("" if waits else name, work, start_ns, end_ns))

    def _end_calls(self, thread: int, now_ns: float) -> None:
        """Count the calls that have ended by `now_ns`."""
        stack = self._open[thread]
        while stack and stack[-1].end_ns <= now_ns:
            call = stack.pop()
            if call.name:
                self._count(
                    call.name, max(call.end_ns - call.start_ns - call.inside_ns, 0), call.work, thread
                )

    def _add_kernel(self, event: Event, name: str, args: Event) -> None:
        """Count a kernel, or a copy within, to or from the GPU. Of the kernels that an operator launched, the
        longest did its work; the work of the others (such as reductions of partial sums) is not known."""
        start_ns, end_ns = span_of(event)
        ns, external = end_ns - start_ns, int(args.get("External id", 0))
        if name.startswith("nccl"):
            self._count(_collective_name(name, args), ns, _bus_work(args), communication=True)
        elif event["cat"] != "kernel":
            self._count(short_name(name), ns, _copy_work(name, args))
        else:
            call = ns, short_name(name)
            if external:
                before = self._longest.get(external, (-1, ""))
                if ns > before[0]:
                    self._longest[external], call = call, before
            if call[0] >= 0:
                self._count(call[1], call[0])


def _row(
    name: str, calls: Sequence[Calls], steps: int, share: float, device: Hardware | None, communication: bool
) -> KernelRow:
    flops, moved = _rate(calls, lambda work: work.flops), _rate(calls, lambda work: work.bytes)
    roof_share = _rate(calls, lambda work: least_s(work, device) if device else None)
    if flops is None and (roof_share or 0) > 1:  # the data stayed in a cache, or was read only in part
        moved = roof_share = None
    return KernelRow(
        f"{name} (causal: half)" if any(work and work.halved for work, _, _ in calls) else name,
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
    amounts = [(amount_of(work) if work else None, count) for work, count, _ in calls]
    all_s = sum(ns for _, _, ns in calls) * 1e-9
    if not all_s or any(amount is None for amount, _ in amounts):
        return None
    return sum(amount * count for amount, count in amounts if amount is not None) / all_s


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


def _collective_name(kernel: str, args: Event) -> str:
    """Return a name such as "NCCL all_gather over dp_shard"."""
    group = str(args.get("Process Group Description", ""))
    over = f" over {group.removeprefix(MESH)}" if group.startswith(MESH) else ""
    return f"NCCL {collective_of(kernel, args) or short_name(kernel)}{over}"


def _bus_work(args: Event) -> OperatorWork | None:
    """Return the work of a collective, its bytes on the bus; None if the kernel does not record its size or
    the size of its group."""
    collective = find_collective(str(args.get("Collective name", "")))
    members, share = int(args.get("Group size", 0)), 0.0
    if collective in FULL_SIZE:
        share = 1.0
    elif collective in BUS_SHARE and members:
        share = BUS_SHARE[collective] * (members - 1) / members
    moved = bytes_sent(args) * share
    return OperatorWork(None, moved, on_link=True) if moved else None


def _copy_work(name: str, args: Event) -> OperatorWork | None:
    """Return the work of a copy: within the GPU every byte is read and written; a copy to or from the host
    is on its link."""
    if (size := args.get("bytes")) is None:
        return None
    within = "DtoD" in name
    return OperatorWork(None, float(size) * (2 if within else 1), on_link=not (within or "Memset" in name))
