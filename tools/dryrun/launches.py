"""The kernels of the recorded step, each with its bytes, registers and spills, its unit and its compiled
graph: the log joined with the traces of step.py."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.parallel.mesh import CONTEXT_GROUP
from meshwright.tools.dryrun import log
from meshwright.tools.dryrun.log import AXES_FILE, OPERATORS_FILE, STEPS, TRACE_FILE, Call, grid_blocks
from meshwright.tools.trace.events import DEVICE_WORK, parse_label
from meshwright.tools.trace.kernels import COMPILED, short_name

Event = Mapping[str, Any]


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of a kernel.

    Args:
        name: as tools.trace shows it
        library: torch, cublas, cudnn or triton (the project's kernels and inductor's)
        bytes: read and written, each tensor once; None if not known
        registers, spills: of a thread, spills in bytes; None if the fake does not know them
        unit, phase: in which it was launched; "" outside of units
        graph: the compiled graph that launched it; "" for an eager operator
    """

    name: str
    library: str
    bytes: int | None
    registers: int | None
    spills: int | None
    unit: str
    phase: str
    graph: str


@dataclass(frozen=True)
class AxisCollective:
    """A collective: `op`, `axis` and `bytes` as in tools.simulate, and its stream."""

    op: str
    axis: str
    bytes: int
    stream: int


@dataclass(frozen=True)
class LaunchedGraph:
    """A graph that inductor compiled, once for all units that call it.

    Args:
        units, phase: that called it, such as layers.0 and layers.1, forward
        calls: in a step
        kernels: of one call, in order; those of cuBLAS and cuDNN too
    """

    units: tuple[str, ...]
    phase: str
    calls: int
    kernels: tuple[KernelLaunch, ...]


@dataclass(frozen=True)
class RecordedStep:
    """The kernels and collectives of a step, in the order of their launches."""

    launches: tuple[KernelLaunch, ...]
    collectives: tuple[AxisCollective, ...]
    graphs: tuple[LaunchedGraph, ...]


# CUDA's numbers of data types (library_types.h)
DTYPES = {"0": "float32", "2": "float16", "14": "bfloat16", "28": "float8_e4m3", "29": "float8_e5m2"}
LIBRARIES = {"kernel": "torch", "gemm": "cublas", "cudnn": "cudnn", "triton": "triton"}


class _Span(NamedTuple):
    """An annotation of a CPU thread: of a unit's phase, or of a call of a compiled graph."""

    start: float = 0.0
    end: float = 0.0
    unit: str = ""
    phase: str = ""
    graph: str = ""


class _Operator(NamedTuple):
    """The operator that launched a kernel: its bytes, and its place in the step."""

    name: str
    bytes: int | None
    unit: _Span
    graph: _Span


def read_recorded_step(scratch: Path) -> RecordedStep:
    """Return the recorded step of a run with --record."""
    calls = log.between(log.read_log(scratch), f"step {STEPS}", f"end {STEPS}")
    events = json.loads((scratch / TRACE_FILE).read_text())["traceEvents"]
    on_streams = [call for call in calls if call.kind in log.ON_STREAMS]
    done = sorted(
        (event for event in events if event.get("cat") in DEVICE_WORK),
        key=lambda event: event["args"]["correlation"],
    )
    assert len(on_streams) == len(done), "the trace must have each kernel and copy of the log"
    both = list(zip(on_streams, done, strict=True))
    operators = _operators(events, read_operators(scratch / OPERATORS_FILE))
    axes = json.loads((scratch / AXES_FILE).read_text())
    launched = [(call, event, operators.get(_external_id(event))) for call, event in both]
    launches = _launches([row for row in launched if row[0].kind in log.LAUNCHES])
    return RecordedStep(
        tuple(launch for launch, _ in launches),
        tuple(_collectives(launched, axes)),
        tuple(_graphs(launches)),
    )


def _external_id(event: Event) -> int:
    return int(event["args"].get("External id", -1))


