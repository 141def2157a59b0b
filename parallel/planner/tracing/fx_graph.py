"""Convert the compiler's graph of a forward or backward to kernels, with their operations, memory traffic and
live memory, and to the buffers that they allocate, with their lifetimes.

fusion.py says which values share a kernel. The Python body of a custom operator is traced instead of the
operator, with two micro batches.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.parallel.operators import (
    COLLECTIVES,
    GROUPED_PRODUCTS,
    PRODUCTS,
    REDUCTIONS,
    VIEWS,
    custom_op_body,
)
from meshwright.parallel.planner.tracing.eager import (
    RECORDED_SEQUENCES,
    RecordedPhase,
    fit_line,
    join_phases,
    record_call,
    record_op,
)
from meshwright.parallel.planner.tracing.fusion import Kernel, Loop, Value, fuse
from meshwright.parallel.planner.workload import Buffer, Linear, Operation, Phase, Role, pareto_peaks, total

# A kernel with this reduction of a whole tensor, from which the scale of a cast is made, reads it twice.
WHOLE_REDUCTION = "amax"


@dataclass(frozen=True)
class GraphInputs:
    """Properties of a graph's placeholders.

    Args:
        uncounted: weights and tables; their sizes do not depend on the micro batch
        same_as: placeholder -> the placeholder whose storage it shares
        held: whether the caller holds references to the counted placeholders until the end
        donated: placeholders that the graph may overwrite
        fixed: counted placeholders whose sizes do not depend on the micro batch
    """

    uncounted: Collection[Node]
    same_as: Mapping[Node, Node]
    held: bool
    donated: Collection[Node] = ()
    fixed: Collection[Node] = ()


FUSED = "fused"  # first word of the name of a kernel that inductor generates, as in inductor's names


class KernelGraph:
    """The kernels of one graph, traced with inputs of `micro_batch_size` sequences."""

    def __init__(self, graph: Graph, inputs: GraphInputs, micro_batch_size: int) -> None:
        self._inputs, self.micro_batch_size = inputs, micro_batch_size
        self._nodes = [node for node in graph.nodes if _tensors(node.meta.get("val"))]
        (self._returned,) = (node.args[0] for node in graph.nodes if node.op == "output")
        self._fixed = set(inputs.uncounted) | set(inputs.fixed)
        self.bodies: dict[Node, CustomOpBody] = {}
        self._position = {node: i for i, node in enumerate(graph.nodes)}
        self.storage: dict[Node, Node] = {}  # node -> the node that allocated its storage
        for node in self._nodes:
            self.storage[node] = self._find_storage(node)
            if code := _inner_code(node):
                self.bodies[node] = inline_custom_op(node, code, self._fixed, micro_batch_size)
            if node.op == "call_function" and self._is_fixed(node):
                self._fixed.add(node)
        self._kernel_of = self._find_kernels()
        self.kernels = self._find_order()

    def phase(self) -> Phase:
        """Return the kernels' operations, and the moments that can be the peak."""
        operations = (
            self.bodies[first].phase.operations
            if (first := kernel.nodes[0]) in self.bodies
            else (self._operation(kernel),)
            for kernel in self.kernels
        )
        return Phase(tuple(chain.from_iterable(operations)), pareto_peaks(self._moments()))

    def returned(self) -> list[Node | None]:
        """Return the nodes that allocated the storages of the graph's results, in order; None for a result
        that is not a tensor or not counted."""
        owners = (self.storage.get(value) if isinstance(value, Node) else None for value in self._returned)
        return [None if node in self._inputs.uncounted else node for node in owners]

    def size(self, node: Node) -> Linear:
        """Return the bytes of a storage."""
        return self._custom_result_size(node) or self._scale(_bytes(node), node in self._fixed)

    def _custom_result_size(self, node: Node) -> Linear | None:
        """Return the bytes of a custom operator's result (one of several for a getitem); None for others."""
        source, index = (node.args[0], node.args[1]) if _name(node) == "getitem" else (node, 0)
        if source not in self.bodies or isinstance(node.meta["val"], tuple):
            return None
        return self.bodies[source].results[index]  # type: ignore[index]

    def _scale(self, amount: float, fixed: bool) -> Linear:
        return Linear(amount, 0.0) if fixed else Linear(0.0, amount / self.micro_batch_size)

    def _find_storage(self, node: Node) -> Node:
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if source is None:
            return self._inputs.same_as.get(node, node)
        if bases := node.kwargs.get("_all_bases"):  # an operator that writes into its argument
            return self.storage[bases[0]]  # type: ignore[index]
        is_view = _name(node) in VIEWS or (
            _name(node) == "getitem" and (_name(source) in VIEWS or "_all_bases" in source.kwargs)
        )
        return self.storage[source] if is_view else node

    def _sources(self, node: Node) -> list[Node]:
        return [source for source in node.all_input_nodes if source in self.storage]

    def _is_fixed(self, node: Node) -> bool:
        """Whether a result's size does not depend on the micro batch: all of its inputs do not, or it is a
        sum over the tokens."""
        sources, name = self._sources(node), _name(node)
        if size := self._custom_result_size(node):
            return not size.per_sequence
        fixed = [source in self._fixed for source in sources]
        if name in PRODUCTS and len(sources) >= 2:
            matrices = fixed[:2] if name in GROUPED_PRODUCTS else fixed  # not the ends of groups
            return not any(matrices)  # activations times activations: the gradient of a weight
        if name == "sum" and len(node.args) > 1:
            return 0 in [dim % sources[0].meta["val"].dim() for dim in node.args[1]]  # type: ignore[union-attr, operator]
        scalars = [_elements(source) == 1 for source in sources]
        return all(map(or_, fixed, scalars)) or name == "embedding_dense_backward"

    def _find_kernels(self) -> dict[Node, Kernel]:
        """Map every storage that a kernel writes to the kernel."""
        computed = [n for n in self._nodes if n.op == "call_function" and self.storage[n] is n]
        read = {self.storage[source] for n in computed if _is_anchor(n) for source in self._sources(n)}
        read |= {node for node in self.returned() if node}
        values = {
            node: Value(
                sources=frozenset(self.storage[source] for source in self._sources(node)),
                loop=None if _is_anchor(node) or _name(node) == "getitem" else _loop(node),
                stored=node in read,
                part_of=node.all_input_nodes[0] if _name(node) == "getitem" else None,
            )
            for node in computed
        }
        elements = {node: _elements(node) for node in {*computed, *self.storage.values()}}
        kernel_of = fuse(values, elements)
        for user in dict.fromkeys(kernel_of.values()):
            for owner in user.reads.intersection(kernel_of):
                kernel_of[owner].writes.add(owner)
        for value in self.returned():
            if value in kernel_of:
                kernel_of[value].writes.add(value)
        return kernel_of

    def _find_order(self) -> list[Kernel]:
        """Return the kernels in the order of the graph, each after the producers of its inputs."""
        order: dict[Kernel, None] = {}
        waiting = [*reversed(list(dict.fromkeys(self._kernel_of.values())))]
        while waiting:
            kernel = waiting[-1]
            producers = {self._kernel_of[owner] for owner in kernel.reads if owner in self._kernel_of}
            if missing := [producer for producer in producers if producer not in order]:
                waiting += sorted(
                    missing, key=lambda producer: self._position[producer.nodes[0]], reverse=True
                )
            else:
                order.setdefault(waiting.pop())
        return list(order)

    def _operation(self, kernel: Kernel) -> Operation:
        first, name = kernel.nodes[0], _name(kernel.nodes[0])
        args = map_arg(first.args, lambda node: node.meta["val"])
        operation = record_op(name, args, _tensors(args), _tensors(first.meta["val"]))
        if operation.kind == "collective":
            full = max((first, *self._sources(first)), key=_bytes)
            return replace(operation, bytes=self.size(full))
        if operation.kind == "memory":
            operation = replace(operation, name="_".join((FUSED, *dict.fromkeys(map(_name, kernel.nodes)))))
        read_again = kernel.reads if WHOLE_REDUCTION in map(_name, kernel.nodes) else ()
        moved = total(map(self.size, (*(kernel.reads | kernel.writes), *read_again)))
        return replace(operation, flops=self._scale(operation.flops.fixed, fixed=False), bytes=moved)

    def counted_placeholders(self) -> set[Node]:
        """Return the storages of the placeholders, except weights and tables."""
        placeholders = {self.storage[node] for node in self._nodes if node.op == "placeholder"}
        return placeholders.difference(self._inputs.uncounted)

    def lifetimes(self, held: bool = False) -> dict[Node, tuple[int, int]]:
        """Return the first and the last kernel with each counted storage; the first is -1 for a placeholder,
        the last is the number of kernels for a result. `held`: whether the placeholders live to the end."""
        placeholders, end = self.counted_placeholders(), len(self.kernels)
        writable = self._kernel_of.keys() | set(self._inputs.donated)
        last = {node: i for i, kernel in enumerate(self.kernels) for node in kernel.reads | kernel.writes}
        last |= dict.fromkeys(filter(None, self.returned()), end) | dict.fromkeys(
            placeholders if held else (), end
        )
        first = dict.fromkeys(sorted(placeholders), -1)
        for i, kernel in enumerate(self.kernels):
            dying = (node for node in sorted(kernel.reads) if node in first and last[node] == i)
            free = [node for node in dying if node in writable]
            last |= dict.fromkeys(_overwritten(kernel, free), i - 1)
            first |= dict.fromkeys(sorted(kernel.writes), i)
        return {node: (begin, last.get(node, -1)) for node, begin in first.items()}

    def _moments(self) -> list[Linear]:
        """Return the live bytes before the first kernel and during each kernel, including its results."""
        lifetimes = self.lifetimes(self._inputs.held)

        def live(begin: int, end: int) -> Linear:
            living = (node for node, (first, last) in lifetimes.items() if first <= begin and last >= end)
            return total(map(self.size, living))

        moments = [live(-1, -1)]
        for i, kernel in enumerate(self.kernels):
            if body := self.bodies.get(kernel.nodes[0]):
                moments += [total((live(i - 1, i), moment)) for moment in body.phase.live_bytes]
            moments.append(live(i, i))
        return moments


