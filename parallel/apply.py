"""Apply a plan to a model: the one place that fixes the order of the steps. What only some plans need is
imported late.

Attributes that the steps set on a model or its modules:

    unsharded            tensor_parallel.py, on norms of other formulas: a copy, computes with given weights
    tensor_axis          tensor_parallel.py, on split modules: the axis that their forwards use
    matrix               tensor_parallel.py, on modules with this method: returns this rank's shard
    around               model/attention_cores.py, on attention of transformers: the exchange around it
    product              float8.py, on linear layers: the float8 product, called by tensor_parallel.py
    saved_ops            activation_checkpoint.py, on recomputed modules: operators whose results are saved
    activation_offload   activation_offload.py, on the model: `evaluating` disables it
    _compiled_call_impl  activation_offload.py and compile/apply.py: torch's own, replaces a call
"""

import warnings
from datetime import timedelta
from typing import get_args

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.compile.apply import apply_compile
from meshwright.parallel.errors import PlanError
from meshwright.parallel.fsdp import Gradients, apply_fsdp, apply_prefetch, refuse_planned
from meshwright.parallel.mesh import fsdp_mesh
from meshwright.parallel.plan.schema import Plan, ShardableModel
from meshwright.parallel.sharded_model import ShardedModel


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
    refuse_planned(model)
    if isinstance(model, ShardableModel):
        model.choose_kernels(plan.attention, plan.loss_chunk_tokens, plan.fused_projections)
    if plan.float8.linears:
        from meshwright.parallel.float8 import apply_float8

        apply_float8(model, plan, mesh.device_type)
    if plan.tensor.styles:
        from meshwright.parallel.tensor_parallel import apply_tensor_parallel

        apply_tensor_parallel(model, plan, mesh["tp"])
    if plan.mesh.cp > 1:
        from meshwright.parallel.context_parallel import apply_context_parallel

        apply_context_parallel(model, plan, mesh, group_timeout)
    kinds = {unit.activation_checkpoint for unit in plan.units}
    if kinds & {"full", "selective"}:
        from meshwright.parallel.activation_checkpoint import apply_activation_checkpoint

        apply_activation_checkpoint(model, plan)
    apply_compile(model, plan, mesh["tp"])
    if "offload" in kinds:
        from meshwright.parallel.activation_offload import apply_activation_offload

        apply_activation_offload(model, plan)
    if mesh.get_rank():  # of a head with a bias, for example: once is enough
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    apply_fsdp(model, plan, fsdp_mesh(mesh, plan.mesh), gradients, group_timeout)
    apply_prefetch(model, plan)
    sharded = ShardedModel(model, plan, mesh, gradients)
    sharded.complete_after_backwards()
    return sharded
