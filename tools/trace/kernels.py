"""The kernels that take the time of a profiled step, and how near each comes to its device's roofline.

On a GPU: kernels, each with the operator that launched it, by their common external id. On a CPU: operators,
each without the operators that it called. For a compiled graph that leaves its fused loops; matrix products
and attention have their own rows. Operators are read in the order in which the profiler writes them: by
thread, by start, callers before callees.
"""

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwright.tools.trace.events import (
    DEVICE_WORK,
    MESH,
    bytes_sent,
    collective_of,
    counts_as_compute,
    find_collective,
    is_wait,
    parse_label,
    span_of,
)
from meshwright.tools.trace.kernel_stats import (
    COMPILED,
    HASH_SHOWN,
    CallKey,
    Calls,
    KernelRow,
    graph_name,
    rank_rows,
    short_name,
)
from meshwright.tools.trace.roofline import OperatorWork, Roof, work_of

NO_PLACE = ("", "")  # unit, phase
# Bytes per link as a share of the larger side, in a group of n ranks: nccl-tests, doc/PERFORMANCE.md
BUS_SHARE = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}  # times (n - 1) / n
FULL_SIZE = frozenset({"broadcast", "reduce", "send", "recv"})  # share 1
Event = dict[str, Any]


@dataclass(slots=True)
class _OpenCall:
    """An operator that has started; `key` is None if it only waits; `inside_ns`: time in the operators
    that it called."""

    key: CallKey | None
    start_ns: int
    end_ns: int
    inside_ns: int = 0


@dataclass(slots=True)
class _Thread:
    """The open calls of a CPU thread and its current unit and phase."""

    stack: list[_OpenCall] = field(default_factory=list)
    place: tuple[str, str] = NO_PLACE
    place_until_ns: int = 0


