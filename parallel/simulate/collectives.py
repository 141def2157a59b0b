"""Records the collectives that a training step issues, on a fake or a real process group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.parallel.mesh import AXES, CONTEXT_GROUP
from meshwright.parallel.operators import custom_op_body
from meshwright.parallel.simulate.memory_tracker import StorageTracker
from meshwright.parallel.simulate.module_tracker import ModuleTracker

NAMESPACES = ("c10d", "_c10d_functional")
KINDS = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
}


@dataclass(frozen=True)
class Collective:
    """One collective of one rank.

    Args:
        op: all_gather, reduce_scatter, all_reduce, all_to_all, or torch's name of another
        axis: dp_shard (with cp), dp_replicate, cp, tp; data_parallel for all but tp together; world for all
            ranks
        unit: the unit whose parameters are gathered or whose gradients are reduced, else the unit that runs;
            "" outside of units
        phase: forward, backward, recompute (of activations, within the backward), or optimizer
        bytes: of the full tensor: an all-gather's output, a reduce-scatter's input, an all-reduce's or an
            all-to-all's tensor
    """

    op: str
    axis: str
    unit: str
    phase: str
    bytes: int


class StepRecorder(TorchDispatchMode):
    """Intercepts every operation below autograd: records collectives, and passes results to `storages`, which
    tracks memory, if that is given. `axes`: the result of `axes_of_groups`."""

    def __init__(
        self, position: ModuleTracker, axes: Mapping[str, Sequence[str]], storages: StorageTracker | None
    ) -> None:
        super().__init__()
        self.position = position
        self.collectives: list[Collective] = []
        self._storages = storages
        self._axes = axes
        self._in_dtensor = False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types and self._in_dtensor:
            # DTensor then dispatches operations on local tensors, which are intercepted in turn.
            return NotImplemented
        if DTensor in types:
            result = self._run_on_dtensors(op, args, kwargs or {})
        elif code := custom_op_body(op):
            with self:
                result = code(*args, **(kwargs or {}))
        else:
            result = op(*args, **(kwargs or {}))
        if op.namespace == "profiler":
            closed = self.position.follow_label(op, args)
            if self._storages is not None:
                self._storages.follow_label(closed)
        elif op.namespace in NAMESPACES:
            self._add(op, args, result)
        # Inside an operation on DTensors only collectives count: the first time, DTensor runs the operation
        # with tensors of the global shape to infer its result.
        if self._storages is not None and not self._in_dtensor:
            self._storages.follow_result(result)
        return result

    def _run_on_dtensors(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on DTensors and intercept the operations inside it."""
        self._in_dtensor = True
        try:
            with self:
                return op(*args, **kwargs)
        finally:
            self._in_dtensor = False

    def _add(self, op: Any, args: tuple[Any, ...], result: Any) -> None:
        group = _group_of(args)
        if group is None or group.size() == 1:
            return  # a single rank communicates nothing
        position = self.position
        self.collectives.append(
            Collective(
                _kind(op), self._axis(group), position.unit, position.phase, max(map(_bytes, (*args, result)))
            )
        )

    def _axis(self, group: dist.ProcessGroup) -> str:
        """Return the mesh axis of a group. Of several names, it is the single axis within a unit, and the
        joined axes outside. A group that FSDP2 created (int reshard_after_forward) is a part of dp_shard."""
        if group.group_desc == CONTEXT_GROUP:
            return "cp"
        names = self._axes.get(group.group_name, ["dp_shard"])
        return names[0] if self.position.unit else names[-1]


def axes_of_groups(mesh: DeviceMesh, data_parallel: dist.ProcessGroup) -> dict[str, list[str]]:
    """Return the axis names of each process group, the narrowest first: an axis with all ranks has the group
    of the world. `data_parallel`: the result of `data_parallel_group`."""
    world = dist.group.WORLD
    assert world is not None, "a mesh needs a process group"
    groups = [(axis, mesh.get_group(axis)) for axis in AXES]
    names: dict[str, list[str]] = {}
    for name, group in [*groups, ("data_parallel", data_parallel), ("world", world)]:
        names.setdefault(group.group_name, []).append(name)
    return names


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """Return the process group among an operation's arguments: an object, boxed, or the last string, a name.

    None if there is none: the operation is not a collective, such as the one that waits for a collective.
    """
    for arg in args:
        if isinstance(arg, dist.ProcessGroup):
            return arg
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in arg._type().qualified_name():
            return dist.ProcessGroup.unbox(arg)
    names = [arg for arg in args if isinstance(arg, str)]
    return dist.distributed_c10d._resolve_process_group(names[-1]) if names else None  # type: ignore[attr-defined, arg-type]


def _kind(op: Any) -> str:
    name = op.__name__.replace("_", "").lower()
    return next((kind for part, kind in KINDS.items() if part in name), op.__name__.partition(".")[0])


def _bytes(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    return value.nbytes if isinstance(value, Tensor) else 0
