"""Which kernels take the time of a profiled step, and how near each comes to the roof of its device.

On a GPU the kernels that ran on it, each with the operator that launched it: the two share an external id. On
a CPU its operators, each without those that it called (of a compiled graph what is left are its fused loops:
products and attention have rows of their own), read in the order in which the profiler writes them: every
thread's by their starts, callers before what they call.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.tools.trace.events import (
    DEVICE_WORK,
    WIDTHS,
    counts_as_compute,
    find_collective,
    is_wait,
    parse_label,
)
from meshwright.tools.trace.kernel_stats import (
    COMPILED,
    HASH_SHOWN,
    KernelRow,
    Tally,
    graph_name,
    ranked,
    short_name,
)
from meshwright.tools.trace.reader import read_events
from meshwright.tools.trace.roofline import OperatorWork, Roof, work_of
from meshwright.train.errors import DataError

NS = 1e-9
Place = tuple[str, str]  # unit, phase


@dataclass(slots=True)
class _Call:
    """An operator that has begun; `inside_ns`: what it called. `tally`: None for one that only waits."""

    tally: "_Operator | None"
    work: OperatorWork | None
    start_ns: int
    end_ns: int
    inside_ns: int = 0


class _Operator:
    """One name on one thread, and where it was called."""

    __slots__ = ("places", "tally")

    def __init__(self, name: str) -> None:
        self.tally, self.places = Tally(name), set[Place]()


class _Thread:
    """What one thread does."""

    def __init__(self) -> None:
        self.operators: dict[str, _Operator] = {}
        self.stack: list[_Call] = []
        self.place: Place = ("", "")
        self.place_until_ns = 0
        self.is_gloos = False


class CpuTable:
    """The threads of a process, without those on which gloo carries out its collectives."""

    def __init__(self) -> None:
        self._threads: dict[int, _Thread] = {}
        self._collectives: dict[str, Tally] = {}

    def add_annotation(self, event: Mapping[str, Any]) -> None:
        """A unit's forward or backward, or a collective of gloo's, whose bytes are not noted."""
        thread, name = self._thread(event), event["name"]
        if name.startswith("gloo:"):
            thread.is_gloos = True
            tally = self._collectives.setdefault(name, Tally(name.replace(":", " "), communication=True))
            tally.calls += 1
            tally.seconds += event["dur"] * 1e-6
        elif (label := parse_label(name)) and label[0] in ("forward", "backward"):
            thread.place, thread.place_until_ns = (label[1], label[0]), _span(event)[1]

    def add_operator(self, event: Mapping[str, Any], work: OperatorWork | None, roof: Roof | None) -> None:
        """A call of an operator that computes, doing this work if it is known, or waits."""
        name = event["name"]
        if not counts_as_compute(name) and not is_wait(name):
            return
        thread, (start_ns, end_ns) = self._thread(event), _span(event)
        _end_calls(thread, start_ns, roof)
        if thread.stack:
            thread.stack[-1].inside_ns += end_ns - start_ns
        operator = None
        if not is_wait(name):
            operator = thread.operators.setdefault(name, _Operator(name))
            operator.places.add(thread.place if start_ns < thread.place_until_ns else ("", ""))
        thread.stack.append(_Call(operator, work, start_ns, end_ns))

    def _thread(self, event: Mapping[str, Any]) -> _Thread:
        return self._threads.setdefault(int(event["tid"]), _Thread())

    def tallies(self, roof: Roof | None) -> list[Tally]:
        """Once, after the last event."""
        joined: dict[str, Tally] = {}
        for thread in self._threads.values():
            _end_calls(thread, None, roof)
        working = [thread for thread in self._threads.values() if not thread.is_gloos]
        for thread in working:
            for name, operator in thread.operators.items():
                joined.setdefault(name, Tally(name)).join(operator.tally)
        _name_graphs(joined, working)
        return [*joined.values(), *self._collectives.values()]


def _span(event: Mapping[str, Any]) -> tuple[int, int]:
    start_ns = round(event["ts"] * 1000)
    return start_ns, start_ns + round(event["dur"] * 1000)


def _end_calls(thread: _Thread, now_ns: int | None, roof: Roof | None) -> None:
    """Count the calls that are over by now."""
    while thread.stack and (now_ns is None or thread.stack[-1].end_ns <= now_ns):
        call = thread.stack.pop()
        if call.tally is not None:
            tally, seconds = call.tally.tally, max(call.end_ns - call.start_ns - call.inside_ns, 0) * NS
            tally.calls += 1
            tally.seconds += seconds
            tally.add_work(call.work, seconds, roof)


def _name_graphs(tallies: Mapping[str, Tally], threads: list[_Thread]) -> None:
    """By the units that they are of; graphs that would be called alike get the start of their hash too."""
    names: dict[str, list[tuple[str, Tally]]] = {}
    for name, tally in tallies.items():
        if found := COMPILED.fullmatch(name):
            places = {
                place
                for thread in threads
                if name in thread.operators
                for place in thread.operators[name].places
            }
            names.setdefault(graph_name(found[1], places), []).append((found[1], tally))
    for name, graphs in names.items():
        for graph, tally in graphs:
            tally.name = name if len(graphs) == 1 else f"{name} ({graph[:HASH_SHOWN]})"


MESH = "mesh_"  # DeviceMesh describes the group of an axis as mesh_AXIS
US = 1e-6
# Bytes that each link carries, as a share of the larger side, in a group of n: nccl-tests, doc/PERFORMANCE.md
BUS_SHARE = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}  # times (n - 1) / n
WHOLE = frozenset({"broadcast", "reduce", "send", "recv"})  # all of it


class GpuTable:
    """What is noted of each event."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, bool], int] = {}
        self._tallies: list[Tally] = []
        self._works: list[OperatorWork] = []
        self._places: dict[OperatorWork, int] = {}  # of a work in `_works`
        self._done_by: dict[int, int] = {}  # external id of an operator -> its work's place
        # of each kernel that was launched here
        self._row, self._caller, self._seconds = array("l"), array("q"), array("d")

    def __bool__(self) -> bool:
        return bool(self._tallies)

    def add_operator(self, event: Mapping[str, Any], work: OperatorWork | None) -> None:
        """On the CPU, with its work if that is known."""
        if work is not None and (number := (event.get("args") or {}).get("External id")):
            place = self._places.setdefault(work, len(self._works))
            if place == len(self._works):
                self._works.append(work)
            self._done_by[int(number)] = place

    def add_kernel(self, event: Mapping[str, Any], roof: Roof | None) -> None:
        """A kernel, or a copy within, to or from the GPU."""
        args, seconds = event.get("args") or {}, float(event["dur"]) * US
        tally, row = self._find(event["name"], args)
        tally.calls += 1
        tally.seconds += seconds
        if tally.communication:
            tally.bytes.add(_bus_bytes(args), seconds)
        elif event["cat"] != "kernel":
            _add_copy(tally, event["name"], args, seconds, roof)
        elif number := args.get("External id"):
            self._row.append(row)
            self._caller.append(int(number))
            self._seconds.append(seconds)

    def _find(self, kernel: str, args: Mapping[str, Any]) -> tuple[Tally, int]:
        communication = kernel.startswith("nccl")
        name = _collective_name(kernel, args) if communication else short_name(kernel)
        row = self._names.setdefault((name, communication), len(self._tallies))
        if row == len(self._tallies):
            self._tallies.append(Tally(name, communication))
        return self._tallies[row], row

    def tallies(self, roof: Roof | None) -> list[Tally]:
        """Once, after the last event: of the kernels that an operator launched, the longest did its work, and
        of the others (that sum up its parts, say) nothing is known."""
        longest: dict[int, int] = {}
        for i, caller in enumerate(self._caller):
            if caller not in longest or self._seconds[i] > self._seconds[longest[caller]]:
                longest[caller] = i
        for i, caller in enumerate(self._caller):
            place = self._done_by.get(caller) if longest[caller] == i else None
            work = self._works[place] if place is not None else None
            self._tallies[self._row[i]].add_work(work, self._seconds[i], roof)
        return self._tallies


