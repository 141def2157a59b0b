"""The events of a trace in compact tables, and the meaning of annotations and operators, by the names that
train/profiling.py, FSDP2, c10d, gloo and torch.compile give them.

One pass reads a file of any size. Memory: 16 bytes per operator that is not nested in another, 32 per call
that launches work, 40 per kernel (180 for one of NCCL's), 140 per launch of a collective or span of gloo, and
265 per annotation.
"""

import re
from array import array
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.parallel.plan.schema import ROOT
from meshwright.tools.trace.reader import check_header, read_events, read_header
from meshwright.tools.trace.roofline import dtype_of
from meshwright.train.errors import DataError

ROOT_END = "root_post_backward_callback"
WORK_OF = {  # kind of label -> work of the compute lane in it
    "forward": "forward",
    "backward": "backward",
    "all_gather": "copy_in",
    "post_backward_reduce": "copy_in",
    "post_backward_accumulate": "sum",  # of whole gradients
    "post_backward_reshard": "sum",  # its first one: a cast
    "pre_forward": "copy_out",
    "pre_backward": "copy_out",
    "all_gather_copy_out": "copy_out",
    "optimizer": "optimizer",
}
_STEP = re.compile(r"ProfilerStep#(\d+)")
_UNIT_WORK = re.compile(r"(\S+) (forward|backward)")
_FSDP = re.compile(r"FSDP::(\w+)(?: \((.*)\)| for (.*))?")
_COMPILED = "## Call CompiledFxGraph"
# Wrappers of autograd and c10d around operators: not compute themselves, but the operators in them are.
_WRAPPERS = (
    *("autograd::engine::", "torch::autograd::"),
    *("c10d::", "c10d_functional::", "_c10d_functional::", "symm_mem::"),
)
# in names of c10d, gloo and NCCL, with or without underscores; the first match counts
COLLECTIVES = (
    *("reduce_scatter", "all_gather", "all_reduce", "all_to_all", "broadcast", "barrier"),
    *("send", "recv", "gather", "scatter", "reduce"),
)


@dataclass(frozen=True, slots=True)
class Label:
    """An annotation on a CPU thread. `kind`: forward, backward, optimizer, or FSDP2's name, such as
    pre_forward for "FSDP::pre_forward"; `unit` as in plan.yaml, "" if there is none."""

    thread: int
    kind: str
    unit: str
    start_ns: int
    end_ns: int


@cache
def parse_label(name: str) -> tuple[str, str] | None:
    """Return kind and unit of an annotation; None if it is not of a unit, FSDP2 or the optimizer."""
    if match := _FSDP.fullmatch(name):
        of_root = "" if match[1].startswith(("root_", "inputs_", "cast_")) else ROOT
        unit = match[2] or match[3] or of_root
        return match[1], unit.replace(", ", "+")  # several modules are joined as in UnitPlan.name
    if match := _UNIT_WORK.fullmatch(name):
        return match[2], match[1]
    return ("optimizer", "") if name.startswith("Optimizer.step#") else None


@cache
def family_of(unit: str) -> str:
    """Return the unit's name without numbers: units that differ only in numbers are peers."""
    return re.sub(r"\d+", "*", unit)


@cache
def counts_as_compute(name: str) -> bool:
    """Whether a CPU operator counts as compute: an operator with a kernel or a compiled graph, but not a
    wrapper of other operators."""
    return name.startswith(_COMPILED) or ("::" in name and not name.startswith(_WRAPPERS))


@cache
def is_wait(name: str) -> bool:
    """Whether a CPU operator only waits for a collective."""
    return name.endswith("::wait_tensor") or name in ("c10d::barrier", "c10d::monitored_barrier_")


@cache
def find_collective(name: str) -> str | None:
    """Return the collective that a name contains; None if it contains none."""
    plain = name.lower().replace("_", "")
    return next((each for each in COLLECTIVES if each.replace("_", "") in plain), None)


MESH = "mesh_"  # DeviceMesh describes the process group of an axis as mesh_AXIS
DEVICE_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LAUNCHING = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime"})
LAUNCHES = ("Launch", "Memcpy", "Memset")  # parts of the names of calls that put work on a stream


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch of a collective by a c10d operator, or its execution on one of gloo's threads."""

    thread: int
    collective: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class NcclKernelInfo:
    """What an NCCL kernel records: its collective, the name of its process group, and the bytes of its
    larger side (0 if not recorded)."""

    collective: str
    group: str
    bytes: int


class Table:
    """Rows of integers that start with a start and an end; numpy reads them without a copy."""

    def __init__(self, columns: int = 2) -> None:
        self._columns, self._numbers = columns, array("q")

    def __len__(self) -> int:
        return len(self._numbers) // self._columns

    def add(self, *row: int) -> None:
        """Append a row."""
        self._numbers.extend(row)

    def covers(self, start_ns: int, end_ns: int) -> bool:
        """Whether the last row contains the span: then it is the parent and already counted."""
        last = self._numbers[-self._columns :]
        return bool(last) and last[0] <= start_ns and end_ns <= last[1]

    @property
    def rows(self) -> np.ndarray[Any, Any]:
        """The rows, of shape [n, columns]. No row can be added while it is in use."""
        return np.frombuffer(self._numbers, np.int64).reshape(-1, self._columns)


