"""Tensor parallelism: what the styles of a model's sharding table mean.

Weights become DTensors on the tp axis, so that FSDP2 shards them further and checkpoints know their whole
shape. Activations stay plain tensors: each styled module gets a forward that works on its rank's share and
exchanges it where the sharding changes, as Megatron-LM does (arXiv 1909.08053; with sequence parallelism,
arXiv 2205.05198).

Shapes: B batch, T tokens, t = T/tp with sequence parallelism and T without, D dim, F ffn dim, V vocabulary.

    vocab      ids[B, T]        look-up in table[V/tp, D], summed over tp       -> x[B, t, D]
    sequence   x[B, t, D]       norm of this rank's tokens, gathered            -> x[B, T, D]
    colwise    x[B, T, D]       · w[F/tp, D]                                    -> h[B, T, F/tp]
    rowwise    h[B, T, F/tp]    · w[D, F/tp], summed over tp                    -> x[B, t, D]
    logits     x[B, T, D]       · w[V/tp, D]                                    -> logits[B, T, V/tp]
    loss       logits[B, T, V/tp], targets[B, T]                                -> the same loss on every rank
    gathered_logits             logits, then gathered over the vocabulary       -> logits[B, T, V]

`whole_STYLE` stands where STYLE would in a part that is not split: the weight is whole on every rank, each
computes the same, and only the share of the tokens changes.

Why not torch's own ParallelStyles: they run every operation of a block as a DTensor operation, and hand on
collectives without waiting for them. On torch 2.13 an embedding whose output goes into a compiled block so
(as AsyncCollectiveTensor) loses its gradient (tests/distributed/test_torch_faults.py). Here every collective
is waited for where it is called.

Another fault of torch 2.13 stays, shown there too: a compiled block with DTensor weights, theirs or ours,
cannot recompute on a CPU what torch counts as random, such as its own attention: the saved random state gets
between tensors and DeviceMesh. Our attention for CPUs is not random; on a GPU the random state is saved in
another way.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from meshwright.parallel.plan.rules import STYLE_NAMES
from meshwright.parallel.plan.schema import Plan, TensorPlan, find_style

TOKENS, CHANNELS = 1, 2  # dims of x[B, T, D]


@dataclass(frozen=True)
class TensorAxis:
    """The tp axis as one rank sees it."""

    group_name: str
    degree: int
    rank: int
    sequence_parallel: bool


def apply_tensor_parallel(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Split the weights of a model on the meta device over `mesh`, the tp axis, and give its modules the
    forwards that belong to their styles, in place. A weight that two modules share stays shared."""
    axis = TensorAxis(
        mesh.get_group().group_name, mesh.size(), mesh.get_local_rank(), plan.tensor.sequence_parallel
    )

    def share(whole: Tensor, placement: Placement) -> Tensor:
        return distribute_tensor(whole, mesh, [placement], src_data_rank=None)

    apply_styles(model, plan.tensor, axis, share)


def apply_styles(
    model: nn.Module, tensor: TensorPlan, axis: TensorAxis, share: Callable[[Tensor, Placement], Tensor]
) -> None:
    """Give every module that the plan mentions its style; `share` makes this rank's part of a whole
    weight."""
    split: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in model.named_modules() if tensor.styles else ():
        if not (style := find_style(tensor, name)):
            continue
        if style == "loss":
            module.split_vocabulary(axis.group_name, axis.rank)  # type: ignore[operator]
            continue
        if hasattr(module, "matrix"):  # whoever multiplies with the weight itself
            module.matrix = MethodType(_weight, module)
        forward, placement = STYLES[style]
        whole = module.get_parameter("weight")
        if whole not in split:
            split[whole] = nn.Parameter(share(whole.detach(), placement), requires_grad=whole.requires_grad)
        module.weight = split[whole]
        module.tensor_axis = axis
        module.forward = MethodType(forward, module)


def share_copies(parameters: Iterable[Tensor]) -> None:
    """Where a part is not split, give every tp rank the first one's gradient of the weights that all of them
    hold whole.

    The ranks compute the same, but on GPUs not to the last bit (attention's backward adds in any order), and
    nothing else would bring their copies together again: in hundreds of steps they would become different
    models. Where every part is split only norms are whole, whose gradients come out of a sum over the ranks.
    Once a step, of this rank's shards.
    """
    copies = [
        (parameter, axis) for parameter in parameters if (axis := _axis_of_copies(parameter)) is not None
    ]
    if all(parameter.dim() == 1 for parameter, _ in copies):
        return
    for parameter, axis in copies:
        if isinstance(grad := parameter.grad, DTensor):
            own = grad.to_local()
            if grad.device_mesh.get_local_rank(axis):
                own.zero_()  # a sum to which the others add nothing
            dist.all_reduce(own, group=grad.device_mesh.get_group(axis))


