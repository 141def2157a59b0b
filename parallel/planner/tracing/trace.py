"""Derive a module's workload from its code, on fake tensors with the shapes of one tensor-parallel rank:
traced by the compiler, or run eagerly.

It needs no device, no process group and no memory. With compilation torch's own partitioner decides which
activations the forward saves and which the backward recomputes, as in the run.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import getitem
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch.distributed.tensor import Placement, Shard
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from meshwright.parallel.activation_checkpoint import count_saved
from meshwright.parallel.compile.apply import through_own_frame
from meshwright.parallel.model.forward import fake_tensors
from meshwright.parallel.plan.schema import TensorPlan
from meshwright.parallel.plan.selective_policy import find_op
from meshwright.parallel.planner.tracing.eager import TracedModule, trace_eager
from meshwright.parallel.planner.tracing.fx_graph import GraphInputs, KernelGraph, module_buffers
from meshwright.parallel.planner.workload import ModuleWorkload, total
from meshwright.parallel.tensor_parallel import TensorAxis, apply_styles


def apply_as_single_tp_rank(model: nn.Module, tensor: TensorPlan, degree: int) -> None:
    """Apply tensor parallelism as `apply_tensor_parallel` does, for rank 0 only and without a process group,
    to trace the model: weights are plain tensors with the shapes of one rank."""
    axis = TensorAxis("tp", degree, 0, tensor.sequence_parallel)

    def shard(full: Tensor, placement: Placement) -> Tensor:
        return full.chunk(axis.degree, placement.dim)[0].clone() if isinstance(placement, Shard) else full

    apply_styles(model, tensor, axis, shard)


MOST_TRACED_SEQUENCES = 2  # the graphs of all larger micro batches are the same, except for sizes


def eager_workload(build: Callable[[int], TracedModule], on_cuda: bool = False) -> ModuleWorkload:
    """Return the workload, run eagerly by the kernels of a CPU or of CUDA, of the module that `build` returns
    for a number of sequences."""
    with fake_tensors():
        forward, backward, saved, output = trace_eager(build, on_cuda)
        module = build(1).module
    return ModuleWorkload(
        count_parameters(module), forward, backward, saved, output, list_weights(module.parameters())
    )


InputKind = Literal["weight", "table", "given"]  # table: a buffer, or a tensor that the caller holds


@dataclass(frozen=True)
class JointGraph:
    """The graph of a module's forward and backward that the compiler captures before it decides which
    activations to save. All ways of activation checkpointing share it.

    Args:
        graph: as AOTAutograd captures it
        options: of the partitioner
        kinds: what each input is
        subject: the captured module with its arguments, of `sequences` sequences
    """

    graph: GraphModule
    options: Mapping[str, Any]
    kinds: tuple[InputKind, ...]
    subject: TracedModule
    sequences: int

    def decomposes(self, ops: Iterable[str]) -> bool:
        """Whether the graph has other operations in place of one of these operators."""
        packets = {find_op(op) for op in ops}
        return any(
            _packet(node.meta.get("original_aten")) in packets and _packet(node.target) not in packets
            for node in self.graph.graph.nodes
            if node.target is not getitem
        )


def _kind(value: Any, subject: TracedModule) -> InputKind:
    """Return what an input of a captured graph is."""
    if isinstance(value, nn.Parameter):
        return "weight"
    held = (*subject.tables, *subject.module.buffers())
    return "table" if any(value is tensor for tensor in held) else "given"


def _packet(op: Any) -> Any:
    return getattr(op, "overloadpacket", op)


def capture_joint(build: Callable[[int], TracedModule], micro_batch_size: int = 2) -> JointGraph:
    """Capture the module that `build` returns for a number of sequences. The graph of one sequence has fewer
    copies than that of several."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import default_partition
    from torch._inductor.decomposition import select_decomp_table

    captured: list[JointGraph] = []
    kinds: list[InputKind] = []
    sequences = min(micro_batch_size, MOST_TRACED_SEQUENCES)

    def partition(joint: GraphModule, inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
        captured.append(JointGraph(_copy(joint), options, tuple(kinds), subject, sequences))
        return default_partition(joint, inputs, **options)  # any: only the forward runs, on fake tensors

    def compile_nothing(graph: GraphModule, inputs: Sequence[Any]) -> Any:
        return make_boxed_func(graph.forward)

    inner = aot_autograd(
        fw_compiler=compile_nothing,
        bw_compiler=compile_nothing,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )

    def backend(graph: GraphModule, inputs: list[Any]) -> Any:
        kinds.extend(_kind(x, subject) for x in inputs)
        return inner(graph, inputs)

    with fake_tensors(), _quiet_compiler():
        subject = build(sequences)
        through_own_frame(subject.module)
        # all of it: some modules compile only a part of themselves
        nn.Module.compile(subject.module, fullgraph=True, backend=backend)
        subject.call()
    (joint,) = captured
    return joint


def compiled_workload(
    joint: JointGraph, saved_ops: tuple[str, ...] | None = None, budget: float = 1.0
) -> ModuleWorkload:
    """Return the workload of a captured module as inductor would run it.

    Args:
        saved_ops: with activation checkpointing, the operators whose results are saved, none of which the
            graph decomposes; None: without it, or the captured module does it itself
        budget: share of the activations that the compiler saves
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graph = _copy(joint.graph)
    if saved_ops is not None:
        _tag_recomputed(graph.graph, saved_ops)
    with (
        fake_tensors(),
        functorch.patch(activation_memory_budget=budget),
        _random_operators_as_they_are(),
    ):
        forward, backward = min_cut_rematerialization_partition(graph, (), **joint.options)
        return _read(forward.graph, backward.graph, joint)


@contextmanager
def _random_operators_as_they_are() -> Iterator[None]:
    """Context in which the partitioner does not wrap recomputed operators that may draw random numbers, such
    as torch's attention, into ones that save the generator's state: the same kernels, and some bytes more."""
    from torch._functorch import partitioners

    found = partitioners.has_recomputable_rng_ops
    partitioners.has_recomputable_rng_ops = lambda fx_g: False
    try:
        yield
    finally:
        partitioners.has_recomputable_rng_ops = found


def _copy(module: GraphModule) -> GraphModule:
    """Copy a graph and the tags of its nodes; their fake tensors are shared."""
    graph, (end,) = Graph(), module.graph.find_nodes(op="output")
    graph.output(graph.graph_copy(module.graph, {})).meta = dict(end.meta)
    return GraphModule(module, graph)


def _tag_recomputed(joint: Graph, saved_ops: tuple[str, ...]) -> None:
    """Tag the operations of the forward for the partitioner as torch.utils.checkpoint does around all of it
    (_CachingTorchDispatchMode)."""
    is_saved, policies = count_saved(saved_ops), dict[Node, CheckpointPolicy]()
    for node in joint.nodes:
        if node.op == "call_function" and node.meta.get("partitioner_tag") == "is_forward":
            if node.target is getitem:  # one of an operation's results
                policies[node] = policies[node.args[0]]
            else:
                saved = is_saved(node.target)
                policies[node] = CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
            node.meta |= {"ac_graph_id": 0, "recompute": policies[node]}


def _read(forward: Graph, backward: Graph, joint: JointGraph) -> ModuleWorkload:
    """Convert both graphs to kernels. The forward returns its result, then the tensors saved for the
    backward, whose placeholders have the same names."""
    kinds, sequences, primals = joint.kinds, joint.sequences, _placeholders(forward)
    assert len(primals) == len(kinds), "the compiled graph must take every input of the module, in order"
    counted = {node for node, kind in zip(primals, kinds, strict=True) if kind == "given"}
    uncounted = {node.name for node in primals if node not in counted}
    forward_kernels = KernelGraph(forward, GraphInputs(set(primals) - counted, {}, held=True), sequences)
    returned, count = forward_kernels.returned(), joint.options["num_fwd_outputs"]
    results, saved = returned[:count], returned[count:]
    storage = {node.name: forward_kernels.storage.get(node) for node in forward.nodes}
    same_as, first_with = dict[Node, Node](), dict[Node | None, Node]()
    for node in _placeholders(backward):
        if node.name in storage and node.name not in uncounted:
            same_as[node] = first_with.setdefault(storage[node.name], node)
    weights_again = {node for node in _placeholders(backward) if node.name in uncounted}
    caller_holds = {*results, *primals}
    donated = {node for node in same_as if storage[node.name] not in caller_holds}
    fixed = {
        node
        for node in same_as
        if (owner := storage[node.name]) and not forward_kernels.size(owner).per_sequence
    }
    backward_kernels = KernelGraph(
        backward,
        GraphInputs(weights_again, same_as, held=False, donated=donated, fixed=fixed),
        sequences,
    )
    received = {backward_kernels.storage[node]: owner for node in same_as if (owner := storage[node.name])}
    saved_bytes = total(map(forward_kernels.size, {node for node in saved if node is not None}))
    result = total(map(forward_kernels.size, {node for node in results if node is not None}))
    module = joint.subject.module
    return ModuleWorkload(
        count_parameters(module),
        forward_kernels.phase(),
        backward_kernels.phase(),
        saved_bytes,
        result,
        list_weights(module.parameters()),
        buffers=module_buffers(
            forward_kernels, backward_kernels, received, [kind == "weight" for kind in kinds], results
        ),
    )


def _placeholders(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def count_parameters(module: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def list_weights(parameters: Iterable[nn.Parameter]) -> tuple[tuple[int, int], ...]:
    """Return (rows, values per row) of each parameter."""
    return tuple((len(p), p.numel() // len(p)) if p.dim() else (1, 1) for p in parameters)


@contextmanager
def _quiet_compiler() -> Iterator[None]:
    """Reset dynamo before and after, so that the run's own counts of graphs are not affected."""
    torch._dynamo.reset()
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():  # caused by dynamo itself, which hides them too
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