def _operators(events: Sequence[Event], tensors: Mapping[int, Event]) -> dict[int, _Operator]:
    """Return the operators by the external id that their kernels have too."""
    spans = defaultdict[int, list[_Span]](list)
    for event in events:
        if event.get("cat") == "user_annotation" and (span := _span(event)):
            spans[event["tid"]].append(span)
    operators = {}
    for event in events:
        if event.get("cat") == "cpu_op":
            around = [s for s in spans[event["tid"]] if s.start <= event["ts"] < s.end]
            node = tensors.get(int(event["args"].get("Record function id", -1)))
            size = round(event["args"].get("kernel_num_gb", 0) * 1e9) or (moved_bytes(node) if node else None)
            unit, graph = (
                max(
                    (span for span in around if getattr(span, kind)), key=attrgetter("start"), default=_Span()
                )
                for kind in ("unit", "graph")
            )
            operators[_external_id(event)] = _Operator(event["name"], size, unit, graph)
    return operators


def _span(event: Event) -> _Span | None:
    """Return the span of a unit's phase, of FSDP2's work for a unit, or of a compiled graph."""
    times = event["ts"], event["ts"] + event["dur"]
    if match := COMPILED.fullmatch(event["name"]):
        return _Span(*times, graph=match[1])
    label = parse_label(event["name"])
    return _Span(*times, label[1], label[0]) if label and label[1] else None


def _launches(
    launched: Sequence[tuple[Call, Event, _Operator | None]],
) -> list[tuple[KernelLaunch, float]]:
    """Return each launch, and when its graph was called.

    Of several kernels of an operator the one with the most blocks moves its bytes; those of the others, such
    as the reduction of partial sums, are not known.
    """
    blocks = defaultdict[tuple[int, str], int](int)  # by operator and kernel
    names = [_name(call, event, operator) for call, event, operator in launched]
    for (call, event, _), name in zip(launched, names, strict=True):
        blocks[_external_id(event), name] += grid_blocks(call) if call.kind in ("kernel", "triton") else 1
    largest = dict[int, tuple[int, str]]()
    for (external, name), count in blocks.items():
        largest[external] = max(largest.get(external, (0, "")), (count, name))
    counted, rows = set[int](), []
    for (call, event, operator), name in zip(launched, names, strict=True):
        external = _external_id(event)
        size = operator.bytes if operator and largest[external][1] == name else None
        if size is not None and external in counted:
            size = 0  # counted at the operator's first launch of this kernel
        counted.add(external)
        rows.append((_launch(call, name, size, operator), operator.graph.start if operator else 0.0))
    return rows


def _launch(call: Call, name: str, size: int | None, operator: _Operator | None) -> KernelLaunch:
    registers, spills = map(int, call.words[1:3]) if call.kind == "triton" else (None, None)
    unit, graph = (operator.unit, operator.graph) if operator else (_Span(), _Span())
    library = LIBRARIES[call.kind]
    return KernelLaunch(name, library, size, registers, spills, unit.unit, unit.phase, graph.graph)


def _name(call: Call, event: Event, operator: _Operator | None) -> str:
    """Return the kernel's name. Which kernel cuBLAS and cuDNN select is not known: theirs are named after the
    product and the operator."""
    if call.kind == "gemm":
        columns, rows, inner = call.words[0].split(",")  # cuBLAS stores matrices by columns
        batch = call.words[1].removeprefix("batch ")
        dtype = call.words[2].removeprefix("types ").split(",")[0]
        return (
            f"product {rows} x {columns} x {inner}{'' if batch == '1' else f' x {batch}'}, "
            f"{DTYPES.get(dtype, dtype)}"
        )
    if call.kind == "cudnn" and operator:
        return operator.name.removeprefix("aten::")
    return short_name(event["name"])


def _collectives(
    rows: Sequence[tuple[Call, Event, _Operator | None]], axes: Mapping[str, Sequence[str]]
) -> Iterator[AxisCollective]:
    """Yield the collectives, except those of one rank, which communicates nothing. Of a group with several
    names tools.simulate uses the first within a unit, and the last outside. A group that FSDP2 created is a
    part of dp_shard."""
    found = log.collectives([call for call, *_ in rows])
    for call, event, operator in rows:
        if (sent := found.get(id(call))) and sent.ranks > 1:
            names = axes.get(str(event["args"].get("Process Group Name", "")), ["dp_shard"])
            if event["args"].get("Process Group Description") == CONTEXT_GROUP:
                names = ["cp"]
            axis = names[0 if operator and operator.unit.unit else -1]
            yield AxisCollective(sent.op, axis, sent.bytes, sent.stream)


