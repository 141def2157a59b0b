"""The buffers of a compiled module: the tensors that forward and backward allocate, with their lifetimes."""

from collections.abc import Mapping, Sequence

from torch.fx import Node

from meshwright.parallel.planner.tracing.fx_graph import KernelGraph
from meshwright.parallel.planner.workload import Buffer, Linear, Role, total


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
