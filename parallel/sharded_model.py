"""A model with a plan applied, and what a training loop does with it between two optimizer steps; forwards
without a backward, with the graphs compiled for training."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.parallel.compile.stats import of_evaluation
from meshwright.parallel.errors import PlanError
from meshwright.parallel.fsdp import (
    Gradients,
    free_gathered,
    local_part,
    parameters_by_module,
    set_last_micro_batch,
)
from meshwright.parallel.grad_norm import clip_divisor, divide_gradients, gradient_norm
from meshwright.parallel.mesh import context_rank, data_parallel_group, data_parallel_rank
from meshwright.parallel.plan.schema import Plan, leaves_parameters

T = TypeVar("T")
UNUSED_GET_ZEROS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # torch 2.13
START_AGAIN = "build the model again, and load the last checkpoint"
FEW_VALUES = 2**18  # gradients of fewer are copied over tp together; a larger one alone


@dataclass(frozen=True)
class ShardedModel:
    """A model with a plan applied, as `apply_plan` returns it.

    for batch, divisor in sharded.micro_batches(batches, count):
        (loss_of(model(batch)) / divisor).backward()
    sharded.clip_grad_norm(1.0)
    optimizer.step()

    After a backward outside of `micro_batches` the gradients are complete too, those of earlier backwards
    added.
    """

    model: nn.Module
    plan: Plan
    mesh: DeviceMesh
    gradients: Gradients
    _backwards: "_Backwards" = field(default_factory=lambda: _Backwards(), init=False, repr=False)

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

    def settle(self) -> None:
        """Free what a forward without a backward has left gathered, so that parameters are the shards that
        optimizers change. Every call of this API begins with it. Raises PlanError if there are no values, and
        after a backward that failed."""
        if any(parameter.is_meta for parameter in self.model.parameters()):
            raise PlanError("the model has no values: call materialize or load_weights after apply_plan")
        self._refuse_failed()
        free_gathered(self.model)

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
        divisor = self.global_count(batches, count) if count else float(len(batches))
        for batch in self.accumulate(batches):
            yield batch, divisor

    def accumulate(self, batches: Sequence[T]) -> Iterator[T]:
        """`micro_batches` without divisors: yield each micro batch of an optimizer step."""
        self.settle()
        left = any(parameter.grad is not None for parameter in self.model.parameters())
        if not batches or (left and self.whole_parameters()):
            raise PlanError(
                "micro_batches: there are gradients of an earlier step, which would be reduced twice: call "
                "zero_grad() after each step"
                if batches
                else "micro_batches needs at least one micro batch on every rank"
            )
        self._backwards.paused = True
        try:
            for i, batch in enumerate(batches):
                set_last_micro_batch(self.model, self.plan.units, last=i == len(batches) - 1)
                yield batch
            self.complete_gradients()
            self._backwards.completed = [p for p in self.model.parameters() if p.grad is not None]
        finally:  # also after a break
            self._backwards.paused = False
            set_last_micro_batch(self.model, self.plan.units, last=True)

    def global_count(self, batches: Sequence[T], count: Callable[[T], Tensor | int]) -> Tensor:
        """Return the sum of the counts of all micro batches of all data-parallel ranks, at least 1, as a
        float32 scalar on the device (exact up to 16.7 million per rank)."""
        device, counts = self.mesh.device_type, [count(batch) for batch in batches]
        on_device = [
            c.to(device) if isinstance(c, Tensor) else torch.full((), c, device=device) for c in counts
        ]
        return summed(torch.stack(on_device).sum().float(), self.data_group).clamp(min=1)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients to a global norm of at most `max_norm` (0: leave them), and return their norm
        before, the same scalar on every rank. For any optimizer."""
        self.settle()
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if not parameters:
            raise PlanError("clip_grad_norm: there are no gradients: call it after the backwards of a step")
        norm = gradient_norm(parameters, torch.zeros(()))
        divide_gradients(parameters, clip_divisor(norm, max_norm))
        return norm

    def complete_after_backwards(self) -> None:
        """Complete the gradients at the end of each backward outside of `micro_batches`."""
        self.model.register_forward_pre_hook(self._begin_forward)
        zero_grad = self.model.zero_grad

        def of_shards(set_to_none: bool = True) -> None:
            free_gathered(self.model)  # after a forward, parameters of the last unit are gathered ones
            zero_grad(set_to_none)

        self.model.zero_grad = of_shards  # type: ignore[method-assign]
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                self._backwards.watch(module, self)

    def _begin_forward(self, *_: Any) -> None:
        self._refuse_failed()
        model: Any = self.model
        root = model._get_fsdp_state()
        for parameter in {*self.whole_parameters().values()} - self._backwards.watched:
            if parameter.requires_grad:  # its gradient may come first, or alone
                parameter.register_hook(lambda _: root._register_root_post_backward_final_callback())
                self._backwards.watched.add(parameter)

    def whole_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the plan does not shard beside those that FSDP2 does, by name."""
        if not self.plan.unsharded or leaves_parameters(self.plan):
            return {}
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        return {name: parameters[name] for name in self.plan.unsharded}

    @cached_property
    def _parameters_of_units(self) -> list[list[nn.Parameter]]:
        of = parameters_by_module(self.model, self.plan.modules)
        return [[p for name in unit.modules for p in of[name].values()] for unit in self.plan.units]

    def _refuse_failed(self) -> None:
        if self._backwards.running:
            raise PlanError(f"a backward has failed before, after which FSDP2 reduces none: {START_AGAIN}")

    def complete_gradients(self) -> None:
        """Finish what FSDP2 has not after the last backward of a step: the gradients of unsharded parameters,
        equal copies on all tp ranks, and if it leaves parameters alone zeros for unused ones beside used ones
        of a unit."""
        self._refuse_failed()
        for parameter in dict.fromkeys(self.whole_parameters().values()):
            if isinstance(parameter, DTensor) and parameter.requires_grad:
                # other ranks may have one: each must call what they call
                grad: Any = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                grad = grad.redistribute(placements=parameter.placements)  # summed over tp
                dist.all_reduce(local_part(grad), group=self.data_group)
                if self.gradients == "mean_of_ranks":
                    local_part(grad).div_(dist.get_world_size(self.data_group))
                parameter.grad = grad
        if leaves_parameters(self.plan) and UNUSED_GET_ZEROS:
            for parameters in self._parameters_of_units:
                if any(parameter.grad is not None for parameter in parameters):
                    for parameter in parameters:
                        if parameter.requires_grad and parameter.grad is None:
                            parameter.grad = torch.zeros_like(parameter)
        if self.plan.mesh.tp > 1:
            grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            self._copy_over_tp([local_part(grad) for grad in grads if not is_split(grad, "tp")])

    def _copy_over_tp(self, copies: Sequence[Tensor]) -> None:
        """Copy the first tp rank's gradients of parameters that tp does not split to all tp ranks.

        The ranks compute the same ones, but on GPUs not bitwise (attention's backward adds in varying order,
        and so may reductions), so within hundreds of steps their copies would become different models.
        """
        tp, small = self.mesh["tp"], [grad for grad in copies if grad.numel() < FEW_VALUES]
        for group in [*([each] for each in copies if each.numel() >= FEW_VALUES), *_by_dtype(small)]:
            flat = group[0].view(-1) if len(group) == 1 else torch.cat([grad.view(-1) for grad in group])
            if tp.get_local_rank():
                flat.zero_()  # so that the sum is the first rank's gradient
            dist.all_reduce(flat, group=tp.get_group())
            if len(group) > 1:
                parts = flat.split([grad.numel() for grad in group])
                torch._foreach_copy_(group, [part.view_as(g) for part, g in zip(parts, group, strict=True)])


class _Backwards:
    """Calls a function at the end of each backward of a model, with only the gradients of this backward."""

    def __init__(self) -> None:
        self.paused = False  # while backwards are only parts of a whole
        self.running = False  # or failed
        # those with gradients; not of the model, whose gathered parameters are others in a backward
        self.completed: list[nn.Parameter] = []
        self.earlier: dict[nn.Parameter, Tensor] = {}  # gradients, while a backward runs
        self.watched: set[nn.Parameter] = set()  # unsharded ones with a hook

    def watch(self, unit: FSDPModule, sharded: ShardedModel) -> None:
        """Complete the gradients after each backward that reaches an output of a unit, right after FSDP2's
        own callback."""
        state: Any = unit._get_fsdp_state()
        model, plan = sharded.model, sharded.plan
        # over ranks after the backward, of its gradients alone
        sums = plan.mesh.tp > 1 or bool(sharded.whole_parameters())
        complete = sharded.complete_gradients if sums or leaves_parameters(plan) else None
        queue_callback_of_fsdp = state._register_root_post_backward_final_callback

        def begin() -> None:
            queue_callback_of_fsdp()
            if not self.running:  # not yet begun at another unit
                self.running = True
                if sums and not self.paused:
                    maybe = dict.fromkeys((*self.completed, *sharded.whole_parameters().values()))
                    self.earlier = {p: p.grad for p in maybe if p.grad is not None}
                for parameter in self.earlier:
                    parameter.grad = None
                Variable._execution_engine.queue_callback(end)

        def end() -> None:
            self.running = False
            if complete and not self.paused:
                complete()
                for parameter, gradient in self.earlier.items():
                    parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
                self.completed, self.earlier = [p for p in model.parameters() if p.grad is not None], {}

        state._register_root_post_backward_final_callback = begin


def is_split(tensor: Tensor, axis: str) -> bool:
    """Whether a tensor is split over an axis of the mesh."""
    if not isinstance(tensor, DTensor):
        return False
    placements = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True))
    return axis in placements and not placements[axis].is_replicate()


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    return [[tensor for tensor in tensors if tensor.dtype == dtype] for dtype in dtypes]


def summed(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce `value` over a group in place (sum), and return it."""
    dist.all_reduce(value, group=group)
    return value


