"""The collectives of a sharding by hand, with their gradients."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import Tensor

Group = dist.ProcessGroup


class _SummedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def summed(x: Tensor, group: Group) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def copy_to(group: Group) -> Callable[[Tensor], Tensor]:
    """Each rank uses all of x for its part: the gradients of the parts are summed."""
    return lambda x: _SummedBackward.apply(x, group)


def sum_of(group: Group) -> Callable[[Tensor], Tensor]:
    """x is a part on each rank: their sum."""
    return lambda x: _Summed.apply(x, group)


def gathered(group: Group, dim: int) -> Callable[[Tensor], Tensor]:
    """The parts of all ranks along a dim; their gradients are summed and split again."""
    return lambda x: fc.all_gather_tensor_autograd(x.contiguous(), dim, group)


def joined(group: Group, dim: int) -> Callable[[Tensor], Tensor]:
    """The same, but every rank computes the same with the result: it takes its part of the gradient."""
    size, rank = group.size(), group.rank()

    def join(x: Tensor) -> Tensor:
        parts = fc.all_gather_tensor(x.detach().contiguous(), dim, group).chunk(size, dim)
        return torch.cat([x if i == rank else part for i, part in enumerate(parts)], dim)

    return join


def scattered(group: Group) -> Callable[[Tensor], Tensor]:
    """The sum over all ranks, of which each gets its rows."""
    return lambda x: fc.reduce_scatter_tensor_autograd(x.contiguous(), "sum", 0, group)
