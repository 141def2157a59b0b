"""Shardings as people write them: each takes a model with values and a mesh, whose dimensions are among
dp_replicate, dp_shard and tp, and returns the sharded model."""

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks.legal.models import Styles

Sharding = Callable[[nn.Module, DeviceMesh], nn.Module | None]
DATA_AXES = ("dp_replicate", "dp_shard")


def blocks(model: nn.Module) -> nn.ModuleList:
    """Return the blocks of a model: its longest list of modules."""
    return max((each for each in model.modules() if isinstance(each, nn.ModuleList)), key=len)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the ranks that get different rows."""
    return mesh[tuple(axis for axis in DATA_AXES if axis in (mesh.mesh_dim_names or ()))]


def fsdp(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """One unit a block, and one of the rest."""
    for block in blocks(model):
        fully_shard(block, mesh=data_mesh(mesh), **options)
    fully_shard(model, mesh=data_mesh(mesh), **options)
    return model


def fsdp_of_one_unit(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(model, mesh=data_mesh(mesh), reshard_after_forward=False)


def fsdp_of_both_ends(model: Any, mesh: DeviceMesh) -> nn.Module:
    """One unit of the embedding and the output, which may have the same weight."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    for block in blocks(model):
        fully_shard(block, mesh=data_mesh(mesh), reshard_after_forward=False)
    fully_shard(ends, mesh=data_mesh(mesh), reshard_after_forward=False)
    return fully_shard(model, mesh=data_mesh(mesh))


def along_last_dim(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fsdp(model, mesh, shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))


def ddp(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh["dp_replicate"].get_group(), **options)


def tp(model: nn.Module, mesh: DeviceMesh, styles: Styles) -> nn.Module:
    """Split the products. A tied weight, of which parallelize_module makes two, is tied again."""
    before = dict(model.named_parameters(remove_duplicate=False))
    first: dict[nn.Parameter, str] = {}
    parallelize_module(model, mesh["tp"], dict(styles()))
    for name, parameter in before.items():
        if (source := first.setdefault(parameter, name)) != name:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(source))
    return model


def tp_fsdp(model: nn.Module, mesh: DeviceMesh, styles: Styles) -> nn.Module:
    return fsdp(tp(model, mesh, styles), mesh)


class CopiedToRanks(torch.autograd.Function):
    """The input of products of which each rank has some outputs: their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SummedOverRanks(torch.autograd.Function):
    """The output of a product of which each rank has some inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def slices(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """As Megatron-LM does it, of a model with the names of transformers' Llama: the parameters are plain
    tensors, of which each rank has its own."""
    group, size, rank = mesh["tp"].get_group(), mesh["tp"].size(), mesh["tp"].get_local_rank()
    for name, module in model.named_modules():
        column = name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
        if column or name.endswith(("o_proj", "down_proj")):
            part = module.weight.detach().chunk(size, dim=0 if column else 1)[rank]  # type: ignore[operator]
            module.weight = nn.Parameter(part.clone())
        if column:
            module.register_forward_pre_hook(lambda _, inputs: (CopiedToRanks.apply(inputs[0], group),))
        elif name.endswith(("o_proj", "down_proj")):
            module.register_forward_hook(lambda _, inputs, output: SummedOverRanks.apply(output, group))
    return model


def ddp_of_slices(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return ddp(slices(model, mesh), mesh)


def fsdp_of_slices(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fsdp(slices(model, mesh), mesh)


def compiled_blocks(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in blocks(model):
        block.compile(backend="aot_eager", fullgraph=True)
    return fsdp(model, mesh)


def compiled_whole(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The names of the parameters get the prefix of torch.compile's module."""
    return torch.compile(fsdp(model, mesh), backend="aot_eager")  # type: ignore[return-value]


def recomputed(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The names of the parameters get the prefix of the wrapper."""
    kinds = {type(block) for block in blocks(model)}
    wrap = partial(apply_activation_checkpointing, checkpoint_wrapper_fn=checkpoint_wrapper)
    wrap(model, check_fn=lambda module: type(module) in kinds)
    return fsdp(model, mesh)


def recomputed_by_transformers(model: Any, mesh: DeviceMesh) -> nn.Module:
    model.gradient_checkpointing_enable()
    return fsdp(model, mesh)


def common_folder() -> Path:
    """Return a new folder, the same on every rank."""
    names = [tempfile.mkdtemp(prefix="meshwright-legal-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    return Path(names[0])


def transformers_own(model: Any, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """transformers reads the saved model, each rank its part."""
    from transformers.distributed import DistributedConfig

    names = mesh.mesh_dim_names or ()
    sizes = {"dp_replicate": "dp_replicate_size", "dp_shard": "fsdp_size", "tp": "tp_size"}
    degrees = {size: mesh[axis].size() for axis, size in sizes.items() if axis in names}
    folder = common_folder()
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    kind, attention = type(model), model.config._attn_implementation
    plan = DistributedConfig(**degrees, **options)
    read: nn.Module = kind.from_pretrained(folder, distributed_config=plan, attn_implementation=attention)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return read


def accelerate(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """accelerate with its FSDP2 plugin: on CPUs that is DDP."""
    from accelerate import Accelerator

    del mesh  # accelerate makes its own
    return Accelerator(cpu=True, fsdp_plugin=accelerate_plugin()).prepare(model)  # type: ignore[no-any-return]


def accelerate_fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """What accelerate's plugin does on GPUs, called by itself."""
    from accelerate import Accelerator
    from accelerate.utils import fsdp2_prepare_model

    del mesh
    accelerator = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = accelerate_plugin()
    return fsdp2_prepare_model(accelerator, model)  # type: ignore[no-any-return]


def accelerate_plugin() -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
