"""Measure what the host needs to launch work: eager operators, compiled graphs and their kernels, and FSDP2
around a unit's collectives."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from meshwright.train.calibration.timing import Timer

FEW, MANY = 1, 9  # matrix products of two compiled graphs, whose difference is the cost of a kernel
TINY_OPERATIONS = 256
UNITS = 4  # FSDP units of a probe
# parameters of a block of the Llama (two norms and seven linear layers): FSDP2 handles them one by one
PARAMETERS = 9
EVENTS = 3  # of a unit and micro batch: gathered in the forward and in the backward, and reduced
TINY_VALUES = 64


def operator_seconds(clock: Timer) -> float:
    """Return the seconds of one eager operator on a single number, in a chain, forward and backward."""
    x = torch.ones(1, device=clock.device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(TINY_OPERATIONS // 2):
            y = y * 0.5
        torch.autograd.grad(y, x)

    return clock.host_seconds([chain]) / TINY_OPERATIONS


def graph_seconds(clock: Timer) -> tuple[float, float]:
    """Return the seconds of one call of a compiled graph, without its kernels, and of one kernel: means of
    forward and backward, from graphs of a few products of tiny matrices."""
    few_s, many_s = (_chain_seconds(clock, products) for products in (FEW, MANY))
    kernel_s = max(0.0, (many_s - few_s) / (MANY - FEW))
    return max(0.0, few_s - FEW * kernel_s) / 2, kernel_s / 3  # a product's backward has two products


def _chain_seconds(clock: Timer, products: int) -> float:
    """Return the seconds of a compiled chain of products of x[8, 8], forward and backward."""

    def chain(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(products):
            x = x @ w
        return x

    compiled = torch.compile(chain, dynamic=False)
    x, w = (torch.randn(8, 8, device=clock.device, requires_grad=True) for _ in range(2))
    grad = torch.randn(8, 8, device=clock.device)
    return clock.host_seconds([lambda: torch.autograd.grad(compiled(x, w), (x, w), grad)])


class _GivenGradients(torch.autograd.Function):
    """Passes x on; the gradients of the weights are zeros, without any computation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.shapes = [weight.shape for weight in weights]
        ctx.dtype = weights[0].dtype
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        (grad,) = grads
        return grad, *(torch.zeros(shape, dtype=ctx.dtype, device=grad.device) for shape in ctx.shapes)


class _Unit(nn.Module):
    def __init__(self, values: int, device: torch.device) -> None:
        super().__init__()
        shape = (values // PARAMETERS // TINY_VALUES + 1, TINY_VALUES)
        self.weights = nn.ParameterList(torch.zeros(shape, device=device) for _ in range(PARAMETERS))

    def forward(self, x: Tensor) -> Tensor:
        return _GivenGradients.apply(x, *self.weights)  # type: ignore[no-any-return]


def unit_values(values: int) -> int:
    """Return the number of values that a probed unit has, for one of about `values`."""
    return PARAMETERS * TINY_VALUES * (values // PARAMETERS // TINY_VALUES + 1)


def unit_seconds(clock: Timer, mesh: DeviceMesh, values: int, param_dtype: str) -> float:
    """Return the seconds that FSDP2 adds to one unit of `values` parameters in a micro batch, collectives and
    copies included: the difference between units without computation that are sharded and that are not."""
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, param_dtype), reduce_dtype=torch.float32)
    x = torch.ones(TINY_VALUES, device=clock.device, requires_grad=True)
    plain, sharded = (
        nn.Sequential(*(_Unit(values, clock.device) for _ in range(UNITS))) for _ in range(2)
    )
    for unit in sharded:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(sharded, mesh=mesh)
    for module in sharded.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def step(model: nn.Module) -> Callable[[], None]:
        def run() -> None:
            model(x).sum().backward()
            for parameter in model.parameters():
                parameter.grad = None

        return run

    # wall time: of collectives, a rank's CPU time is only a part
    return max(0.0, _wall_seconds(clock, step(sharded)) - _wall_seconds(clock, step(plain))) / UNITS


RUNS = 15


def _wall_seconds(clock: Timer, run: Callable[[], None]) -> float:
    """Return the median seconds of a run of all ranks, the same number of times on each."""
    times = []
    dist.barrier()
    for _ in range(RUNS):
        started_at = time.perf_counter()
        run()
        times.append(time.perf_counter() - started_at)
    return sorted(times[2:])[len(times[2:]) // 2]
