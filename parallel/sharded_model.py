"""A model with a plan applied, and what a training loop does with it between two optimizer steps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.parallel.context_parallel import token_positions
from meshwright.parallel.errors import PlanError
from meshwright.parallel.fsdp import Gradients, local_part, set_last_micro_batch
from meshwright.parallel.grad_norm import clip_divisor, gradient_norm
from meshwright.parallel.mesh import context_rank, data_parallel_group, data_parallel_rank
from meshwright.parallel.plan.schema import Plan, UnitPlan
from meshwright.parallel.tensor_parallel import synchronize_replicated_gradients

T = TypeVar("T")


@dataclass(frozen=True)
class ShardedModel:
    """A model with a plan applied, as `apply_plan` returns it.

    for batch, divisor in sharded.micro_batches(batches, count):
        (loss_of(model(batch)) / divisor).backward()
    sharded.clip_grad_norm(1.0)
    optimizer.step()
    """

    model: nn.Module
    plan: Plan
    mesh: DeviceMesh
    gradients: Gradients

    @property
    def data_rank(self) -> int:
        """The index of this rank's part of the global batch; all ranks of a cp or tp group have the same."""
        return data_parallel_rank(self.mesh, self.plan.mesh)

    def token_positions(self, seq_len: int) -> Tensor:
        """Return the positions of this rank's tokens in their sequences, int64 [seq_len / cp], on the CPU.
        With cp=1 they are all."""
        mesh, rank = self.plan.mesh, context_rank(self.mesh, self.plan.mesh)
        return token_positions(self.plan.context.exchange, mesh.cp, rank, seq_len)

    @cached_property
    def data_group(self) -> dist.ProcessGroup:
        """The data-parallel ranks, with those of cp. The first use is a collective of all ranks."""
        return data_parallel_group(self.mesh)

    def micro_batches(
        self, batches: Sequence[T], count: Callable[[T], Tensor | int] | None = None
    ) -> Iterator[tuple[T, Tensor | float]]:
        """Yield each micro batch of an optimizer step with the divisor of its loss; call `backward` within
        the loop. After the last one the gradients are complete.

        With gradients="sum", `count` gives what the sum of a micro batch's loss counts, such as its tokens,
        and the divisor is their number in the global batch, a tensor. With "mean_of_ranks" the loss is a
        mean, and the divisor is the number of micro batches.
        """
        if (count is None) != (self.gradients == "mean_of_ranks"):
            needs = (
                "none" if count else "count=..., what the loss of a micro batch sums over, such as its tokens"
            )
            raise PlanError(f"micro_batches with gradients={self.gradients!r} takes {needs}")
        divisor = global_count(batches, count, self.data_group) if count else float(len(batches))
        for batch in set_micro_batches(self.model, self.plan.units, batches):
            yield batch, divisor
        self._reduce_unsharded()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients to a global norm of at most `max_norm` (0: leave them), and return their norm
        before, the same scalar on every rank. For any optimizer."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = gradient_norm(parameters, torch.zeros(()))
        divisor = clip_divisor(norm, max_norm)
        if divisor is not None:
            torch._foreach_div_([local_part(p.grad) for p in parameters if p.grad is not None], divisor)
        return norm

    def _reduce_unsharded(self) -> None:
        """Reduce gradients of unsharded parameters, and make tp ranks agree on those that all compute."""
        divisor = 1 if self.gradients == "sum" else self.plan.mesh.world_size // self.plan.mesh.tp
        for name in self.plan.unsharded:
            if (grad := self.model.get_parameter(name).grad) is not None:
                dist.all_reduce(grad, group=self.data_group)
                grad /= divisor
        synchronize_replicated_gradients(self.model.parameters())
        if self.plan.mesh.tp > 1:
            self._copy_gradients_over_tp()

    def _copy_gradients_over_tp(self) -> None:
        """Copy the first tp rank's gradients of parameters without a style to all tp ranks: on GPUs their
        equal computations differ in the last bits, and the copies would drift apart."""
        tp = self.mesh["tp"]
        for parameter in self.model.parameters():
            grad = parameter.grad
            axes = grad.device_mesh.mesh_dim_names or () if isinstance(grad, DTensor) else ()
            if grad is not None and "tp" not in axes:
                own = local_part(grad)
                if tp.get_local_rank():
                    own.zero_()
                dist.all_reduce(own, group=tp.get_group())


def set_micro_batches(model: nn.Module, units: Sequence[UnitPlan], batches: Sequence[T]) -> Iterator[T]:
    """Yield the micro batches of an optimizer step; set for each whether it is the last, as the units'
    reductions need. `units`: those of the plan that was applied to the model."""
    for i, batch in enumerate(batches):
        set_last_micro_batch(model, units, last=i == len(batches) - 1)
        yield batch


def global_count(
    batches: Sequence[T], count: Callable[[T], Tensor | int], data_parallel: dist.ProcessGroup
) -> Tensor:
    """Return the sum of the counts of all micro batches of all data-parallel ranks, at least 1, as a float32
    scalar on the device (exact up to 16.7 million per rank)."""
    counts = [torch.as_tensor(count(batch)) for batch in batches]
    return summed(torch.stack(counts).sum().float(), data_parallel).clamp(min=1)


def summed(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce `value` over a group in place (sum), and return it."""
    dist.all_reduce(value, group=group)
    return value