def _graphs(launches: Sequence[tuple[KernelLaunch, float]]) -> Iterator[LaunchedGraph]:
    """Yield the compiled graphs in the order of their first calls."""
    calls = defaultdict[str, dict[float, list[KernelLaunch]]](dict)
    for launch, start in launches:
        if launch.graph:
            calls[launch.graph].setdefault(start, []).append(launch)
    for by_start in calls.values():
        first, *_ = by_start.values()
        units = dict.fromkeys(kernels[0].unit for kernels in by_start.values())
        yield LaunchedGraph(tuple(units), first[0].phase, len(by_start), tuple(first))


# They overwrite their first argument without reading it.
OVERWRITE = frozenset({"aten::fill_", "aten::zero_", "aten::copy_", "aten::_foreach_copy_"})
# They read as much of their first argument as they write.
READ_PARTLY = frozenset({"aten::gather", "aten::index_select", "aten::embedding"})
# In a training step it multiplies by 1, and reads and writes no tensor.
NOTHING = frozenset({"meshwright::multiply_unless_one_kernel"})
# How much they read or write depends on the values, or on their algorithm.
BY_VALUES = re.compile(r"embedding_dense_backward|scatter|index|sort|unique|nonzero|masked|topk")


class _Allocated(NamedTuple):
    """A tensor on the GPU: its place in memory, and the bytes that it has there."""

    storage: int
    offset: int
    bytes: int


def read_operators(path: Path) -> dict[int, Mapping[str, Any]]:
    """Return the operators of an execution trace by their "Record function id" in a trace of kernels."""
    nodes = json.loads(path.read_text())["nodes"]
    return {int(attribute): node for node in nodes if (attribute := _attribute(node, "rf_id"))}


def moved_bytes(operator: Mapping[str, Any]) -> int | None:
    """Return the bytes that an operator reads and writes, each tensor once; None if that is unknown."""
    name, schema = operator["name"], _attribute(operator, "op_schema")
    if name in NOTHING:
        return 0
    if not schema or BY_VALUES.search(name):
        return None
    arguments, results = (
        _tensors(operator["inputs"]),
        [t for group in _tensors(operator["outputs"]) for t in group],
    )
    kinds = _argument_kinds(schema)
    read = written = 0
    for place, (tensors, kind) in enumerate(zip(arguments, kinds, strict=False)):
        size = sum(tensor.bytes for tensor in tensors)
        overwritten = kind == "out" or (name in OVERWRITE and place == 0)
        written += size if kind in ("out", "changed") else 0
        if name in READ_PARTLY and place == 0:
            size = min(size, sum(tensor.bytes for tensor in results))
        read += 0 if overwritten else size
    given = {tensor[:2] for tensors in arguments for tensor in tensors}
    return read + written + sum(tensor.bytes for tensor in results if tensor[:2] not in given)


def _attribute(node: Mapping[str, Any], name: str) -> str:
    return next((str(each["value"]) for each in node["attrs"] if each["name"] == name), "")


def _argument_kinds(schema: str) -> list[str]:
    """Return for each argument of a schema: "out" (only written), "changed" (read and written) or "read"."""
    return [
        ("out" if argument.kwarg_only else "changed")
        if argument.alias_info and argument.alias_info.is_write
        else "read"
        for argument in torch._C.parse_schema(schema).arguments
    ]


def _tensors(values: Mapping[str, Any]) -> list[list[_Allocated]]:
    """Return the tensors on the GPU in each argument or result."""
    columns = (values["values"], values["shapes"], values["strides"], values["types"])
    return [list(_tensors_of(*row)) for row in zip(*columns, strict=True)]


def _tensors_of(value: Any, shape: Any, strides: Any, kind: str) -> Iterator[_Allocated]:
    if kind.startswith("GenericList[Tensor"):
        for row in zip(value, shape, strides, strict=True):
            yield from _tensors_of(*row, "Tensor")
    elif kind.startswith("Tensor") and str(value[5]).startswith("cuda"):
        _, storage, offset, _, width, _ = value
        yield _Allocated(storage, offset, _stored(shape, strides) * width)


def _stored(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the elements in memory: an expanded dim counts once."""
    return math.prod(size for size, stride in zip(shape, strides, strict=True) if stride or size == 0)