class KernelTable:
    """The calls of each GPU kernel or CPU operator. Memory: a few numbers per GPU kernel and per operator
    with known work, and a row per name and shape."""

    def __init__(self) -> None:
        self._calls = defaultdict[CallKey, list[int]](lambda: [0, 0])  # count, ns
        self._threads = defaultdict[int, _Thread](_Thread)
        self._gloo_threads = set[int]()
        self._has_gpu = False
        self._works = dict[OperatorWork, OperatorWork]()
        self._work_of_call = dict[int, OperatorWork]()  # by external id
        # of each GPU kernel that an operator launched: index of its name, external id, ns
        self._launched, self._names = array("q"), dict[str, int]()

    def add(self, event: Event) -> None:
        """Add an event of a trace, in the order of the file. An event that the profiler does not write raises
        KeyError, TypeError, ValueError, IndexError, OverflowError or AttributeError."""
        category = event.get("cat")
        if category == "cpu_op":
            self._add_operator(event, event["name"])
        elif category == "user_annotation":
            self._add_annotation(event, event["name"])
        elif category in DEVICE_WORK:
            self._has_gpu = True
            self._add_kernel(event, event["name"], event.get("args") or {})

    def rows(self, steps: int, roof: Roof | None, most: int = 12) -> list[KernelRow]:
        """Return the rows for a profile of `steps` steps: at most `most` compute kernels that take
        longest, then at most `most` collectives. Call once, after the last event."""
        for number, thread in self._threads.items():
            self._end_calls(number, thread, math.inf)
        return rank_rows(self._of_gpu() if self._has_gpu else self._of_cpu(), steps, most, roof)

    def _count(self, key: CallKey, ns: int) -> None:
        calls = self._calls[key]
        calls[0] += 1
        calls[1] += ns

    def _add_annotation(self, event: Event, name: str) -> None:
        """Record a unit's forward or backward, or count a gloo collective, whose bytes are unknown."""
        number, (start_ns, end_ns) = int(event["tid"]), span_of(event)
        if name.startswith("gloo:"):
            self._gloo_threads.add(number)
            self._count(CallKey(name.replace(":", " "), communication=True, thread=number), end_ns - start_ns)
        elif (label := parse_label(name)) and label[0] in ("forward", "backward"):
            thread = self._threads[number]
            thread.place, thread.place_until_ns = (label[1], label[0]), end_ns

    def _add_operator(self, event: Event, name: str) -> None:
        """Count an operator that computes or waits; record any operator's work, which its kernels may do."""
        work = work_of(event)
        if work and (external := (event.get("args") or {}).get("External id")):
            self._work_of_call[int(external)] = self._works.setdefault(work, work)
        waits = is_wait(name)
        if not waits and not counts_as_compute(name):
            return
        number, (start_ns, end_ns) = int(event["tid"]), span_of(event)
        thread = self._threads[number]
        self._end_calls(number, thread, start_ns)
        if thread.stack:
            thread.stack[-1].inside_ns += end_ns - start_ns
        # only graphs are named after their place
        placed = name.startswith("## ") and start_ns < thread.place_until_ns
        place = thread.place if placed else NO_PLACE
        key = None if waits else CallKey(name, work, thread=number, place=place)
        thread.stack.append(_OpenCall(key, start_ns, end_ns))

    def _end_calls(self, number: int, thread: _Thread, now_ns: float) -> None:
        """Count the calls that have ended by `now_ns`."""
        while thread.stack and thread.stack[-1].end_ns <= now_ns:
            call = thread.stack.pop()
            if call.key is not None:
                self._count(call.key, max(call.end_ns - call.start_ns - call.inside_ns, 0))

    def _add_kernel(self, event: Event, name: str, args: Event) -> None:
        """Count a kernel, or a copy within, to or from the GPU."""
        start_ns, end_ns = span_of(event)
        if name.startswith("nccl"):
            key = CallKey(_collective_name(name, args), _bus_work(args), communication=True)
            self._count(key, end_ns - start_ns)
        elif event["cat"] != "kernel":
            self._count(CallKey(short_name(name), _copy_work(name, args)), end_ns - start_ns)
        elif external := args.get("External id"):
            place = self._names.setdefault(short_name(name), len(self._names))
            self._launched.extend((place, int(external), end_ns - start_ns))
        else:
            self._count(CallKey(short_name(name), launched=False), end_ns - start_ns)

    def _of_gpu(self) -> Iterator[Calls]:
        """Yield the calls on a GPU. Of the kernels that an operator launched, the longest did its work;
        the work of the others (such as reductions of partial sums) is not known."""
        yield from ((key, count, ns) for key, (count, ns) in self._calls.items() if key.thread < 0)
        launched, names = np.frombuffer(self._launched, np.int64).reshape(-1, 3), list(self._names)
        by_length = np.lexsort((-launched[:, 2], launched[:, 1]))
        _, first = np.unique(launched[by_length, 1], return_index=True)
        longest = set(by_length[first].tolist())
        for i, (place, caller, ns) in enumerate(launched.tolist()):
            work = self._work_of_call.get(caller) if i in longest else None
            yield CallKey(names[place], work), 1, ns

    def _of_cpu(self) -> Iterator[Calls]:
        """Yield the calls on a CPU, except those of gloo's threads; graphs are named after their units,
        and identical names get the start of the hash."""
        calls = {
            key: counts
            for key, counts in self._calls.items()
            if key.communication or key.thread not in self._gloo_threads
        }
        places = defaultdict[str, set[tuple[str, str]]](set)
        for key in calls:
            if match := COMPILED.fullmatch(key.name):
                places[match[1]].add(key.place)
        names = {graph: graph_name(graph, unit_phases) for graph, unit_phases in places.items()}
        name_counts = Counter(names.values())
        for key, (count, ns) in calls.items():
            if match := COMPILED.fullmatch(key.name):
                name = names[match[1]]
                shown = name if name_counts[name] == 1 else f"{name} ({match[1][:HASH_SHOWN]})"
                key = CallKey(shown, key.work, thread=key.thread)
            yield key, count, ns


def _collective_name(kernel: str, args: Event) -> str:
    """Return a name such as "NCCL all_gather over dp_shard"."""
    group = str(args.get("Process Group Description", ""))
    over = f" over {group.removeprefix(MESH)}" if group.startswith(MESH) else ""
    return f"NCCL {collective_of(kernel, args) or short_name(kernel)}{over}"


def _bus_work(args: Event) -> OperatorWork | None:
    """Return the work of a collective, its bytes on the bus; None if the kernel does not record its size or
    the size of its group."""
    collective, members = (
        find_collective(str(args.get("Collective name", ""))),
        int(args.get("Group size", 0)),
    )
    size, share = bytes_sent(args), 0.0
    if collective in FULL_SIZE:
        share = 1.0
    elif collective in BUS_SHARE and members:
        share = BUS_SHARE[collective] * (members - 1) / members
    return OperatorWork(None, size * share, on_link=True) if size and share else None


def _copy_work(name: str, args: Event) -> OperatorWork | None:
    """Return the work of a copy: within the GPU every byte is read and written; a copy to or from the host
    is on its link."""
    if (size := args.get("bytes")) is None:
        return None
    within = "DtoD" in name
    return OperatorWork(None, float(size) * (2 if within else 1), on_link=not (within or "Memset" in name))
