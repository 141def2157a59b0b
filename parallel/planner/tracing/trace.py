"""Derive a module's workload from its code, on fake tensors with the shapes of one tensor-parallel rank:
traced by the compiler, or run eagerly.

It needs no device, no process group and no memory. With compilation torch's own partitioner decides which
activations the forward saves and which the backward recomputes, as in the run.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from operator import getitem
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch.distributed.tensor import Placement, Shard
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

from meshwright.parallel.activation_checkpoint import count_saved, selective_contexts
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
    copies than that of several.

    AOTAutograd traces the module itself, which gives the graph of torch.compile in 40% of its time: dynamo
    reads all of the module's Python code only to pass on the same operations.
    """
    from torch._functorch.aot_autograd import aot_function, boxed_nop_preserve_node_meta
    from torch._functorch.partitioners import default_partition
    from torch._inductor.decomposition import select_decomp_table

    captured: list[JointGraph] = []
    sequences = min(micro_batch_size, MOST_TRACED_SEQUENCES)

    def call(*tensors: Tensor) -> list[Tensor]:
        return _with_tensors(subject, dict(zip(map(id, inputs), tensors, strict=True))).call()

    def partition(joint: GraphModule, given: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
        kinds = tuple(
            _kind(tensor, subject) if node.users else "table"
            for tensor, node in zip(inputs, _placeholders(joint.graph), strict=False)  # then gradients
        )
        # the run has the weights anyway, so that saving one costs nothing
        options["static_lifetime_input_indices"] = [i for i, kind in enumerate(kinds) if kind == "weight"]
        captured.append(JointGraph(_copy(joint), options, kinds, subject, sequences))
        return default_partition(joint, given, **options)  # any: only the forward runs, on fake tensors

    with fake_tensors(), _as_compiled():
        subject = build(sequences)
        leaves = (*tree_leaves((subject.args, dict(subject.kwargs))), *_held_tensors(subject.module, set()))
        inputs = [*{id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values()]
        aot_function(
            call,
            fw_compiler=boxed_nop_preserve_node_meta,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )(*inputs)
    (joint,) = captured
    return joint


def _held_tensors(module: nn.Module, seen: set[nn.Module]) -> Iterator[Tensor]:
    """Yield the parameters, the buffers and the tensors in attributes of a module, of its submodules, and of
    modules that it keeps in lists and tuples. `seen`: modules to leave out; grows."""
    seen.add(module)
    for leaf in tree_leaves(vars(module)):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, nn.Module) and leaf not in seen:
            yield from _held_tensors(leaf, seen)


def _with_tensors(subject: TracedModule, new: Mapping[int, Tensor]) -> TracedModule:
    """Return a copy with other tensors, by the ids of those that they replace."""
    args, kwargs = tree_map_only(Tensor, lambda x: new[id(x)], (subject.args, dict(subject.kwargs)))
    return TracedModule(copy.deepcopy(subject.module, dict(new)), args, kwargs)


@contextmanager
def _as_compiled() -> Iterator[None]:
    """Context in which models take the ways of compiled code, and torch.utils.checkpoint tags operations for
    the partitioner, as in a graph of dynamo's (torch/_higher_order_ops/wrap.py), and recomputes nothing."""
    checkpoints: Any = torch.utils.checkpoint
    found = checkpoints._checkpoint_without_reentrant_generator, checkpoints.CheckpointFunction
    regions = count()

    def tag(function: Any, preserve: bool, context_fn: Any, *_: Any, **__: Any) -> Iterator[None]:
        contexts = selective_contexts(()) if context_fn is checkpoints.noop_context_fn else context_fn()
        contexts[0].ac_graph_id = next(regions)
        with contexts[0]:
            yield

    def reentrant(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return checkpoints.checkpoint(function, *args, use_reentrant=False)

    checkpoints._checkpoint_without_reentrant_generator = tag
    checkpoints.CheckpointFunction = SimpleNamespace(apply=reentrant)
    try:
        with torch.compiler._compile_session_context():
            yield
    finally:
        checkpoints._checkpoint_without_reentrant_generator, checkpoints.CheckpointFunction = found


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
