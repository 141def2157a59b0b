"""Measure what FSDP2 adds to a unit: the host's work, and collectives and copies around its computation."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from meshwright.train.calibration.timing import Run, make_interlude

UNITS = 4  # FSDP units of a probe
# parameters of a block of the Llama (two norms and seven linear layers): FSDP2 handles them one by one
PARAMETERS = 9
EVENTS = 3  # of a unit and micro batch: gathered in the forward and in the backward, and reduced
TINY_VALUES = 64  # per row of a parameter
WARM_UP_STEPS, STEPS = 3, 15


@dataclass(frozen=True)
class UnitTiming:
    """What FSDP2 adds to one unit and micro batch.

    Args:
        members: ranks that shard it
        gathered_bytes: its parameters as they are gathered
        reduced_bytes: its gradients in float32
        seconds: measured; on a CPU they contain the collectives and copies, on a GPU only the host's work
    """

    members: int
    gathered_bytes: int
    reduced_bytes: int
    seconds: float

    @property
    def copied_bytes(self) -> float:
        """The bytes that copies and casts read and write, as the cost model counts them: twice around an
        all-gather, once before a reduction."""
        cast = (self.reduced_bytes + self.gathered_bytes) / self.members
        return 2 * (cast + 2 * self.gathered_bytes) + self.gathered_bytes + self.reduced_bytes


def time_units(device: torch.device, members: int, values: int, param_dtype: str) -> list[UnitTiming]:
    """Time FSDP2 around a tiny unit and one of about `values` parameters, sharded over `members` ranks of a
    node; all processes of the run call this."""
    names, dtype = ("node", "shard"), getattr(torch, param_dtype)
    mesh = init_device_mesh(device.type, (dist.get_world_size() // members, members), mesh_dim_names=names)
    timings = []
    for size in (PARAMETERS * TINY_VALUES, values):
        rows = size // PARAMETERS // TINY_VALUES + 1
        sized, seconds = PARAMETERS * TINY_VALUES * rows, _unit_seconds(device, mesh["shard"], rows, dtype)
        timings.append(UnitTiming(members, sized * dtype.itemsize, 4 * sized, seconds))
    for group in (mesh.get_group(name) for name in names):
        if group != dist.group.WORLD:
            dist.destroy_process_group(group)
    return timings


def _unit_seconds(device: torch.device, mesh: DeviceMesh, rows: int, dtype: torch.dtype) -> float:
    """Return the seconds per unit and micro batch by which sharded units are slower than unsharded ones,
    with little computation."""
    x = torch.ones(TINY_VALUES, device=device, requires_grad=True)
    interlude = make_interlude(device, mesh.size())
    plain, sharded = (
        nn.Sequential(*(_Unit(rows, device, interlude) for _ in range(UNITS))) for _ in range(2)
    )
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*sharded, sharded):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)  # as in parallel/fsdp.py
        module.set_force_sum_reduction_for_comms(True)
    plain.to(dtype)
    return max(0.0, _step_seconds(sharded, x) - _step_seconds(plain, x)) / UNITS


def _step_seconds(model: nn.Module, x: Tensor) -> float:
    """Return the median seconds of forward and backward, repeated equally often on all ranks. Wall time: the
    CPU time of a rank contains only a part of a collective."""
    times = []
    dist.barrier()
    for _ in range(WARM_UP_STEPS + STEPS):
        started_at = time.perf_counter()
        model(x).sum().backward()
        times.append(time.perf_counter() - started_at)
        for parameter in model.parameters():
            parameter.grad = None
    return statistics.median(times[WARM_UP_STEPS:])


class _Unit(nn.Module):
    """Parameters of a block, with a product in place of its computation."""

    def __init__(self, rows: int, device: torch.device, interlude: Run) -> None:
        super().__init__()
        self.interlude = interlude
        shape = (rows, TINY_VALUES)
        self.weights = nn.ParameterList(torch.zeros(shape, device=device) for _ in range(PARAMETERS))

    def forward(self, x: Tensor) -> Tensor:
        return _GivenGradients.apply(x, self.interlude, *self.weights)  # type: ignore[no-any-return, no-untyped-call]


class _GivenGradients(torch.autograd.Function):
    """Passes x on; the gradients of the weights are zeros, without any computation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, interlude: Run, *weights: Tensor) -> Tensor:
        ctx.interlude = interlude
        interlude()
        ctx.shape, ctx.dtype, ctx.count = weights[0].shape, weights[0].dtype, len(weights)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        ctx.interlude()
        zeros = (torch.zeros(ctx.shape, dtype=ctx.dtype, device=grad.device) for _ in range(ctx.count))
        return grad, None, *zeros
