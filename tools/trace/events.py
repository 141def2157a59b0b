"""What is needed of a trace, in compact columns, and what its annotations and operators mean: names given by
train/profiling.py, FSDP2, c10d, gloo and torch.compile.

One pass reads a file of any size. In memory it takes, by tracemalloc, 17 bytes an operator that lies in no
other, about 35 a call that launches or a kernel (180 one of NCCL's), 140 a collective's launch or gloo's
span, and 265 an annotation.
"""

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.tools.trace.reader import Trace, check_header
from meshwright.tools.trace.steps import Interval
from meshwright.train.errors import DataError

ROOT_END = "root_post_backward_callback"
FORWARD_KINDS = frozenset({"forward", "pre_forward", "post_forward", "forward_prefetch", "root_pre_forward"})
BACKWARD_KINDS = frozenset(
    {
        "backward",
        "pre_backward",
        "backward_prefetch",
        "post_backward_accumulate",
        "post_backward_reshard",
        "post_backward_rs_wait",
        "post_backward_reduce",
        ROOT_END,
    }
)
WORK_OF = {  # kind of label -> what the compute lane does in it
    "forward": "forward",
    "backward": "backward",
    "all_gather": "copy_in",
    "post_backward_reduce": "copy_in",
    "post_backward_accumulate": "copy_in",
    "post_backward_reshard": "copy_in",
    "pre_forward": "copy_out",
    "pre_backward": "copy_out",
    "all_gather_copy_out": "copy_out",
    "optimizer": "optimizer",
}
_STEP = re.compile(r"ProfilerStep#(\d+)")
_UNIT_WORK = re.compile(r"(\S+) (forward|backward)")
_FSDP = re.compile(r"FSDP::(\w+)(?: \((.*)\)| for (.*))?")
_COMPILED = "## Call CompiledFxGraph"
# Not computing itself, and looked into: what autograd and c10d wrap around operators.
_WRAPPERS = (
    "autograd::engine::",
    "torch::autograd::",
    "c10d::",
    "c10d_functional::",
    "_c10d_functional::",
    "symm_mem::",
)
COLLECTIVES = {  # part of a name of c10d, gloo or NCCL, the first that is found -> collective
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
}


@dataclass(frozen=True, slots=True)
class Label:
    """An annotation on a CPU thread. `kind`: forward, backward, optimizer, or FSDP2's own, as in
    "FSDP::pre_forward"; `unit` as in plan.yaml, "" where there is none."""

    thread: int
    kind: str
    unit: str
    start_ns: int
    end_ns: int


def step_number(name: str) -> int | None:
    """Of "ProfilerStep#10"."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def parse_label(name: str) -> tuple[str, str] | None:
    """Kind and unit of an annotation that says what is being done for whom, else None."""
    if found := _FSDP.fullmatch(name):
        unit = found[2] or found[3] or ""
        return found[1], unit.replace(", ", "+")  # of several modules, as UnitPlan.name joins them
    if found := _UNIT_WORK.fullmatch(name):
        return found[2], found[1]
    return ("optimizer", "") if name.startswith("Optimizer.step#") else None


def counts_as_compute(name: str) -> bool:
    """Whether a CPU operator is work as a whole: a kernel's or a compiled graph, not what only wraps
    others."""
    return name.startswith(_COMPILED) or ("::" in name and not name.startswith(_WRAPPERS))


def is_wait(name: str) -> bool:
    """Whether a CPU operator only waits for a collective."""
    return name.endswith("::wait_tensor") or name in ("c10d::barrier", "c10d::monitored_barrier_")


def launched_collective(name: str) -> str | None:
    """The collective that a CPU operator of c10d launches."""
    return find_collective(name[6:]) if name.startswith("c10d::") else None


def find_collective(name: str) -> str | None:
    """The collective that a name is of."""
    lowered = name.lower()
    return next((collective for part, collective in COLLECTIVES.items() if part in lowered), None)


DEVICE_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LAUNCHING = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime"})
LAUNCHES = ("Launch", "Memcpy", "Memset")  # parts of the names of calls that put something on a stream
KERNEL, COLLECTIVE, HOST_COPY = range(3)
WIDTHS = {  # bytes of an element, by the name that c10d gives a dtype
    "Float": 4,
    "BFloat16": 2,
    "Half": 2,
    "Double": 8,
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
    "Int": 4,
    "Long": 8,
    "Float8_e4m3fn": 1,
    "Float8_e5m2": 1,
}


@dataclass(frozen=True, slots=True)
class Launch:
    """A collective's launch by an operator of c10d, or one on a thread of gloo's own that carries it out."""

    thread: int
    collective: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class NcclKernelInfo:
    """What a kernel of NCCL says of itself."""

    collective: str
    group: str
    bytes: int


class Columns:
    """Start and end of many spans, in two arrays."""

    def __init__(self) -> None:
        self.start_ns, self.end_ns = array("q"), array("q")

    def add(self, start_ns: int, end_ns: int) -> None:
        self.start_ns.append(start_ns)
        self.end_ns.append(end_ns)

    def covers(self, start_ns: int, end_ns: int) -> bool:
        """Whether the last one added does: it is the parent, and counts whole."""
        return bool(self.end_ns) and self.start_ns[-1] <= start_ns and end_ns <= self.end_ns[-1]

    def intervals(self) -> Iterator[Interval]:
        return zip(self.start_ns, self.end_ns, strict=True)


class Kernels(Columns):
    """What ran on a GPU: besides when, on which stream, launched by which call (`correlation`), and KERNEL,
    COLLECTIVE or HOST_COPY."""

    def __init__(self) -> None:
        super().__init__()
        self.stream, self.correlation, self.kind = array("q"), array("q"), array("b")
        self.sent: dict[int, NcclKernelInfo] = {}  # by index, of collectives

    def __len__(self) -> int:
        return len(self.start_ns)


class Calls(Columns):
    """Calls that launch something: on which thread, and `correlation`."""

    def __init__(self) -> None:
        super().__init__()
        self.thread, self.correlation = array("q"), array("q")


@dataclass
class TraceEvents:
    """One rank's trace. `operators`, `waits`: spans on each CPU thread that are work, and that wait."""

    path: Path
    header: dict[str, Any] = field(default_factory=dict)
    steps: list[tuple[int, int, int]] = field(default_factory=list)  # number, start, end
    labels: list[Label] = field(default_factory=list)
    operators: dict[int, Columns] = field(default_factory=dict)
    waits: dict[int, Columns] = field(default_factory=dict)
    # on which steps are annotated: they train, with labels or without
    step_threads: set[int] = field(default_factory=set)
    launches: list[Launch] = field(default_factory=list)
    carried: list[Launch] = field(default_factory=list)  # gloo's
    kernels: Kernels = field(default_factory=Kernels)
    calls: Calls = field(default_factory=Calls)

    @property
    def facts(self) -> dict[str, Any]:
        """What train.profiling says of the run."""
        facts: dict[str, Any] = self.header.get("meshwright") or {}
        return facts

    @property
    def rank(self) -> int:
        return int((self.facts or self.header.get("distributedInfo") or {}).get("rank", 0))

    @property
    def device_type(self) -> str:
        return str(self.facts.get("device_type") or ("cuda" if len(self.kernels) else "cpu"))


