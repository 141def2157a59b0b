"""DeviceMesh of a plan, its data-parallel parts and groups.

The mesh has one axis for dp_shard x cp, under the name dp_shard: FSDP shards parameters over both together.
"""

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.schema import MeshPlan

T = TypeVar("T")

AXES = ("dp_replicate", "dp_shard", "tp")  # of the DeviceMesh
# by id of a mesh, with the mesh itself: not an attribute of it, because compiling copies a mesh
_DATA_GROUPS: dict[int, tuple[Callable[[], DeviceMesh | None], dist.ProcessGroup | None]] = {}
CONTEXT_GROUP = "mesh_cp"  # description of the groups of cp, which are not an axis of the DeviceMesh


def build_mesh(
    mesh: MeshPlan, device_type: str, timeout: timedelta | None = None, on_host: bool = False
) -> DeviceMesh:
    """Build a mesh with the axes dp_replicate, dp_shard (x cp) and tp, including those of degree 1. Needs an
    initialized process group; every rank calls it. `timeout`: of the axes' groups; None: torch's default;
    `on_host`: whether the groups reduce tensors in host memory too, as with cpu_offload."""
    ranks = torch.arange(mesh.world_size).view(mesh.dp_replicate, mesh.shards, mesh.tp)
    return mesh_of_own_groups(ranks, AXES, device_type, timeout, on_host)


def mesh_of_own_groups(
    ranks: Tensor, axes: Sequence[str], device_type: str, timeout: timedelta | None, on_host: bool = False
) -> DeviceMesh:
    """Build a mesh of `ranks`, one dim for each of `axes`; every rank of the world calls it.

    A rank creates the groups that it belongs to, in the order of the axes. `init_device_mesh` (torch 2.11 to
    2.13) calls `new_group` for every group of the mesh on every rank: 2,048 times if dp_shard has 1,024 ranks
    and the other axes one. Axes with the same ranks, all of degree 1, share a group.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    position = (ranks == dist.get_rank()).nonzero()[0].tolist()
    lines = []
    for dim, axis in enumerate(axes):
        line = ranks[tuple(slice(None) if d == dim else index for d, index in enumerate(position))]
        lines.append(tuple(line.tolist()))
        if lines[dim] not in groups:
            groups[lines[dim]] = _own_group(lines[dim], axis, device_type, timeout, on_host)
    return DeviceMesh.from_group(
        [groups[line] for line in lines], device_type, ranks, mesh_dim_names=tuple(axes)
    )


def _own_group(
    ranks: Sequence[int], axis: str, device_type: str, timeout: timedelta | None, on_host: bool = False
) -> dist.ProcessGroup:
    """Return the group of all ranks if these are all, otherwise a new one, which only `ranks` create.

    Without `on_host` it has the backend of `device_type` only: with GPUs a gloo half that no rank uses would
    cost sockets and entries in the rendezvous store.
    """
    world = dist.group.WORLD
    assert world is not None, "a mesh needs a process group"
    if len(ranks) == world.size():
        return world
    return _new_group(ranks, f"mesh_{axis}", device_type, timeout, on_host)


def _new_group(
    ranks: Sequence[int], description: str, device_type: str, timeout: timedelta | None, on_host: bool = False
) -> dist.ProcessGroup:
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    group = dist.new_group(
        list(ranks),
        timeout=timeout,
        backend=None if on_host else backends[device_type],
        use_local_synchronization=True,
        group_desc=description,
    )
    assert isinstance(group, dist.ProcessGroup), "the caller is one of the ranks"
    return group


def fsdp_mesh(mesh: DeviceMesh, plan: MeshPlan) -> DeviceMesh:
    """Return the submesh for FSDP2: dp_shard (x cp), or dp_replicate x dp_shard (HSDP)."""
    return mesh["dp_replicate", "dp_shard"] if plan.dp_replicate > 1 else mesh["dp_shard"]


def data_parallel_rank(mesh: DeviceMesh, plan: MeshPlan) -> int:
    """Return the index of this rank's part of the global batch: 0 .. data_parallel - 1, the same for all
    ranks of a cp or tp group."""
    return mesh.get_local_rank("dp_replicate") * plan.dp_shard + mesh.get_local_rank("dp_shard") // plan.cp


def context_rank(mesh: DeviceMesh, plan: MeshPlan) -> int:
    """Return the index of this rank among those that hold the tokens of the same sequences: 0 .. cp - 1."""
    return mesh.get_local_rank("dp_shard") % plan.cp


def context_group(mesh: DeviceMesh, plan: MeshPlan, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Return a new group of the ranks that hold the tokens of the same sequences. Every rank calls it.

    Never the group of FSDP's shards, also where that has the same ranks: a communicator runs its collectives
    one after another, and attention would wait for parameters that are gathered ahead.
    """
    shards = mesh["dp_shard"].mesh.tolist()
    first = mesh.get_local_rank("dp_shard") // plan.cp * plan.cp
    return _new_group(shards[first : first + plan.cp], CONTEXT_GROUP, mesh.device_type, timeout)


def gather_from_all(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks on every rank, exchanged on the host; every rank calls it. A process
    without a group is alone."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def raise_any(problem: str) -> None:
    """Raise a PlanError on every rank if any has a problem; every rank calls it."""
    for found in filter(None, gather_from_all(problem)):
        raise PlanError(found)


def data_parallel_group(mesh: DeviceMesh, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Return the process group over dp_replicate and dp_shard (x cp): the ranks with this tp rank, which
    together process the global batch. Every rank calls it.

    The group of an axis or of all ranks where that has these ranks, and on GPUs its communicator; only HSDP
    with tp needs one more, which the first call makes. `timeout`: as in build_mesh.
    """
    for axis, other in (("dp_shard", "dp_replicate"), ("dp_replicate", "dp_shard")):
        if mesh[other].size() == 1:
            return mesh.get_group(axis)
    of_mesh, group = _DATA_GROUPS.get(id(mesh), (lambda: None, None))
    if group is None or of_mesh() is not mesh:
        ranks = mesh["dp_replicate", "dp_shard"].mesh.flatten().tolist()
        group = _own_group(ranks, "data_parallel", mesh.device_type, timeout)
        _DATA_GROUPS[id(mesh)] = (weakref.ref(mesh), group)
    return group
