"""Apply a plan to a model: the one place that fixes the order of the steps."""

import warnings
from datetime import timedelta
from typing import get_args

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from meshwright.parallel.activation_checkpoint import apply_activation_checkpoint
from meshwright.parallel.compile.apply import apply_compile
from meshwright.parallel.context_parallel import apply_context_parallel
from meshwright.parallel.errors import PlanError
from meshwright.parallel.fsdp import Gradients, apply_fsdp, apply_prefetch
from meshwright.parallel.mesh import fsdp_mesh
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.shardable import ShardableModel
from meshwright.parallel.sharded_model import ShardedModel
from meshwright.parallel.tensor_parallel import apply_tensor_parallel


def apply_plan(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    *,
    gradients: Gradients,
    group_timeout: timedelta | None = None,
) -> ShardedModel:
    """Shard and compile a model on the meta device, in place, and return it with what a training loop needs.
    Afterwards `materialize` or `load_weights` gives it values.

    Args:
        gradients: what the gradients of the data-parallel ranks become. "mean_of_ranks" is right for a loss
            that is a mean over this rank's samples, if all ranks and micro batches have equally many; "sum"
            for a loss divided by the global number that `ShardedModel.micro_batches` gives
        group_timeout: of the groups of cp and the smaller ones of reshard_after_forward=INT; None: torch's
            default
    """
    if gradients not in get_args(Gradients):
        raise PlanError(f"gradients={gradients!r} must be one of {', '.join(get_args(Gradients))}")
    if isinstance(model, FSDPModule):
        raise PlanError("apply_plan: the model has a plan already: build it again for another")
    if isinstance(model, ShardableModel):
        model.choose_kernels(plan.attention, plan.loss_chunk_tokens, plan.fused_projections)
    if plan.float8.linears:
        from meshwright.parallel.float8 import apply_float8

        apply_float8(model, plan, mesh.device_type)
    apply_tensor_parallel(model, plan, mesh["tp"])
    apply_context_parallel(model, plan, mesh, group_timeout)
    apply_activation_checkpoint(model, plan)
    apply_compile(model, plan, mesh["tp"])
    if any(unit.activation_checkpoint == "offload" for unit in plan.units):
        from meshwright.parallel.activation_offload import apply_activation_offload

        apply_activation_offload(model, plan)
    if mesh.get_rank():  # of a head with a bias, for example: once is enough
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    apply_fsdp(model, plan, fsdp_mesh(mesh, plan.mesh), group_timeout)
    apply_prefetch(model, plan)
    return ShardedModel(model, plan, mesh, gradients)
