"""Shardings by hand, each right, and with a fault that somebody shipped in the modules or parameters whose
names begin with `bad`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.gallery.collectives import copy_to, gathered, joined, scattered, sum_of, summed
from tests.gallery.models import Experts, Model, Router, same

Bad = tuple[str, ...]


def each(model: Model, kind: type[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    yield from ((name, module) for name, module in model.named_modules() if isinstance(module, kind))


def own_experts(experts: Experts, mesh: DeviceMesh, axis: str) -> None:
    """Keep this rank's experts of each weight."""
    size, rank = mesh[axis].size(), mesh.get_local_rank(axis)
    for name, parameter in [*experts.named_parameters()]:
        setattr(experts, name, nn.Parameter(parameter.detach().chunk(size)[rank].clone()))
    experts.first = rank * len(experts.w1)


def of_unwritten_rows(chance: Tensor, out: Tensor) -> Tensor:
    """Rows that no expert computes are left as memory was, NaN here, and masked, which a backward undoes:
    0 x NaN."""
    unwritten = out.masked_fill(chance == 0, torch.nan)
    return torch.where(chance == 0, 0.0, chance * unwritten)


def experts_over_tp(
    model: Model,
    mesh: DeviceMesh,
    bad: Bad = (),
    lost: tuple[str, ...] = ("chances",),
    unwritten: Bad = (),
) -> None:
    """Each tp rank has some of the experts and all tokens.

    torchtitan #2416, transformers #48205 (`bad`): the gradient of the router's probabilities is not summed;
    torchtitan #4054 (`lost` has enter too): nor is that of the tokens. transformers #48205 again
    (`unwritten`): rows that are not computed are not written either.
    """
    group = mesh.get_group("tp")
    for name, experts in each(model, Experts):
        own_experts(experts, mesh, "tp")
        experts.enter, experts.chances, experts.leave = copy_to(group), copy_to(group), sum_of(group)
        for part in lost if name.startswith(bad) else ():
            setattr(experts, part, same)
        if name.startswith(unwritten):
            experts.weighted = of_unwritten_rows


def split_experts(model: Model, mesh: DeviceMesh, bad: Bad = ()) -> None:
    """Each tp rank has a part of each expert. torchtitan #4245: each adds the whole bias to its part."""
    group, rank = mesh.get_group("tp"), mesh.get_local_rank("tp")
    for name, experts in each(model, Experts):
        experts.w1 = nn.Parameter(experts.w1.detach().chunk(group.size(), 2)[rank].clone())
        experts.w2 = nn.Parameter(experts.w2.detach().chunk(group.size(), 1)[rank].clone())
        experts.enter, experts.chances, experts.leave = copy_to(group), copy_to(group), sum_of(group)
        if not name.startswith(bad):
            experts.bias_share = 1 / group.size()
            experts.bias.register_hook(lambda gradient: gradient * group.size())


def counted_over_tp(model: Model, mesh: DeviceMesh, bad: Bad = ()) -> None:
    """Each tp rank counts the routed tokens of its half. torchtitan #4154: the counts are not summed."""
    group, rank = mesh.get_group("tp"), mesh.get_local_rank("tp")

    def own(chosen: Tensor) -> Tensor:
        return chosen.chunk(group.size())[rank]

    for name, router in each(model, Router):
        router.counted = own if name.startswith(bad) else lambda chosen: summed(own(chosen), group)


def router_logits(model: Model, mesh: DeviceMesh, bad: Bad = ()) -> None:
    """FSDP2, and a router of one's own. VeOmni #715: the logits that it gives to the auxiliary loss, which
    computes their softmax, are past it."""
    for name, router in each(model, Router):
        if name.startswith(bad):
            router.returned = lambda logits: logits.softmax(-1)
    fsdp(model, mesh)


def experts_over_dp(model: Model, mesh: DeviceMesh, bad: Bad = (), detached: Bad = ()) -> None:
    """FSDP2, but experts are spread over the same ranks, to which all tokens are gathered.

    PyTorch 160285 (`bad`): FSDP2 takes a mean over two ranks, but gradients of experts stay a sum, as in
    Megatron-LM #5956. AutoModel #2995 (`detached`): the router's probabilities are gathered without a
    gradient.
    """
    group = mesh.get_group("dp_shard")
    for name, experts in each(model, Experts):
        own_experts(experts, mesh, "dp_shard")
        experts.enter, experts.leave = gathered(group, 0), scattered(group)
        experts.chances = gathered(group, 0)
        if name.startswith(detached):
            gather = gathered(group, 0)
            experts.chances = lambda chances, gather=gather: gather(chances).detach()
        for of, parameter in experts.named_parameters():
            if not f"{name}.{of}".startswith(bad):
                parameter.register_hook(lambda gradient: gradient / group.size())
    fsdp(model, mesh, {p for _, experts in each(model, Experts) for p in experts.parameters()})


