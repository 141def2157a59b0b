"""Simulates one rank of any number of processes: the real code on a fake process group with fake tensors.

Nothing is computed or sent, but the functions are those of training: they build, shard and step the model,
FSDP2's hooks fire, every collective is issued, and every tensor has its shape and lifetime. The result is
independent of the planner's formulas and can check them.

The simulation is eager, also for compiled units. Collectives and sharded memory are the same as compiled;
activations are those of eager operations, and `activation_checkpoint: budget`, which the compiler applies,
keeps all of them.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.parallel.memory_breakdown import MemoryBreakdown, StepMemory
from meshwright.parallel.mesh import build_mesh, data_parallel_group
from meshwright.parallel.model.forward import fake_tensors
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.simulate.collectives import Collective, StepRecorder, axes_of_groups
from meshwright.parallel.simulate.memory_tracker import StorageTracker
from meshwright.parallel.simulate.module_tracker import ModuleTracker

HOST_KINDS = frozenset({"params", "grads", "optimizer"})  # cpu_offload keeps these in host memory


@dataclass(frozen=True)
class TrainingCode:
    """The training code to simulate, as functions that the caller provides.

    Args:
        shard: builds the model on the meta device and applies the plan
        fill: creates this rank's tensors on the CPU, and the optimizer
        step: one optimizer step, given the process group of all data-parallel ranks
        logits: names of the modules that compute the logits and the loss
    """

    shard: Callable[[Plan, DeviceMesh], nn.Module]
    fill: Callable[[nn.Module, Plan], torch.optim.Optimizer]
    step: Callable[[nn.Module, torch.optim.Optimizer, Plan, dist.ProcessGroup], object]
    logits: tuple[str, str]


@dataclass(frozen=True)
class Simulation(StepMemory):
    """The collectives of one rank in one optimizer step, in order, without those over a single rank, and the
    memory of the device; `host_bytes`: parameters, gradients and optimizer state in host memory
    (cpu_offload)."""

    collectives: tuple[Collective, ...]
    host_bytes: int


def simulate(plan: Plan, code: TrainingCode, rank: int = 0) -> Simulation:
    """Simulate one optimizer step of `rank`.

    The process must not have a process group: a fake one exists during the call.
    """
    plan = eager_plan(plan)
    with fake_process_group(plan.mesh.world_size, rank):
        mesh = build_mesh(plan.mesh, "cpu")
        # Not under fake tensors: creating meshes reads values of tensors, and a model on the meta device
        # needs no memory.
        data_parallel = data_parallel_group(mesh)
        axes = axes_of_groups(mesh, data_parallel)
        model = code.shard(plan, mesh)
        with fake_tensors():
            optimizer = code.fill(model, plan)
            return _record_step(plan, code, model, optimizer, axes, data_parallel)


def eager_plan(plan: Plan) -> Plan:
    """Return the plan without compiling and with the CPU's fused attention, which keeps the same activations
    as any other fused kernel; `math`, which is not fused, stays."""
    units = tuple(dataclasses.replace(unit, compiled=False) for unit in plan.units)
    attention = "math" if plan.attention == "math" else ""
    return dataclasses.replace(
        plan, units=units, attention=attention, compile=dataclasses.replace(plan.compile, enabled=False)
    )


def _record_step(
    plan: Plan,
    code: TrainingCode,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    axes: Mapping[str, Sequence[str]],
    data_parallel: dist.ProcessGroup,
) -> Simulation:
    position = ModuleTracker(model, plan)
    on_host = HOST_KINDS if plan.cpu_offload else frozenset()
    storages = StorageTracker(position, model, plan, code.logits, on_host)
    storages.mark("params", model.parameters())
    storages.mark("buffers", model.buffers())
    storages.mark("optimizer", _state(optimizer))
    recorder = StepRecorder(position, axes, storages)
    with position.following(), recorder:
        code.step(model, optimizer, plan, data_parallel)
    storages.mark("optimizer", _state(optimizer))  # some optimizers create it in their first step
    memory, at_peak = dict(storages.largest), dict(storages.at_peak)
    memory |= {kind: storages.now[kind] for kind in ("params", "optimizer")}
    host_bytes = sum(memory[kind] for kind in on_host)
    for kind in on_host:
        memory[kind] = at_peak[kind] = 0
    return Simulation(
        MemoryBreakdown(**memory), MemoryBreakdown(**at_peak), tuple(recorder.collectives), host_bytes
    )


def _state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    values: list[Any] = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, Tensor)]


@contextmanager
def fake_process_group(world_size: int, rank: int) -> Iterator[None]:
    """Within the context every collective of this process completes immediately, without other ranks."""
    assert not dist.is_initialized(), "a simulation needs a process without a process group"
    _clear_mesh_caches()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_mesh_caches()


def _clear_mesh_caches() -> None:
    """Clear DTensor's caches of results by mesh.

    DTensor treats an equal mesh as the same mesh, although its process groups no longer exist and it may
    belong to another rank (torch 2.13; tests/parallel/simulate/test_simulator.py).
    """
    # As torch.distributed.tensor.debug does, whose import is slow. torch 2.11 does not have the second cache.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[attr-defined]
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()
