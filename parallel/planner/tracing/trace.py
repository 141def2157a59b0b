"""Reads a module's work from its own code: traced by the compiler that will compile it, or run eagerly, on
fake tensors, as one tensor-parallel rank holds it, without the others.

No device, no process group, no memory: only shapes. Under compilation it is torch's own partitioner that
decides what the forward keeps and what the backward computes again, as it will in the run.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Placement, Shard
from torch.fx import Graph, GraphModule, Node

from meshwright.parallel.plan.schema import TensorPlan
from meshwright.parallel.planner.tracing.eager import TracedModule, watch_eager
from meshwright.parallel.planner.tracing.fx_graph import GraphInputs, KernelGraph
from meshwright.parallel.planner.workload import Linear, ModuleWorkload, total
from meshwright.parallel.tensor_parallel import TensorAxis, apply_styles


def apply_as_one_rank(model: nn.Module, tensor: TensorPlan, degree: int) -> None:
    """What `apply_tensor_parallel` does, for rank 0 alone and without a process group, for whoever only looks
    at what a rank would do: weights are plain tensors of a rank's shapes."""
    axis = TensorAxis("tp", degree, 0, tensor.sequence_parallel)

    def share(whole: Tensor, placement: Placement) -> Tensor:
        return whole.chunk(axis.degree, placement.dim)[0].clone() if isinstance(placement, Shard) else whole

    apply_styles(model, tensor, axis, share)


TRACED_SEQUENCES = 2  # of the micro batch traced: not 1, whose dims the compiler takes away


def module_workload(
    build: Callable[[int], TracedModule], compiled: bool, budget: float = 1.0
) -> ModuleWorkload:
    """The work of a module that `build` makes for a micro batch of so many sequences.

    `compiled`: as inductor would run it, keeping `budget` of its activations; else as it runs eagerly.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        if compiled:
            return _trace_compiled(build(TRACED_SEQUENCES), budget)
        forward, backward, keeps, output = watch_eager(build)
        module = build(TRACED_SEQUENCES).module
    return ModuleWorkload(count_parameters(module), forward, backward, keeps, output, list_weights(module))


def _trace_compiled(subject: TracedModule, budget: float) -> ModuleWorkload:
    graphs: dict[str, GraphModule] = {}
    weights: list[bool] = []
    with _quiet_compiler(), functorch.patch(activation_memory_budget=budget):
        subject.module.compile(fullgraph=True, backend=_keep_graphs(graphs, weights))
        result = subject.call()
        result.backward(torch.empty_like(result))
    return _read(graphs["forward"].graph, graphs["backward"].graph, weights, subject)


def _keep_graphs(graphs: dict[str, GraphModule], weights: list[bool]) -> Any:
    """A backend that runs nothing worth mentioning, and leaves the graphs that inductor would get."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def keep(name: str) -> Callable[..., Any]:
        def compiler(graph: GraphModule, inputs: Sequence[Any]) -> Any:
            graphs[name] = graph
            return make_boxed_func(graph.forward)

        return compiler

    inner = aot_autograd(
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )

    def backend(graph: GraphModule, inputs: list[Any]) -> Any:
        weights.extend(isinstance(x, nn.Parameter) for x in inputs)
        return inner(graph, inputs)

    return backend


def _read(forward: Graph, backward: Graph, weights: Sequence[bool], subject: TracedModule) -> ModuleWorkload:
    """Both graphs as kernels. The forward returns first its result, then what it keeps for the backward,
    whose placeholders have the same names."""
    primals = _placeholders(forward)
    assert len(primals) == len(weights), "the compiler hands on every input of the module, in order"
    counted = {
        node for node, weight in zip(primals, weights, strict=True) if not weight and _has_micro_batch(node)
    }
    uncounted = {node.name for node in primals if node not in counted}
    there = KernelGraph(forward, GraphInputs(set(primals) - counted, {}, held=True), TRACED_SEQUENCES)
    output, *kept = there.returned()
    made = {node.name: there.storage.get(node) for node in forward.nodes}
    same_as, first_with = dict[Node, Node](), dict[Node | None, Node]()
    for node in _placeholders(backward):
        if node.name in made and node.name not in uncounted:
            same_as[node] = first_with.setdefault(made[node.name], node)
    again = {node for node in _placeholders(backward) if node.name in uncounted}
    caller_holds = {output, *primals}
    donated = {node for node in same_as if made[node.name] not in caller_holds}
    fixed = {node for node in same_as if (maker := made[node.name]) and not there.size(maker).per_sequence}
    back = KernelGraph(
        backward, GraphInputs(again, same_as, held=False, donated=donated, fixed=fixed), TRACED_SEQUENCES
    )
    keeps = total(map(there.size, {node for node in kept if node is not None}))
    result = there.size(output) if output is not None else Linear()
    module = subject.module
    return ModuleWorkload(
        count_parameters(module), there.phase(), back.phase(), keeps, result, list_weights(module)
    )


def _placeholders(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _has_micro_batch(node: Node) -> bool:
    return bool(node.meta["val"].shape[:1] == (TRACED_SEQUENCES,))


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def list_weights(module: nn.Module) -> tuple[tuple[int, int], ...]:
    """Rows of each parameter, and values of a row."""
    return tuple(
        (parameter.shape[0], parameter.numel() // parameter.shape[0]) for parameter in module.parameters()
    )


@contextmanager
def _quiet_compiler() -> Iterator[None]:
    """A dynamo that starts anew and leaves nothing behind, so that the run's own counts of graphs are its
    own."""
    torch._dynamo.reset()
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():  # of dynamo's own doing, which it does not show
            warnings.filterwarnings(
                "ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning
            )
            warnings.filterwarnings(
                "ignore", ".* should not be instantiated. Methods on autograd functions", DeprecationWarning
            )
            yield
    finally:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
