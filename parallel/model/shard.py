"""A model that was built as for one process, sharded in one call: DistributedDataParallel's, for FSDP2."""

import gc
import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from meshwright.parallel.apply import apply_plan
from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.errors import PlanError
from meshwright.parallel.fsdp import Gradients
from meshwright.parallel.mesh import build_mesh, gather_from_all
from meshwright.parallel.model.constructor import tensors_by_name
from meshwright.parallel.model.describe import Blocks, describe
from meshwright.parallel.model.forward import Example
from meshwright.parallel.model.inputs import tokens_of
from meshwright.parallel.model.parts import (
    LOSSES,
    Loss,
    check_signature,
    kind_of_loss,
    outputs_of_parts,
    rows_of,
)
from meshwright.parallel.plan.make import RunShape, make_plan
from meshwright.parallel.sharded_model import ShardedModel


def shard(
    model: nn.Module,
    example: Example,
    *,
    parallel: ParallelConfig | None = None,
    loss: Loss | None = None,
    gradients: Gradients = "mean_of_ranks",
    blocks: Blocks | None = None,
    units: Sequence[str] = (),
    unsharded: Sequence[str] = (),
    styles: Mapping[str, str] | None = None,
) -> ShardedModel:
    """Shard a model in place over all processes, with the values that it has on rank 0, as
    DistributedDataParallel does: `describe`, `make_plan`, `build_mesh` and `apply_plan` in one. After each
    backward the gradients are complete.

    Args:
        model: on the CPU, or on this process's device. One on the meta device needs `materialize` or
            `load_weights` afterwards
        example: arguments of one forward of a rank's micro batch
        parallel: None: FSDP over all processes, with compiled blocks
        loss: of the model's outputs and an example; refused if it is not what `gradients` is for, which takes
            three forwards of the example
        gradients: "mean_of_ranks" for a loss that is a mean, over equally many on every rank; else "sum"
        blocks, units, unsharded, styles: as in `describe`

    Raises PlanError, which names a way out, for what cannot be described, sharded, or trained so. Needs
    `torch.distributed.init_process_group` before; every rank calls it.
    """
    if not dist.is_initialized():
        raise PlanError("mw.shard needs a process group: call torch.distributed.init_process_group first")
    _refuse_optimizer(model)
    described = describe(model, example, blocks=blocks, units=units, unsharded=unsharded, styles=styles)
    if loss is not None:
        _check_loss(model, example, loss, gradients)
    size = dist.get_world_size()
    node = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    shape = RunShape(size, node, max(1, tokens_of(example)), micro_batch_size=rows_of(example) or 1)
    plan = make_plan(parallel or ParallelConfig(), described, shape)
    mesh = build_mesh(plan.mesh, "cuda" if torch.cuda.is_available() else "cpu", on_host=plan.cpu_offload)
    empty = gather_from_all(any(parameter.is_meta for parameter in model.parameters()))
    if len({*empty}) > 1:
        raise PlanError("mw.shard: the model has values on some ranks only: build it alike on all of them")
    if not empty[0]:
        _send_from_rank0(model, mesh.device_type)
    return apply_plan(model, plan, mesh, gradients=gradients)


def _refuse_optimizer(model: nn.Module) -> None:
    """Refuse an optimizer of the model's parameters, which would not get those that replace them."""
    own = set(model.parameters())
    gc.collect()  # one that was given up does not count
    for found in gc.get_objects():
        groups = getattr(found, "param_groups", ()) if issubclass(type(found), torch.optim.Optimizer) else ()
        if any(not own.isdisjoint(group["params"]) for group in groups):
            raise PlanError(
                f"mw.shard: {type(found).__name__} has the model's parameters, which are replaced by their "
                "shards, and would train nothing: build it after mw.shard"
            )


def _check_loss(model: nn.Module, example: Example, loss: Loss, gradients: Gradients) -> None:
    check_signature(loss, example)
    device = next(model.parameters()).device
    moved: Example = tree_map_only(Tensor, lambda tensor: tensor.to(device), example)
    kind = kind_of_loss(outputs_of_parts(model, moved), loss)
    if kind and kind != {"sum": "sum", "mean_of_ranks": "mean"}[gradients]:
        raise PlanError(f"mw.shard: with gradients={gradients!r}: {LOSSES[kind].strip()}")


@torch.no_grad()
def _send_from_rank0(model: nn.Module, device_type: str) -> None:
    """Give the model rank 0's values on every rank."""
    for tensor in dict.fromkeys(tensors_by_name(model).values()):
        value = tensor.to(device_type).contiguous()
        dist.broadcast(value, src=0)
        tensor.copy_(value)