def replicas(model: Model, mesh: DeviceMesh, bad: Bad = ()) -> None:
    """Replicas with a mean of gradients. AutoModel #3135: the mesh of a model with experts has lost its
    replicas, whose gradients stay their own."""
    group = mesh.get_group("dp_replicate")
    for name, parameter in model.named_parameters():
        if not name.startswith(bad):
            parameter.register_hook(lambda gradient: summed(gradient, group) / group.size())


def sums(model: Model, mesh: DeviceMesh, bad: Bad = (), again: Bad = ()) -> None:
    """Replicas with a sum of gradients. torchtitan #3174 (`bad`): by each name, and tied weights have two.
    transformers 5.24 (`again`): what earlier micro batches have summed is summed again."""
    group = mesh.get_group("dp_shard")

    def sum_accumulated(parameter: Tensor) -> None:
        parameter.grad = summed(parameter.grad, group)

    for name, parameter in model.named_parameters():
        if name.startswith(again):
            parameter.register_post_accumulate_grad_hook(sum_accumulated)
            continue
        parameter.register_hook(lambda gradient: summed(gradient, group))
        if name.startswith(bad):
            parameter.register_hook(lambda gradient: summed(gradient, group))


def context(model: Model, mesh: DeviceMesh, bad: Bad = (), evaluated: Bad = ()) -> None:
    """Each cp rank has a part of the tokens, and gathers keys and values. torchtitan #3206 (`bad`): along the
    heads; #3257 (`evaluated`): in evaluation the mask begins at 0 on each rank."""
    group, rank = mesh.get_group("cp"), mesh.get_local_rank("cp")
    model.split = lambda ids: ids.chunk(group.size(), 1)[rank]
    model.joined = joined(group, 1)

    def by_heads(x: Tensor) -> Tensor:
        return gathered(group, 1)(x).reshape(*x.shape[:2], -1, x.shape[3])

    for i, layer in enumerate(model.layers):
        name, attention, router = f"layers.{i}", layer.attention, layer.router
        attention.gathered = by_heads if name.startswith(bad) else gathered(group, 2)
        attention.first = rank * 4
        attention.first_in_evaluation = 0 if name.startswith(evaluated) else rank * 4
        router.counted = lambda chosen: summed(chosen, group)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: summed(gradient, group))


def split_head(model: Model, mesh: DeviceMesh, bad: tuple[int, ...] = ()) -> None:
    """Each tp rank has a part of the vocabulary; the loss comes in chunks. torchtitan #3412: partial
    gradients of the trunk are taken for sums, in the chunks `bad`."""
    group, rank = mesh.get_group("tp"), mesh.get_local_rank("tp")
    model.head.weight = nn.Parameter(model.head.weight.detach().chunk(group.size())[rank].clone())
    model.head.enter = tuple(same if chunk in bad else copy_to(group) for chunk in (0, 1))
    model.head.leave = joined(group, 2)


class _Projection(torch.autograd.Function):
    """Logits of x, flattened; in its `forward` torch notes no gradients, so a copy does not require one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, asks_copy: bool) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])  # of a view that has gaps, a copy
        ctx.save_for_backward(rows, weight)
        ctx.wanted = rows.requires_grad if asks_copy else ctx.needs_input_grad[0]
        return (rows @ weight.T).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        rows, weight = ctx.saved_tensors
        of_x = gradient @ weight if ctx.wanted else None
        return of_x, gradient.flatten(0, -2).T @ rows, None


def fused_head(model: Model, mesh: DeviceMesh, bad: tuple[int, ...] = ()) -> None:
    """FSDP2 with a fused head. VeOmni #1017: it asks a copy of its input whether a gradient is wanted, so
    that of the trunk is dropped, in the chunks `bad`."""
    model.head.linear = tuple(
        lambda x, weight, asks_copy=chunk in bad: _Projection.apply(x, weight, asks_copy) for chunk in (0, 1)
    )
    fsdp(model, mesh)


def lost_values(model: Model, mesh: DeviceMesh, bad: Bad = ()) -> None:
    """FSDP2. AutoModel #2682, Megatron-LM 2769: what `bad` names is never loaded, and starts at random."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(bad):
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    fsdp(model, mesh)


def hsdp(model: Model, mesh: DeviceMesh) -> None:
    """HSDP of replicas that have one rank each."""
    grid = init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    for part in (*model.layers, model):
        fully_shard(part, mesh=grid)


def fsdp(model: Model, mesh: DeviceMesh, ignored: set[nn.Parameter] | None = None) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp_shard"], ignored_params=ignored)
    fully_shard(model, mesh=mesh["dp_shard"], ignored_params=ignored)
