"""The buffers of a compiled module: the tensors that its forward and backward allocate, with their
lifetimes."""

from collections.abc import Mapping, Sequence

from torch.fx import Node

from meshwright.parallel.planner.tracing.fx_graph import KernelGraph, overwritten
from meshwright.parallel.planner.workload import Buffer, Linear, total


def module_buffers(
    forward: KernelGraph, backward: KernelGraph, placeholders: Mapping[Node, Node], weights: Sequence[bool]
) -> tuple[Buffer, ...]:
    """Return the buffers in the order in which they are allocated.

    Args:
        placeholders: the backward's placeholder of each saved storage -> the storage in the forward's graph
        weights: whether each input of the forward is a weight
    """
    start = -len(forward.kernels)
    born, dead = _lifetimes(forward)
    born_again, dead_again = _lifetimes(backward)
    output, *_ = forward.returned()
    saved = {node: dead_again[place] for place, node in placeholders.items()}
    buffers = [
        Buffer(
            "input" if born[node] < 0 else "output" if node is output else "inner",
            forward.size(node),
            start + born[node],
            saved[node] if node in saved else min(start + dead[node], -1),
        )
        for node in born
    ]
    roles = {
        node: "weight_grad" if weight else "input_grad"
        for node, weight in zip(backward.returned(), weights, strict=True)
        if node is not None
    }
    for node in (node for node in born_again if node not in placeholders):
        role = "output_grad" if born_again[node] < 0 else roles.get(node, "inner")
        size = backward.size(node)
        if role == "weight_grad":  # XXX
            size = Linear(size.at(backward.micro_batch_size))
        buffers.append(Buffer(role, size, born_again[node], dead_again[node]))  # type: ignore[arg-type]
    buffers += [*_inner(forward, start), *_inner(backward, 0)]
    return tuple(sorted(buffers, key=lambda buffer: buffer.begin))


def _lifetimes(graph: KernelGraph) -> tuple[dict[Node, int], dict[Node, int]]:
    """Return the first and the last kernel of each storage that is counted; -1 for a placeholder's first."""
    last = {node: i for i, kernel in enumerate(graph.kernels) for node in kernel.reads | kernel.writes}
    last |= dict.fromkeys(filter(None, graph.returned()), len(graph.kernels))
    born = dict.fromkeys(sorted(graph.counted_placeholders()), -1)
    for i, kernel in enumerate(graph.kernels):
        dying = [node for node in sorted(kernel.reads & born.keys()) if last[node] == i]
        for node in overwritten(kernel, dying):
            last[node] = i - 1
        born |= dict.fromkeys(sorted(kernel.writes), i)
    return born, {node: last.get(node, -1) for node in born}


def _inner(graph: KernelGraph, start: int) -> list[Buffer]:
    """Return the buffers inside of custom operators, as one per operator for each kind of size."""
    buffers = []
    for i, kernel in enumerate(graph.kernels):
        if body := graph.bodies.get(kernel.nodes[0]):
            peak = max(body.phase.live_bytes, key=lambda moment: moment.at(1))
            rest = total((peak, *(result.times(-1) for result in body.results)))
            parts = Linear(max(0.0, rest.fixed)), Linear(0.0, max(0.0, rest.per_sequence))
            buffers += [Buffer("inner", part, start + i, start + i) for part in parts if part != Linear()]
    return buffers
