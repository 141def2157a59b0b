"""Tensor parallelism: the implementation of the styles in a model's sharding table.

Weights become DTensors on the tp axis, so that FSDP2 can shard them further and checkpoints contain their
full shape. Activations stay plain tensors: each module with a style gets a forward that computes this rank's
shard and communicates where the sharding changes, as in Megatron-LM (arXiv 1909.08053; with sequence
parallelism, arXiv 2205.05198).

Shapes: B batch, T tokens, t = T/tp with sequence parallelism and T without, D dim, F ffn dim, V vocabulary.

    vocab      ids[B, T]        look-up in table[V/tp, D], summed over tp       -> x[B, t, D]
    sequence   x[B, t, D]       norm of this rank's tokens, gathered            -> x[B, T, D]
    colwise    x[B, T, D]       · w[F/tp, D]                                    -> h[B, T, F/tp]
    rowwise    h[B, T, F/tp]    · w[D, F/tp], summed over tp                    -> x[B, t, D]
    logits     x[B, T, D]       · w[V/tp, D]                                    -> logits[B, T, V/tp]
    loss       logits[B, T, V/tp], targets[B, T]                                -> the same loss on every rank
    gathered_logits             logits, then gathered over the vocabulary       -> logits[B, T, V]
    own_colwise                 colwise; its backward sums the gradient of x    -> h[B, T, F/tp]
    own_gathered                own_colwise, then gathered over the outputs     -> h[B, T, F]
    own_rowwise                 this rank's part of a whole h, then rowwise     -> x[B, T, D]
    per_head   h[.., H]         a whole weight on this rank's heads             -> h[.., H]

`own_` is for models whose norms are not `sequence`: each layer sums its input's gradient itself. A bias is
split like the outputs, or added after the sum. A new style is a row of STYLES, and a name in plan/rules.py.

`whole_STYLE` is the style in a part that is not split: the weight is replicated, all tp ranks compute the
same, and only the sharding of the tokens changes.

Why not torch's ParallelStyles: they run every operation of a block as a DTensor operation, and return the
results of collectives without waiting for them. In torch 2.13 an embedding whose output enters a compiled
block in this form (AsyncCollectiveTensor) loses its gradient (tests/distributed/test_torch_faults.py). Here
every collective is followed by its wait.

The same tests show another bug of torch 2.13, which remains with our styles: on a CPU a compiled block with
DTensor weights cannot recompute operators that torch classifies as random, such as its own attention, because
the saved random state is placed between tensors and DeviceMesh. Our CPU attention is not random; on a GPU the
random state is saved differently.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.func import functional_call

from meshwright.parallel.model.foreign_styles import check_style
from meshwright.parallel.plan.rules import STYLE_NAMES
from meshwright.parallel.plan.schema import Plan, ShardableModel, TensorPlan, find_style

TOKENS, CHANNELS = 1, 2  # dimensions of x[B, T, D]


@dataclass(frozen=True)
class TensorAxis:
    """The tp axis of one rank: process group, degree, and this rank's index in the group.

    `async_tp`: cut and join tokens as inductor's pass expects it, which fuses no other form.
    """

    group_name: str
    degree: int
    rank: int
    sequence_parallel: bool
    async_tp: bool = False


def apply_tensor_parallel(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Shard the weights of a model on the meta device over `mesh`, the tp axis, and replace its modules'
    forwards by those of their styles, in place. A weight shared by two modules stays shared."""
    place = mesh.get_group().group_name, mesh.size(), mesh.get_local_rank()
    axis = TensorAxis(*place, plan.tensor.sequence_parallel, plan.async_tp)

    def shard(full: Tensor, placement: Placement) -> Tensor:
        return distribute_tensor(full, mesh, [placement], src_data_rank=None)

    apply_styles(model, plan.tensor, axis, shard)


