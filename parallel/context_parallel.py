"""Context parallelism: the ranks of the cp axis hold the tokens of the same sequences, and exchange them
around attention's cores, the modules that take queries, keys and values to attention's output.

Everything else of a model works on single tokens, so that only the cores get another forward. Two exchanges:

    heads    q[B, t, N, H] -> [B, T, N/cp, H], likewise k and v, by an all-to-all; the output back by another.
             Each rank computes attention of whole sequences for its share of the heads, by any kernel. Rank r
             holds the r-th part of the tokens. DeepSpeed-Ulysses (arXiv 2309.14509).
    gather   k[B, t, K, H] -> [B, T, K, H], likewise v, by an all-gather; queries stay. Rank r holds chunks r
             and 2 cp - 1 - r of 2 cp chunks of the tokens, so that every rank computes as many causal scores.
             As for Llama 3 (arXiv 2407.21783, section 3.3.2).

Shapes: B batch, T tokens of a sequence, t = T/cp those of a rank, N query heads, K key-value heads, H head
dim.
"""

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import MethodType
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.mesh import context_group, context_rank
from meshwright.parallel.model.attention_cores import exchange_in_registry, in_registry
from meshwright.parallel.plan.schema import ContextPlan, Plan

_c10d = torch.ops._c10d_functional
Core = Callable[..., Tensor]  # q, k, v, documents -> output


@dataclass(frozen=True)
class ContextAxis:
    """The cp axis of one rank: process group, degree, and this rank's index in the group."""

    group_name: str
    degree: int
    rank: int


def apply_context_parallel(
    model: nn.Module, plan: Plan, mesh: DeviceMesh, group_timeout: timedelta | None = None
) -> None:
    """Replace the forwards of attention's cores by those that exchange, in place. Every rank must call it.
    `group_timeout`: as in `mesh.build_mesh`."""
    group = context_group(mesh, plan.mesh, group_timeout)
    axis = ContextAxis(group.group_name, plan.mesh.cp, context_rank(mesh, plan.mesh))
    apply_exchange(model, plan.context, axis)


def apply_exchange(model: nn.Module, context: ContextPlan, axis: ContextAxis) -> None:
    """Let the model's cores exchange, in place."""
    around = partial({"heads": attend_to_heads, "gather": attend_to_gathered}[context.exchange], axis)
    attentions = []
    for name, module in model.named_modules():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in context.cores):
            if in_registry(module):
                attentions.append(module)
            else:
                module.forward = MethodType(_within(around, module.forward), module)
    if attentions:
        exchange_in_registry(
            model, attentions, around, lambda x: rearrange(_Gather.apply(x, axis), "cp B t -> B (cp t)")
        )


def _within(around: Callable[..., Tensor], attend: Core) -> Core:
    def forward(self: nn.Module, q: Tensor, k: Tensor, v: Tensor, *documents: Any) -> Tensor:
        return around(attend, q, k, v, *documents)

    return forward


def attend_to_heads(
    axis: ContextAxis, attend: Core, q_BtNH: Tensor, k_BtKH: Tensor, v_BtKH: Tensor, *documents: Any
) -> Tensor:
    """Attention of all tokens with a share of the heads. `documents`: the mask of whole sequences, or none
    for a core that takes no mask."""
    shares = [x.unflatten(2, (axis.degree, -1)) for x in (q_BtNH, k_BtKH, v_BtKH)]
    heads = [share.shape[3] for share in shares]
    swapped = _swap(rearrange(torch.cat(shares, dim=3), "B t cp heads H -> cp B t heads H"), axis)
    whole = rearrange(swapped, "cp B t heads H -> B (cp t) heads H")
    out = attend(*whole.split(heads, dim=2), *documents)
    swapped = _swap(rearrange(out, "B (cp t) heads H -> cp B t heads H", cp=axis.degree), axis)
    return rearrange(swapped, "cp B t heads H -> B t (cp heads) H")


def attend_to_gathered(
    axis: ContextAxis, attend: Core, q_BtNH: Tensor, k_BtKH: Tensor, v_BtKH: Tensor, documents: Any
) -> Tensor:
    """Attention of this rank's tokens, two chunks of them, each to all tokens up to its own last. The kernel
    aligns a chunk's queries with the last keys. `documents`: first[B, T], the position at which each token's
    document begins."""
    chunks = 2 * axis.degree
    gathered = _Gather.apply(torch.stack((k_BtKH, v_BtKH)), axis)
    halves = rearrange(gathered, "cp kv B (half chunk) K H -> half cp kv B chunk K H", half=2)
    ordered = torch.cat((halves[0], halves[1].flip(0)))
    k, v = rearrange(ordered, "chunks kv B chunk K H -> kv B (chunks chunk) K H")
    outs = []
    for q, place in zip(q_BtNH.chunk(2, dim=1), (axis.rank, chunks - 1 - axis.rank), strict=True):
        end = (place + 1) * q.shape[1]
        seen = None if documents is None else documents[:, :end]
        outs.append(attend(q, k[:, :end], v[:, :end], seen))
    return torch.cat(outs, dim=1)


def _swap(x: Tensor, axis: ContextAxis) -> Tensor:
    """x[cp, ...] -> [cp, ...]: part i goes to rank i, and part i of the result comes from there."""
    return _Swap.apply(x, axis)  # type: ignore[no-any-return]


def _all_to_all(x: Tensor, axis: ContextAxis) -> Tensor:
    ones = [1] * axis.degree
    return _c10d.wait_tensor(  # type: ignore[no-any-return]
        _c10d.all_to_all_single(x.contiguous(), ones, ones, axis.group_name)
    )


class _Swap(torch.autograd.Function):
    """An all-to-all, whose backward is another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: ContextAxis) -> Tensor:
        ctx.axis = axis
        return _all_to_all(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _all_to_all(grad, ctx.axis), None


class _Gather(torch.autograd.Function):
    """x[...] -> [cp, ...], the tensors of all ranks. The backward sums the ranks' gradients of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: ContextAxis) -> Tensor:
        ctx.axis = axis
        gathered = _c10d.all_gather_into_tensor(x[None].contiguous(), axis.degree, axis.group_name)
        return _c10d.wait_tensor(gathered)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        axis = ctx.axis
        summed = _c10d.reduce_scatter_tensor(grad.contiguous(), "sum", axis.degree, axis.group_name)
        return _c10d.wait_tensor(summed)[0], None
