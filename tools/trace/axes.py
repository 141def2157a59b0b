"""Whose a collective is: FSDP2's or tensor parallelism's, and on which axis of the mesh."""

from collections.abc import Mapping

from meshwright.parallel.plan.schema import MeshPlan
from meshwright.tools.trace.labels import ROOT_END
from meshwright.tools.trace.places import Place
from meshwright.tools.trace.store import Store

AXIS_OF_LANE: Mapping[str, str] = {
    "all_gather": "dp_shard",
    "reduce_scatter": "dp_shard",
    "all_reduce": "dp_replicate",
}
# labels in which FSDP2 launches its collectives
FSDP_LAUNCHES = frozenset({"all_gather", "post_backward_reduce"})
MESH = "mesh_"  # DeviceMesh describes the group of an axis as mesh_AXIS


def find_lane(collective: str) -> str:
    """The lane of one that is not tensor parallelism's."""
    return collective if collective in ("all_gather", "reduce_scatter") else "all_reduce"


def find_axis(collective: str, place: Place, mesh: MeshPlan | None) -> str:
    """By the label in which it was launched; `mesh`: the run's, None where that is not known. "" for what is
    of no axis that can be told: the number of tokens and the norm of the gradients, before all units and
    behind them.

    FSDP2 launches in labels of its own only. The rest of a forward or backward is tensor parallelism's, if
    there is any.
    """
    if place.kind in FSDP_LAUNCHES:
        axis = AXIS_OF_LANE[find_lane(collective)]
        replicates = place.kind == "post_backward_reduce" and (mesh is None or mesh.dp_replicate > 1)
        return axis if axis != "dp_replicate" or replicates else ""
    if place.phase == "optimizer" or place.kind == ROOT_END:
        return ""
    splits = place.kind in ("forward", "backward") if mesh is None else mesh.tp > 1 and bool(place.unit)
    return "tp" if splits else ""


def group_axes(store: Store) -> dict[str, str]:
    """Name of a process group -> axis of the mesh, where the group is one's and the trace lists it (NCCL)."""
    groups = (store.header.get("distributedInfo") or {}).get("pg_config") or []
    return {
        str(group.get("pg_name", "")): str(group["pg_desc"]).removeprefix(MESH)
        for group in groups
        if str(group.get("pg_desc", "")).startswith(MESH)
    }
