"""The bytes that an operator reads and writes, from torch's execution trace
(torch.profiler.ExecutionTraceObserver), which has the size of every tensor of an operator, also in lists."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
    arguments = schema[schema.index("(") + 1 : schema.rindex(" -> ") - 1]
    kinds, keyword_only = [], False
    for argument in _split(arguments):
        keyword_only = keyword_only or argument == "*"
        if argument != "*":
            changed = re.match(r"Tensor\([\w ]+!", argument)
            kinds.append(("out" if keyword_only else "changed") if changed else "read")
    return kinds


def _split(arguments: str) -> Iterator[str]:
    """Yield the arguments of a schema, which may have commas in brackets."""
    depth, begin = 0, 0
    for at, letter in enumerate(arguments):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            yield arguments[begin:at].strip()
            begin = at + 1
    yield arguments[begin:].strip()


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