@dataclass
class TraceEvents:
    """One rank's trace.

    Args:
        steps: number, start and end of each step; these and `labels` are in the order of their starts
        operators, waits: by CPU thread, the operators that compute and those that wait
        step_threads: CPU threads with step annotations: they train, with or without labels
        carried: collectives executed by gloo
        kernels: work on a GPU: start, end, stream, correlation id of its launch, and whether it computes,
            which collectives and copies to or from the host do not
        sent: the NcclKernelInfo of each collective, by its index in `kernels`
        calls: calls that launch GPU work: start, end, thread and correlation id
    """

    path: Path
    header: dict[str, Any]
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    operators: defaultdict[int, Table] = field(default_factory=lambda: defaultdict(Table))
    waits: defaultdict[int, Table] = field(default_factory=lambda: defaultdict(Table))
    step_threads: set[int] = field(default_factory=set)
    launches: list[Launch] = field(default_factory=list)
    carried: list[Launch] = field(default_factory=list)
    kernels: Table = field(default_factory=lambda: Table(5))
    sent: dict[int, NcclKernelInfo] = field(default_factory=dict)
    calls: Table = field(default_factory=lambda: Table(4))

    @property
    def facts(self) -> dict[str, Any]:
        """What train.profiling recorded about the run."""
        facts: dict[str, Any] = self.header.get("meshwright") or {}
        return facts

    @property
    def rank(self) -> int:
        """The rank of the trace, 0 if not recorded."""
        return int((self.facts or self.header.get("distributedInfo") or {}).get("rank", 0))

    @property
    def clock(self) -> tuple[int, str]:
        """The base of the trace's times in ns, and the host whose clock it is; "" if not recorded."""
        return int(self.header.get("baseTimeNanoseconds", 0)), str(self.header.get("host_name", ""))

    @property
    def device_type(self) -> str:
        """The device type of the run; if not recorded, "cuda" for a trace with GPU work, else "cpu"."""
        return str(self.facts.get("device_type") or ("cuda" if len(self.kernels) else "cpu"))


def load_store(path: Path, on_event: Callable[[dict[str, Any]], None] | None = None) -> TraceEvents:
    """Read a trace in one pass. `on_event` is called with each event that has a duration. Raises DataError if
    the trace is damaged or has no profiled step."""
    store = TraceEvents(path, read_header(path))
    check_header(path, store.header)
    for event in read_events(path):
        if event.get("ph") == "X":
            try:
                _add(store, event, str(event.get("cat", "")))
                if on_event:
                    on_event(event)
            except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError):
                raise DataError(
                    f"{path}: unknown event, not written by torch's profiler: {str(event)[:200]}: profile "
                    "again"
                ) from None
    store.steps.sort(key=lambda step: step[1])
    store.labels.sort(key=lambda label: label.start_ns)
    if not store.steps:
        raise DataError(
            f'{path}: no profiled step: it has no "ProfilerStep#N" annotation: profile with '
            "train.main --profile.start=N"
        )
    return store


def _add(store: TraceEvents, event: dict[str, Any], category: str) -> None:
    if category == "cpu_op":
        _add_operator(store, event, event["name"])
    elif category == "user_annotation":
        _add_annotation(store, event, event["name"])
    elif category in DEVICE_WORK:
        _add_kernel(store, event, event["name"])
    elif category in LAUNCHING and any(part in event["name"] for part in LAUNCHES):
        store.calls.add(*span_of(event), int(event["tid"]), int(event["args"]["correlation"]))


def span_of(event: dict[str, Any]) -> tuple[int, int]:
    """Return start and end in nanoseconds; Kineto writes microseconds with three decimals."""
    start_ns, length_ns = round(event["ts"] * 1000), round(event["dur"] * 1000)
    if length_ns < 0:
        raise ValueError("negative duration")
    return start_ns, start_ns + length_ns


def _add_operator(store: TraceEvents, event: dict[str, Any], name: str) -> None:
    thread, span = int(event["tid"]), span_of(event)
    if is_wait(name):
        store.waits[thread].add(*span)
    # a file lists parents before their children
    elif counts_as_compute(name) and not store.operators[thread].covers(*span):
        store.operators[thread].add(*span)
    if name.startswith("c10d::") and (collective := find_collective(name[6:])):
        store.launches.append(Launch(thread, collective, *span))


def _add_annotation(store: TraceEvents, event: dict[str, Any], name: str) -> None:
    thread, span = int(event["tid"]), span_of(event)
    if match := _STEP.fullmatch(name):
        store.steps.append((int(match[1]), *span))
        store.step_threads.add(thread)
    elif name.startswith(_COMPILED):  # a CPU's fused loops are in it, without operators of their own
        store.operators[thread].add(*span)
    elif name.startswith("gloo:"):
        store.carried.append(Launch(thread, find_collective(name) or name, *span))
    elif label := parse_label(name):
        store.labels.append(Label(thread, *label, *span))


def _add_kernel(store: TraceEvents, event: dict[str, Any], name: str) -> None:
    args, is_collective = event.get("args") or {}, name.startswith("nccl")
    if is_collective:
        collective = collective_of(name, args) or "all_reduce"
        info = NcclKernelInfo(collective, str(args.get("Process Group Name", "")), bytes_sent(args))
        store.sent[len(store.kernels)] = info
    is_host_copy = event["cat"] == "gpu_memcpy" and ("HtoD" in name or "DtoH" in name)
    stream = int(args.get("stream", event.get("tid", 0)))
    store.kernels.add(
        *span_of(event), stream, int(args.get("correlation", 0)), not (is_collective or is_host_copy)
    )


def collective_of(kernel: str, args: dict[str, Any]) -> str | None:
    """Return the collective of an NCCL kernel; None if it is unknown."""
    return find_collective(str(args.get("Collective name", ""))) or find_collective(kernel)


def bytes_sent(args: dict[str, Any]) -> int:
    """Return the bytes of the larger side of an NCCL kernel; 0 if not recorded."""
    _, width = dtype_of(str(args.get("dtype", ""))) or ("", 0)
    return max(int(args.get("In msg nelems", 0)), int(args.get("Out msg nelems", 0))) * width
