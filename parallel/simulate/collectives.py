"""The collectives of a training step, as they are really issued: simulated or on a real process group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.parallel.mesh import data_parallel_group
from meshwright.parallel.operators import inner_code
from meshwright.parallel.plan.schema import AXES
from meshwright.parallel.simulate.memory_tracker import StorageTracker
from meshwright.parallel.simulate.module_tracker import ModuleTracker

NAMESPACES = ("c10d", "_c10d_functional")
KINDS = {"allgather": "all_gather", "reducescatter": "reduce_scatter", "allreduce": "all_reduce"}


@dataclass(frozen=True)
class Collective:
    """One collective of one rank.

    Args:
        op: all_gather, reduce_scatter, all_reduce, or torch's name of another
        axis: dp_shard, dp_replicate, tp; data_parallel for dp_shard and dp_replicate together; world for all
            ranks
        unit: the unit whose parameters are gathered or whose gradients are reduced, or in which it runs; ""
            outside
        phase: forward, backward, recompute (of checkpointed activations, within the backward), or optimizer
        bytes: of the full side: an all-gather's output, a reduce-scatter's input, an all-reduce's tensor
    """

    op: str
    axis: str
    unit: str
    phase: str
    bytes: int


class StepRecorder(TorchDispatchMode):
    """Sees every operation below autograd: keeps the collectives, and shows the rest to `storages`, if given.

    `axes`: of `axes_of_groups`.
    """

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
            return NotImplemented  # let it become operations on local tensors, which come here again
        if DTensor in types:
            result = self._open(op, args, kwargs or {})
        elif code := inner_code(op):
            with self:
                result = code(*args, **(kwargs or {}))
        else:
            result = op(*args, **(kwargs or {}))
        if op.namespace == "profiler":
            closed = self.position.read_label(op, args)
            if self._storages is not None:
                self._storages.see_label(closed)
        elif op.namespace in NAMESPACES:
            self._add(op, args, result)
        # Inside an operation on DTensors only its collectives count: the first time, DTensor plays the
        # operation through with tensors of the whole shape to learn of its result.
        if self._storages is not None and not self._in_dtensor:
            self._storages.see(result)
        return result

    def _open(self, op: Any, args: Any, kwargs: Any) -> Any:
        """An operation on DTensors, looking at what is done in it."""
        self._in_dtensor = True
        try:
            with self:
                return op(*args, **kwargs)
        finally:
            self._in_dtensor = False

    def _add(self, op: Any, args: tuple[Any, ...], result: Any) -> None:
        group = _group_of(args)
        if group is None or group.size() == 1:
            return  # nothing is sent
        position = self.position
        self.collectives.append(
            Collective(
                _kind(op), self._axis(group), position.unit, position.phase, max(map(_bytes, (*args, result)))
            )
        )

    def _axis(self, group: dist.ProcessGroup) -> str:
        """Of the names of one group, that of an axis within a unit, that of the joined axes outside. A group
        that FSDP2 made for itself is a part of dp_shard (reshard_after_forward to a smaller group)."""
        names = self._axes.get(group.group_name, ["dp_shard"])
        return names[0] if self.position.unit else names[-1]


def axes_of_groups(mesh: DeviceMesh) -> dict[str, list[str]]:
    """Process group -> its names, the narrowest first: an axis of the whole world shares its group."""
    world = dist.group.WORLD
    assert world is not None, "a mesh needs a process group"
    groups = [(axis, mesh.get_group(axis)) for axis in AXES]
    names: dict[str, list[str]] = {}
    for name, group in [*groups, ("data_parallel", data_parallel_group(mesh)), ("world", world)]:
        names.setdefault(group.group_name, []).append(name)
    return names


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """The process group among an operation's arguments: itself, boxed, or by its name, which comes last; None
    if it has none and so is no collective, as what waits for one."""
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