def _axis_of_copies(parameter: Tensor) -> int | None:
    """Which axis of its mesh is tp, if all ranks of that hold the parameter alike."""
    if not isinstance(parameter, DTensor) or "tp" not in (
        names := parameter.device_mesh.mesh_dim_names or ()
    ):
        return None
    axis = names.index("tp")
    return (
        axis if parameter.placements[axis].is_replicate() and parameter.device_mesh.size(axis) > 1 else None
    )


# What a tp rank does at the edge of a part, and what the backward does there. x is one rank's tensor
# throughout.


def _sum(x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    return _wait(_c10d.all_reduce(x.contiguous(), "sum", axis.group_name))


def _gather(x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    gathered = _wait(_c10d.all_gather_into_tensor(x.contiguous(), axis.degree, axis.group_name))
    return torch.cat(gathered.chunk(axis.degree), dim)


def _sum_scatter(x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    stacked = torch.cat(x.chunk(axis.degree, dim))
    return _wait(_c10d.reduce_scatter_tensor(stacked, "sum", axis.degree, axis.group_name))


def _own_share(x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    return x.chunk(axis.degree, dim)[axis.rank].contiguous()


def _nothing(x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    return x.view_as(x)


_c10d = torch.ops._c10d_functional
# Waiting at once keeps AsyncCollectiveTensor, which loses gradients on its way into a compiled block, out of
# the model.
_wait = _c10d.wait_tensor


class _Exchange(torch.autograd.Function):
    """One of the functions above in the forward, another in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, there: Any, back: Any, dim: int) -> Tensor:
        ctx.axis, ctx.back, ctx.dim = axis, back, dim
        return there(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.back(grad, ctx.axis, ctx.dim), None, None, None, None


def _enter(x: Tensor, axis: TensorAxis, split: bool) -> Tensor:
    """x[B, t, D] -> x[B, T, D], in front of a part. Behind a split part the gradient comes in tp summands."""
    if axis.sequence_parallel:
        return _Exchange.apply(x, axis, _gather, _sum_scatter if split else _own_share, TOKENS)
    return _Exchange.apply(x, axis, _nothing, _sum, TOKENS) if split else x


def _leave(x: Tensor, axis: TensorAxis, split: bool) -> Tensor:
    """x[B, T, D], in tp summands if the part is split -> x[B, t, D]."""
    if axis.sequence_parallel:
        return _Exchange.apply(x, axis, _sum_scatter if split else _own_share, _gather, TOKENS)
    return _Exchange.apply(x, axis, _sum, _nothing, TOKENS) if split else x


# The forwards. `weight` is a DTensor, but for one rank alone; its gradient must be one of the same placement,
# or Partial: then FSDP2 sums it over tp, in param_dtype, before it reduces it over the data-parallel ranks in
# reduce_dtype.


def _weight(module: nn.Module, partial: bool = False) -> Tensor:
    weight: Tensor = module.weight  # type: ignore[assignment]
    if not isinstance(weight, DTensor):
        return weight
    return weight.to_local(grad_placements=[Partial()]) if partial else weight.to_local()


def _product(module: Any, x: Tensor) -> Tensor:
    """x[..., K] · weight[N, K] -> [..., N], in the way the module has been given, if any
    (parallel/float8.py)."""
    return getattr(module, "product", F.linear)(x, _weight(module))


def _vocab(self: Any, ids_BT: Tensor) -> Tensor:
    table = _weight(self)
    ids_BT = ids_BT - self.tensor_axis.rank * table.shape[0]
    mine_BT = (ids_BT >= 0) & (ids_BT < table.shape[0])
    x = F.embedding(ids_BT.where(mine_BT, 0), table) * mine_BT[..., None]
    return _leave(x, self.tensor_axis, split=True)


def _sequence(self: Any, x: Tensor) -> Tensor:
    weight = _weight(self, partial=self.tensor_axis.sequence_parallel)  # each rank sees its own tokens only
    return _enter(F.rms_norm(x, self.normalized_shape, weight, self.eps), self.tensor_axis, split=True)


def _linear(self: Any, x: Tensor) -> Tensor:
    return _product(self, x)


def _rowwise(self: Any, h: Tensor) -> Tensor:
    return _leave(_product(self, h), self.tensor_axis, split=True)


def _gathered_logits(self: Any, x: Tensor) -> Tensor:
    return _Exchange.apply(F.linear(x, _weight(self)), self.tensor_axis, _gather, _own_share, CHANNELS)


def _whole_vocab(self: Any, ids_BT: Tensor) -> Tensor:
    return _leave(F.embedding(ids_BT, _weight(self)), self.tensor_axis, split=False)


def _whole_sequence(self: Any, x: Tensor) -> Tensor:
    weight = _weight(self, partial=self.tensor_axis.sequence_parallel)
    return _enter(F.rms_norm(x, self.normalized_shape, weight, self.eps), self.tensor_axis, split=False)


def _whole_rowwise(self: Any, h: Tensor) -> Tensor:
    return _leave(_product(self, h), self.tensor_axis, split=False)


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
}
assert STYLES.keys() == set(STYLE_NAMES)