def token_positions(exchange: str, degree: int, rank: int, seq_len: int) -> Tensor:
    """Return the positions of a rank's tokens in their sequences, int64 [seq_len / degree], on the CPU."""
    positions = torch.arange(seq_len, device="cpu")
    if exchange == "heads" or degree == 1:
        return positions.chunk(degree)[rank]
    chunks = positions.chunk(2 * degree)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager for evaluations, which leave nothing behind: modules are in eval mode, no random number
    of training is drawn, no activations are saved or offloaded, and at the end all parameters are sharded.

    Autograd stays enabled, because compiled blocks would need a second graph without it; those that ask for
    `self.training`, as dropout and transformers' attention do, need it anyway. A backward raises
    RuntimeError.
    """
    modes = [(module, module.training) for module in model.modules()]
    offload = getattr(model, "activation_offload", None)
    offloads = offload is not None and offload.enabled
    if offload is not None:
        offload.enabled = False
    try:
        model.eval()
        with own_random_state(), saved_tensors_hooks(_drop, _refuse), of_evaluation():
            yield
    finally:
        for module, training in modes:
            module.training = training
        if offload is not None:
            offload.enabled = offloads
        free_gathered(model)


def own_random_state() -> AbstractContextManager[None]:
    """Context after which the random state is as before."""
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else [])


def _drop(_tensor: Any) -> None:
    """Return None in place of a saved tensor."""


def _refuse(_nothing: None) -> NoReturn:
    raise RuntimeError(
        "backward of an output computed in mw.evaluating: no activations were saved for it: compute it "
        "outside of that context"
    )