def apply_styles(
    model: nn.Module, tensor: TensorPlan, axis: TensorAxis, shard: Callable[[Tensor, Placement], Tensor]
) -> None:
    """Apply the plan's style to every module with one; `shard` returns this rank's shard of a full weight."""
    split: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in model.named_modules() if tensor.styles else ():
        if not (style := find_style(tensor, name)):
            continue
        if style == "loss":
            module.split_vocabulary(axis.group_name, axis.rank)  # type: ignore[operator]
            continue
        if not isinstance(model, ShardableModel):  # which is taken at its word
            check_style(name, module, style)
        if hasattr(module, "matrix"):  # other modules read the weight through it
            module.matrix = MethodType(_weight, module)
        forward, _ = STYLES[style]
        if style == "per_head" or (style in NORM_STYLES and not isinstance(module, nn.RMSNorm)):
            module.unsharded = (copy.deepcopy(module),)  # in a tuple: not a submodule
        for key, full in list(module.named_parameters(recurse=False)):
            if full not in split:
                place = weight_placement(style, key)
                split[full] = nn.Parameter(shard(full.detach(), place), requires_grad=full.requires_grad)
            setattr(module, key, split[full])
        module.tensor_axis = axis
        module.forward = MethodType(forward, module)


def weight_placement(style: str, key: str) -> Placement:
    """Return how a style places a parameter over tp: its `weight`, or a bias of its outputs."""
    placement = STYLES[style][1]
    return Replicate() if key != "weight" and placement == Shard(1) else placement


# Communication at the boundaries of a part, in the forward or the backward. x is this rank's local tensor.


