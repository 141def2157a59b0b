"""Apply a plan to a model: the one place that fixes the order of the steps."""

from datetime import timedelta

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.activation_checkpoint import apply_activation_checkpoint
from meshwright.parallel.compile.apply import apply_compile
from meshwright.parallel.fsdp import apply_fsdp, apply_prefetch
from meshwright.parallel.mesh import fsdp_mesh
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.shardable import ShardableModel
from meshwright.parallel.tensor_parallel import apply_tensor_parallel


def apply_plan(
    model: nn.Module, plan: Plan, mesh: DeviceMesh, group_timeout: timedelta | None = None
) -> None:
    """Shard and compile a model on the meta device, in place. Afterwards the caller allocates its tensors
    (`to_empty`) and fills them. `group_timeout`: as in apply_fsdp."""
    if isinstance(model, ShardableModel):
        model.choose_kernels(plan.attention, plan.loss_chunk_tokens, plan.fused_projections)
    if plan.float8.linears:
        from meshwright.parallel.float8 import apply_float8

        apply_float8(model, plan, mesh.device_type)
    apply_tensor_parallel(model, plan, mesh["tp"])
    apply_activation_checkpoint(model, plan)
    apply_compile(model, plan, mesh["tp"])
    if any(unit.activation_checkpoint == "offload" for unit in plan.units):
        from meshwright.parallel.activation_offload import apply_activation_offload

        apply_activation_offload(model, plan)
    apply_fsdp(model, plan, fsdp_mesh(mesh, plan.mesh), group_timeout)
    apply_prefetch(model, plan)