def _overwritten(kernel: Kernel, dying: Collection[Node]) -> set[Node]:
    """Return the dying inputs that a fused kernel overwrites, as inductor does (torch/_inductor/scheduler.py,
    decide_inplace_update): a result takes the place of an input of equal dtype and size that the kernel uses
    only for it, and for values that it is computed from."""
    overwritten, before = set[Node](), dict[Node, set[Node]]()
    for node, reads in kernel.uses.items():
        own = reads & before.keys()
        before[node] = own.union(*map(before.__getitem__, own))
        users = {read: {value for value in kernel.uses if read in kernel.uses[value]} for read in reads}
        free = (
            read
            for read in dying
            if read in reads and read not in overwritten and _storage_key(read) == _storage_key(node)
            if users[read] <= before[node] | {node}
        )
        if node in kernel.writes and not _is_anchor(node):
            overwritten |= set(islice(free, 1))
    return overwritten


def _is_anchor(node: Node) -> bool:
    """Whether a node is not fused: a matmul, attention, a collective, an embedding or a custom operator."""
    name = _name(node)
    alone = name in PRODUCTS or name in COLLECTIVES or "attention" in name or name.startswith("embedding")
    return alone or _inner_code(node) is not None


def _loop(node: Node) -> Loop:
    """Return the loop of an operation that is neither a view nor an anchor."""
    results = _elements(node)
    if _name(node) not in REDUCTIONS:
        return Loop(results, results)
    tensor = node.all_input_nodes[0].meta["val"]
    reduced: Any = node.args[1] if len(node.args) > 1 else None
    if not isinstance(reduced, Sequence):  # argmax takes a number; sum, if all are summed, None
        reduced = range(tensor.dim()) if reduced is None else [reduced]
    dims = [dim % tensor.dim() for dim in reduced]
    first = 0 in dims and tensor.dim() - 1 not in dims
    return Loop(tensor.numel(), results, "first" if first else "others")