def load_store(path: Path) -> TraceEvents:
    """Read a trace. Raises DataError: broken, or without a profiled step in it."""
    store, trace = TraceEvents(path), Trace(path)
    for event in trace.events():
        if event.get("ph") == "X":
            try:
                _add(store, event, str(event.get("cat", "")))
            except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
                raise DataError(
                    f"{path}: an event of no kind that torch's profiler writes: {str(event)[:200]}"
                ) from None
    store.header = trace.header
    check_header(path, store.header)
    store.steps.sort(key=lambda step: step[1])
    if not store.steps:
        raise DataError(
            f'{path}: no step in it: there is no annotation "ProfilerStep#N", as train.main makes with '
            "--profile.start=N"
        )
    return store


def _add(store: TraceEvents, event: dict[str, Any], category: str) -> None:
    if category == "cpu_op":
        _add_operator(store, event, event["name"])
    elif category == "user_annotation":
        _add_annotation(store, event, event["name"])
    elif category in DEVICE_WORK:
        _add_kernel(store.kernels, event, category)
    elif category in LAUNCHING and any(part in event["name"] for part in LAUNCHES):
        store.calls.add(*_span(event))
        store.calls.thread.append(int(event["tid"]))
        store.calls.correlation.append(int(event["args"]["correlation"]))


def _span(event: dict[str, Any]) -> Interval:
    """Kineto writes microseconds with three digits behind the point."""
    start_ns, length_ns = round(event["ts"] * 1000), round(event["dur"] * 1000)
    if length_ns < 0:
        raise ValueError("it ends before it begins")
    return start_ns, start_ns + length_ns


def _add_operator(store: TraceEvents, event: dict[str, Any], name: str) -> None:
    thread, (start_ns, end_ns) = int(event["tid"]), _span(event)
    if is_wait(name):
        store.waits.setdefault(thread, Columns()).add(start_ns, end_ns)
    elif counts_as_compute(name):
        columns = store.operators.setdefault(thread, Columns())
        if not columns.covers(start_ns, end_ns):  # a file lists parents before their children
            columns.add(start_ns, end_ns)
    if collective := launched_collective(name):
        store.launches.append(Launch(thread, collective, start_ns, end_ns))


def _add_annotation(store: TraceEvents, event: dict[str, Any], name: str) -> None:
    start_ns, end_ns = _span(event)
    if (number := step_number(name)) is not None:
        store.steps.append((number, start_ns, end_ns))
        store.step_threads.add(int(event["tid"]))
    elif name.startswith("gloo:"):
        collective = find_collective(name) or name
        store.carried.append(Launch(int(event["tid"]), collective, start_ns, end_ns))
    elif label := parse_label(name):
        store.labels.append(Label(int(event["tid"]), *label, start_ns, end_ns))


def _add_kernel(kernels: Kernels, event: dict[str, Any], category: str) -> None:
    name, args = event["name"], event.get("args") or {}
    kind = KERNEL
    if name.startswith("nccl"):
        kind = COLLECTIVE
        kernels.sent[len(kernels)] = _sent(name, args)
    elif category == "gpu_memcpy" and ("HtoD" in name or "DtoH" in name):
        kind = HOST_COPY
    kernels.add(*_span(event))
    kernels.stream.append(int(args.get("stream", event.get("tid", 0))))
    kernels.correlation.append(int(args.get("correlation", 0)))
    kernels.kind.append(kind)


def _sent(name: str, args: dict[str, Any]) -> NcclKernelInfo:
    elements = max(int(args.get("In msg nelems", 0)), int(args.get("Out msg nelems", 0)))
    collective = (
        find_collective(str(args.get("Collective name", ""))) or find_collective(name) or "all_reduce"
    )
    return NcclKernelInfo(
        collective,
        str(args.get("Process Group Name", "")),
        elements * WIDTHS.get(str(args.get("dtype", "")), 0),
    )
