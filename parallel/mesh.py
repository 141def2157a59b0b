"""DeviceMesh of a plan, its data-parallel parts and groups."""

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.parallel.plan.schema import AXES, MeshPlan


def build_mesh(mesh: MeshPlan, device_type: str) -> DeviceMesh:
    """Build a mesh with the axes dp_replicate, dp_shard and tp, including those of degree 1. Needs an
    initialized process group."""
    return init_device_mesh(device_type, tuple(getattr(mesh, axis) for axis in AXES), mesh_dim_names=AXES)


def fsdp_mesh(mesh: DeviceMesh, plan: MeshPlan) -> DeviceMesh:
    """Return the submesh for FSDP2: dp_shard, or dp_replicate x dp_shard (HSDP)."""
    return mesh["dp_replicate", "dp_shard"] if plan.dp_replicate > 1 else mesh["dp_shard"]


def data_parallel_rank(mesh: DeviceMesh, plan: MeshPlan) -> int:
    """Return the index of this rank's part of the global batch: 0 .. data_parallel - 1, the same for all
    ranks of a tp group."""
    return mesh.get_local_rank("dp_replicate") * plan.dp_shard + mesh.get_local_rank("dp_shard")


def data_parallel_group(mesh: DeviceMesh) -> ProcessGroup:
    """Return the process group over dp_replicate and dp_shard: the ranks with this tp rank, which together
    process the global batch."""
    # DeviceMesh has no public function to join axes into one group (torch 2.11 to 2.13).
    return mesh["dp_replicate", "dp_shard"]._flatten("data_parallel").get_group()