def _collective_name(kernel: str, args: Mapping[str, Any]) -> str:
    """As "NCCL all_gather over dp_shard"."""
    collective = (
        find_collective(str(args.get("Collective name", ""))) or find_collective(kernel) or short_name(kernel)
    )
    group = str(args.get("Process Group Description", ""))
    return f"NCCL {collective}" + (f" over {group.removeprefix(MESH)}" if group.startswith(MESH) else "")


def _bus_bytes(args: Mapping[str, Any]) -> float | None:
    """None where the kernel does not say what it carries, in a group of how many."""
    collective, members = (
        find_collective(str(args.get("Collective name", ""))),
        int(args.get("Group size", 0)),
    )
    larger = max(int(args.get("In msg nelems", 0)), int(args.get("Out msg nelems", 0)))
    width = WIDTHS.get(str(args.get("dtype", "")), 0)
    if not larger * width:
        return None
    if collective in WHOLE:
        return float(larger * width)
    return (
        larger * width * BUS_SHARE[collective] * (members - 1) / members
        if collective in BUS_SHARE and members
        else None
    )


def _add_copy(tally: Tally, name: str, args: Mapping[str, Any], seconds: float, roof: Roof | None) -> None:
    """Within the GPU every byte is read and written; one to or from the host has no roof here."""
    size = args.get("bytes")
    if size is None:
        tally.add_work(None, seconds, roof)
    else:
        within = "DtoD" in name
        on_device = within or name.startswith("Memset")
        tally.add_work(
            OperatorWork(None, float(size) * (2 if within else 1)), seconds, roof if on_device else None
        )


def top_kernels(path: Path, steps: int, roof: Roof | None, most: int = 12) -> list[KernelRow]:
    """The kernels of a trace of so many steps that take longest, then its collectives, at most so many of
    each.

    The trace is read once, as a stream: in memory are a few numbers for every kernel of a GPU and operator
    that is a product, or a row for every name of a CPU's. Raises DataError for a trace that is broken.
    """
    gpu, cpu = GpuTable(), CpuTable()
    for event in read_events(path):
        if event.get("ph") != "X":
            continue
        try:
            match event.get("cat"):
                case "cpu_op":
                    work = work_of(event)
                    gpu.add_operator(event, work)
                    cpu.add_operator(event, work, roof)
                case "user_annotation":
                    cpu.add_annotation(event)
                case kind if kind in DEVICE_WORK:
                    gpu.add_kernel(event, roof)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            raise DataError(
                f"{path}: an event of no kind that torch's profiler writes: {str(event)[:200]}"
            ) from None
    return ranked(gpu.tallies(roof) if gpu else cpu.tallies(roof), steps, most)