def _elements(node: Node) -> int:
    return sum(tensor.numel() for tensor in _tensors(node.meta["val"]))


def _inner_code(node: Node) -> Callable[..., Any] | None:
    return custom_op_body(node.target) if isinstance(node.target, OpOverload) else None


def _name(node: Node) -> str:
    """Return an operation's name without namespace and overload, as mm, getitem; "" for a placeholder."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return getattr(packet, "__name__", "") if node.op == "call_function" else ""


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _storage_key(node: Node) -> tuple[object, int]:
    return _tensors(node.meta["val"])[0].dtype, _bytes(node)


def _bytes(node: Node) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in _tensors(node.meta["val"]))


@dataclass(frozen=True)
class CustomOpBody:
    """The traced body of a custom operator: its phase, whose `live_bytes` include the results but not the
    arguments; and the bytes of each result."""

    phase: Phase
    results: tuple[Linear, ...]


def inline_custom_op(
    node: Node, code: Callable[..., Any], fixed: Collection[Node], micro_batch_size: int
) -> CustomOpBody:
    """Trace a custom operator's code on fake tensors: the node's arguments, scaled from `micro_batch_size` to
    each of RECORDED_SEQUENCES, except `fixed` ones.

    The largest number among the arguments may be the rows of a chunk. An operator that runs more operations
    for more of them is traced with one chunk per sequence: all chunks do the same.
    """
    for chunks in (_most_chunks(node, fixed, micro_batch_size), 1):
        runs = [_run(node, code, fixed, n, micro_batch_size * chunks) for n in RECORDED_SEQUENCES]
        small, large = (recorded for recorded, _ in runs)
        if chunks > 1 and len(small.operations) < len(large.operations):
            break
    results = zip(*(sizes for _, sizes in runs), strict=True)

    def scale(size: Linear) -> Linear:
        return Linear(size.fixed, size.per_sequence * chunks)

    traced = join_phases((small, large))
    operations = tuple(
        replace(each, flops=scale(each.flops), bytes=scale(each.bytes)) for each in traced.operations
    )
    phase = Phase(operations, tuple(map(scale, traced.live_bytes)))
    return CustomOpBody(phase, tuple(scale(fit_line(sizes)) for sizes in results))


def _most_chunks(node: Node, fixed: Collection[Node], traced: int) -> int:
    """Return how many times the rows of a sequence have the largest number among the arguments of an
    operator; 1 if not all arguments have as many rows, or it does not divide them."""
    leaves = tree_leaves((node.args, node.kwargs))
    tensors = [leaf.meta["val"] for leaf in leaves if isinstance(leaf, Node) and leaf not in fixed]
    rows = {tensor.shape[0] / traced for tensor in tensors if tensor.dim()}
    largest = max((leaf for leaf in leaves if type(leaf) is int), default=0)
    chunks = min(rows) / largest if largest > 0 and len(rows) == 1 else 1.0
    return int(chunks) if chunks > 1 and chunks.is_integer() else 1


def _run(
    node: Node, code: Callable[..., Any], fixed: Collection[Node], sequences: int, traced: int
) -> tuple[RecordedPhase, list[int]]:
    def argument(value: Any) -> Any:
        if not isinstance(value, Node):
            return value
        tensor: Tensor = value.meta["val"]
        size = list(tensor.shape)
        if size and value not in fixed:
            size[0] = size[0] * sequences // traced
        return tensor.new_empty(size)

    arguments, options = tree_map(argument, (node.args, node.kwargs))
    with torch.no_grad():
        recorded, result = record_call(lambda: code(*arguments, **options), tree_leaves((arguments, options)))
    return recorded, [tensor.untyped_storage().nbytes() for tensor in tree_leaves(result)]


def module_buffers(
    forward: KernelGraph,
    backward: KernelGraph,
    saved: Mapping[Node, Node],
    weights: Sequence[bool],
    results: Sequence[Node | None],
) -> tuple[Buffer, ...]:
    """Return the buffers in the order in which they are allocated.

    Args:
        saved: a placeholder of the backward -> the storage of the forward that it receives
        weights: whether each input of the forward is a weight
        results: those of the forward
    """
    start = -len(forward.kernels)
    end_of = {
        storage: end + 1 for node, (_, end) in backward.lifetimes().items() if (storage := saved.get(node))
    }
    gradients: list[Role] = ["weight_grad" if weight else "input_grad" for weight in weights]
    roles = dict(zip(backward.returned(), gradients, strict=True))
    role_of = {saved[node]: role for node, role in roles.items() if node and node in saved}
    buffers = []
    for node, (begin, end) in forward.lifetimes().items():
        role: Role = "input" if begin < 0 else "output" if node in results else role_of.get(node, "inner")
        last = end_of.get(node, min(start + end, -1))
        buffers.append(Buffer(role, forward.size(node), start + begin, last))
    for node, (begin, end) in backward.lifetimes().items():
        if node not in saved:
            role = "output_grad" if begin < 0 else roles.get(node, "inner")
            size = backward.size(node)
            if role == "weight_grad":  # one size, also where the graph computes it from activations alone
                size = Linear(size.at(backward.micro_batch_size))
            buffers.append(Buffer(role, size, begin + 1, end + 1))
    buffers += [*_inside_operators(forward, start), *_inside_operators(backward, 1)]
    return tuple(sorted(buffers, key=lambda buffer: buffer.begin))


def _inside_operators(graph: KernelGraph, start: int) -> list[Buffer]:
    """Return what custom operators allocate besides results: a buffer for each operator and kind of size."""
    buffers = []
    for i, kernel in enumerate(graph.kernels):
        if body := graph.bodies.get(kernel.nodes[0]):
            peak = max(body.phase.live_bytes, key=lambda moment: moment.at(graph.micro_batch_size))
            inside = total((peak, *(result.times(-1) for result in body.results)))
            parts = Linear(max(0.0, inside.fixed)), Linear(0.0, max(0.0, inside.per_sequence))
            buffers += [Buffer("inner", part, start + i, start + i) for part in parts if part != Linear()]
    return buffers
