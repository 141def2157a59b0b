"""Operators of a CPU with the time that each takes itself, read in the order in which the profiler writes
them: every thread's by their starts, callers before what they call."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.tools.trace.flops import Work
from meshwright.tools.trace.kernel_names import COMPILED, HASH_SHOWN, graph_name
from meshwright.tools.trace.kernel_rows import Tally
from meshwright.tools.trace.labels import counts_as_compute, is_wait, parse_label
from meshwright.tools.trace.roofs import Roof

NS = 1e-9
Place = tuple[str, str]  # unit, phase


@dataclass(slots=True)
class _Call:
    """An operator that has begun; `inside_ns`: what it called. `tally`: None for one that only waits."""

    tally: "_Operator | None"
    work: Work | None
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

    def add_operator(self, event: Mapping[str, Any], work: Work | None, roof: Roof | None) -> None:
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