def _sum(x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    return _wait(_c10d.all_reduce(x.contiguous(), "sum", axis.group_name))


def _gather(x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    gathered = _wait(_c10d.all_gather_into_tensor(x.contiguous(), axis.degree, axis.group_name))
    if axis.async_tp:
        return torch.cat(gathered.chunk(axis.degree), dim)
    # a view for one sequence, a copy for several
    return gathered.unflatten(0, (axis.degree, -1)).movedim(0, dim).flatten(dim, dim + 1)


def _sum_scatter(x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    if axis.async_tp:
        stacked = torch.cat(x.chunk(axis.degree, dim))
    else:  # likewise
        stacked = x.unflatten(dim, (axis.degree, -1)).movedim(dim, 0).flatten(0, 1).contiguous()
    return _wait(_c10d.reduce_scatter_tensor(stacked, "sum", axis.degree, axis.group_name))


def _local_chunk(x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    return x.chunk(axis.degree, dim)[axis.rank].contiguous()


def _identity(x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    return x.view_as(x)


_c10d = torch.ops._c10d_functional
# Wait immediately, so that no AsyncCollectiveTensor, which loses gradients on entering a compiled block,
# occurs in the model.
_wait = _c10d.wait_tensor


class _Exchange(torch.autograd.Function):
    """Apply one of the functions above in the forward, another in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, in_forward: Any, in_backward: Any, dim: int) -> Tensor:
        ctx.axis, ctx.in_backward, ctx.dim = axis, in_backward, dim
        return in_forward(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.in_backward(grad, ctx.axis, ctx.dim), None, None, None, None


def _enter(x: Tensor, axis: TensorAxis, split: bool) -> Tensor:
    """x[B, t, D] -> x[B, T, D], before a part. The backward of a split part sums the ranks' gradients."""
    if axis.sequence_parallel:
        return _Exchange.apply(x, axis, _gather, _sum_scatter if split else _local_chunk, TOKENS)
    return _Exchange.apply(x, axis, _identity, _sum, TOKENS) if split else x


def _leave(x: Tensor, axis: TensorAxis, split: bool) -> Tensor:
    """x[B, T, D] -> x[B, t, D], after a part. If the part is split, sums x over the tp ranks."""
    if axis.sequence_parallel:
        return _Exchange.apply(x, axis, _sum_scatter if split else _local_chunk, _gather, TOKENS)
    return _Exchange.apply(x, axis, _sum, _identity, TOKENS) if split else x


# The forwards. `weight` is a DTensor, except in a trace of a single rank. Its gradient must be a DTensor of
# the same placement, or Partial: FSDP2 then sums it over tp, in param_dtype, before reducing it over the
# data-parallel ranks in reduce_dtype.


def _weight(module: nn.Module, partial: bool = False) -> Tensor:
    return _local(module.weight, partial)  # type: ignore[arg-type]


def _local(parameter: Tensor, partial: bool = False) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()]) if partial else parameter.to_local()


def _product(module: Any, x: Tensor) -> Tensor:
    """x[..., K] · weight[N, K] -> [..., N], by the module's `product` if parallel/float8.py has set one."""
    return getattr(module, "product", F.linear)(x, _weight(module))


def _with_bias(module: Any, y: Tensor, partial: bool = False) -> Tensor:
    """Add the bias, if there is one; `partial`: y has this rank's tokens only."""
    return y if getattr(module, "bias", None) is None else y + _local(module.bias, partial)


def _vocab(self: Any, ids_BT: Tensor) -> Tensor:
    table = _weight(self)
    first, rows = self.tensor_axis.rank * table.shape[0], table.shape[0]
    padding = -1 if self.padding_idx is None else self.padding_idx - first
    ids_BT = ids_BT - first
    is_local_BT = (ids_BT >= 0) & (ids_BT < rows)
    x = F.embedding(ids_BT.where(is_local_BT, 0), table, padding if 0 <= padding < rows else None)
    return _leave(x * is_local_BT[..., None], self.tensor_axis, split=True)


def _norm(self: Any, x: Tensor) -> Tensor:
    partial = self.tensor_axis.sequence_parallel  # a gradient of this rank's tokens
    if isinstance(self, nn.RMSNorm):
        return F.rms_norm(x, self.normalized_shape, _weight(self, partial), self.eps)
    return _formula(self, partial, x)


def _formula(self: Any, partial: bool, *args: Any, **kwargs: Any) -> Any:
    """The forward of the module's class with whole weights; `partial`: the ranks' gradients are summed."""
    (unsharded,) = self.unsharded
    weights = {name: _local(weight, partial) for name, weight in self.named_parameters(recurse=False)}
    return functional_call(unsharded, weights, args, kwargs)


def _sequence(self: Any, x: Tensor) -> Tensor:
    return _enter(_norm(self, x), self.tensor_axis, split=True)


def _per_head(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _formula(self, True, *args, **kwargs)


def _linear(self: Any, x: Tensor) -> Tensor:
    return _with_bias(self, _product(self, x))


def _rowwise(self: Any, h: Tensor, split: bool = True) -> Tensor:
    y = _leave(_product(self, h), self.tensor_axis, split)
    return _with_bias(self, y, partial=self.tensor_axis.sequence_parallel)


def _own_colwise(self: Any, x: Tensor) -> Tensor:
    return _linear(self, _enter(x, self.tensor_axis, split=True))


def _own_gathered(self: Any, x: Tensor) -> Tensor:
    y = _own_colwise(self, x)
    return _Exchange.apply(y, self.tensor_axis, _gather, _local_chunk, y.dim() - 1)


def _own_rowwise(self: Any, h: Tensor) -> Tensor:
    return _rowwise(self, _Exchange.apply(h, self.tensor_axis, _local_chunk, _gather, h.dim() - 1))


def _gathered_logits(self: Any, x: Tensor) -> Tensor:
    return _Exchange.apply(_linear(self, x), self.tensor_axis, _gather, _local_chunk, CHANNELS)


def whole_logits(head: nn.Linear, logits: Tensor) -> Tensor:
    """Return logits[B, T, V] of all ids, of a module whose style may give this rank's share of them."""
    if logits.shape[-1] == head.out_features:
        return logits
    whole: Tensor = _Exchange.apply(logits, head.tensor_axis, _gather, _local_chunk, CHANNELS)
    return whole


def _whole_vocab(self: Any, ids_BT: Tensor) -> Tensor:
    x = F.embedding(ids_BT, _weight(self), self.padding_idx)
    return _leave(x, self.tensor_axis, split=False)


def _whole_sequence(self: Any, x: Tensor) -> Tensor:
    return _enter(_norm(self, x), self.tensor_axis, split=False)


def _whole_rowwise(self: Any, h: Tensor) -> Tensor:
    return _rowwise(self, h, split=False)


STYLES: dict[str, tuple[Callable[..., Tensor], Placement]] = {
    "vocab": (_vocab, Shard(0)),
    "sequence": (_sequence, Replicate()),
    "colwise": (_linear, Shard(0)),
    "rowwise": (_rowwise, Shard(1)),
    "logits": (_linear, Shard(0)),
    "gathered_logits": (_gathered_logits, Shard(0)),
    "whole_vocab": (_whole_vocab, Replicate()),
    "whole_sequence": (_whole_sequence, Replicate()),
    "whole_colwise": (_linear, Replicate()),
    "whole_rowwise": (_whole_rowwise, Replicate()),
    "whole_logits": (_linear, Replicate()),
    "own_colwise": (_own_colwise, Shard(0)),
    "own_gathered": (_own_gathered, Shard(0)),
    "own_rowwise": (_own_rowwise, Shard(1)),
    "per_head": (_per_head, Replicate()),
}
NORM_STYLES = ("sequence", "whole_sequence")
assert STYLES.keys() == set(STYLE_NAMES)
