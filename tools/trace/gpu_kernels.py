"""Kernels of a GPU, each with the operator that launched it: the two share an external id."""

from array import array
from collections.abc import Mapping
from typing import Any

from meshwright.tools.trace.flops import Work
from meshwright.tools.trace.kernel_names import short_name
from meshwright.tools.trace.kernel_rows import Tally
from meshwright.tools.trace.labels import find_collective
from meshwright.tools.trace.roofs import Roof
from meshwright.tools.trace.store import WIDTHS

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
        self._works: list[Work] = []
        self._places: dict[Work, int] = {}  # of a work in `_works`
        self._done_by: dict[int, int] = {}  # external id of an operator -> its work's place
        # of each kernel that was launched here
        self._row, self._caller, self._seconds = array("l"), array("q"), array("d")

    def __bool__(self) -> bool:
        return bool(self._tallies)

    def add_operator(self, event: Mapping[str, Any], work: Work | None) -> None:
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
        tally.add_work(Work(None, float(size) * (2 if within else 1)), seconds, roof if on_device else None)
