"""Shardings by hand, each right, and with a fault that somebody shipped in the modules or parameters whose
names begin with `bad`."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
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


def experts_over_tp(model: Model, mesh: DeviceMesh, bad: Bad = (), lost: str = "chances") -> None:
    """Each tp rank has some of the experts and all tokens. torchtitan #2416: the gradient of the router's
    probabilities is not summed (`lost` chances); #4054: nor is that of the tokens (`lost` enter)."""
    group = mesh.get_group("tp")
    for name, experts in each(model, Experts):
        own_experts(experts, mesh, "tp")
        experts.enter, experts.chances, experts.leave = copy_to(group), copy_to(group), sum_of(group)
        if name.startswith(bad):
            setattr(experts, lost, same)


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


def softmax_twice(model: Model, mesh: DeviceMesh, bad: Bad = ()) -> None:
    """FSDP2, and a router of one's own. VeOmni #715: its softmax is computed twice."""
    for name, router in each(model, Router):
        if name.startswith(bad):
            router.softmax = lambda scores: scores.softmax(-1).softmax(-1)
    fsdp(model, mesh)


def experts_over_dp(
    model: Model, mesh: DeviceMesh, bad: Bad = (), detached: Bad = (), divided: Bad = ()
) -> None:
    """FSDP2, but experts are spread over the same ranks, to which all tokens are gathered.

    PyTorch 160285 (`bad`): FSDP2 takes a mean over two ranks, but gradients of experts stay a sum, as in
    Megatron-LM #5956; transformers #48516 (`divided`): divided twice. AutoModel #2995 (`detached`): the
    router's probabilities are gathered without a gradient.
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
            share = 0 if f"{name}.{of}".startswith(bad) else 2 if f"{name}.{of}".startswith(divided) else 1
            parameter.register_hook(lambda gradient, share=share: gradient / group.size() ** share)
    fsdp(model, mesh, {p for _, experts in each(model, Experts) for p in experts.parameters()})


def replicas(model: Model, mesh: DeviceMesh, bad: Bad = ()) -> None:
    """Replicas with a mean of gradients. AutoModel #3135: not of the experts'."""
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


class _Reordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.transpose(0, 1).reshape(gradient.shape)


def trunk_of_views(model: Model, mesh: DeviceMesh, bad: tuple[int, ...] = ()) -> None:
    """FSDP2 with a fused head. VeOmni #1017: of an input that is not contiguous the trunk's gradient is
    written in another order, in the chunks `bad`."""
    model.head.enter = tuple(_Reordered.apply if chunk in bad else same for chunk in (0, 1))
    fsdp(model, mesh)


def lost_values(model: Model, mesh: DeviceMesh, bad: Bad = ()) -> None:
    """FSDP2. AutoModel #2682, Megatron-LM 2769: what `bad` names is never loaded, and starts at random."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(bad):
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    fsdp(model, mesh)


def fsdp(model: Model, mesh: DeviceMesh, ignored: set[nn.Parameter] | None = None) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp_shard"], ignored_params=ignored)
    fully_shard(model, mesh=mesh["dp_shard"], ignored_params=ignored)


Sharding = Callable[..., None]
