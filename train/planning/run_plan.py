"""Resolves or chooses the plan of a run and checks it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from meshwright.parallel.compile.setup import check_compiler, use_cache_folder
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.schema import Plan
from meshwright.train.config import Config, TrainingJob
from meshwright.train.console import Console
from meshwright.train.distributed.devices import choose_device
from meshwright.train.distributed.process_group import init_distributed
from meshwright.train.distributed.ranks import RankInfo, broadcast_from_rank0, comparable_settings
from meshwright.train.memory import device_memory_bytes, free_host_bytes
from meshwright.train.model.choose import source_of
from meshwright.train.planning.resolve import plan_on_device

if TYPE_CHECKING:
    from meshwright.parallel.planner.devices import Devices
    from meshwright.parallel.planner.hardware import Hardware
    from meshwright.parallel.planner.timeline import Timeline


@dataclass(frozen=True)
class RunPlan:
    """The device and the plan of a run.

    Args:
        device, device_name: of this process
        plan: the plan of all processes
        peak_bytes: predicted peak memory of a process; None before `check_memory`
        predicted: if the planner chose the plan, its predictions by their names in metrics.jsonl
        reasons: if the planner chose the plan, its reasons, one sentence each
        timeline: if the planner chose the plan, the predicted step
    """

    device: torch.device
    device_name: str
    plan: Plan
    peak_bytes: int | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    timeline: "Timeline | None" = None


def make_run_plan(config: Config, ranks: RankInfo, console: Console) -> RunPlan:
    """Choose the device and make the plan, checked against model, batch and machine.

    Only `parallel.plan=auto` initializes the process group. Raises PlanError, and ConfigError for a model
    that cannot be trained here.
    """
    source_of(config.model).check(config.job)
    device, device_name = choose_device(config.run, ranks)
    if config.parallel.plan == "auto":
        use_cache_folder(config.parallel.compile)  # the planner uses the compiler
        console.print_lines(init_distributed(config.run, comparable_settings(config), ranks, device))
        planned = _choose(config.job, ranks, device, device_name, console)
    else:
        planned = RunPlan(device, device_name, plan_on_device(config.job, ranks, device, device_name))
        use_cache_folder(planned.plan.compile)
    check_compiler(planned.plan, device.type, ranks.local_world_size)
    return planned


def check_memory(job: TrainingJob, planned: RunPlan, ranks: RankInfo) -> RunPlan:
    """Return `planned` with `peak_bytes`.

    Every rank calls it: rank 0 traces the model for all ranks, and compares its needs with the memory of the
    rank that has the least. Raises PlanError if that is too little.
    """
    if planned.peak_bytes is not None:  # the planner has checked it
        return planned
    smallest = _smallest_memory(planned.device, ranks)
    peak_bytes = broadcast_from_rank0(ranks, lambda: _needed_bytes(job, planned, ranks, smallest))
    return replace(planned, peak_bytes=peak_bytes)


def _smallest_memory(device: torch.device, ranks: RankInfo) -> list[int]:
    """Return the free and the total device memory of a process, and the host memory for it, in bytes, each of
    the rank that has the least. Every rank calls it."""
    host = free_host_bytes() // ranks.local_world_size
    smallest = torch.tensor([*device_memory_bytes(device, ranks), host])
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return list(map(int, smallest))


def _devices(
    device: torch.device, ranks: RankInfo, kind: "Hardware | None", smallest: Sequence[int]
) -> "Devices":
    """Return the devices of this run. What a process takes of a GPU before its tensors is part of its needs,
    if the kind is known, so it is not taken off what is free."""
    from meshwright.parallel.planner.devices import Devices

    free, in_total, host = smallest
    available = min(in_total, free + (round(kind.reserved_gib * GIB) if kind else 0))
    return Devices(available, ranks.local_world_size, kind, None if device.type == "cpu" else host)


def _choose(
    job: TrainingJob, ranks: RankInfo, device: torch.device, device_name: str, console: Console
) -> RunPlan:
    """Let the planner choose on rank 0 and broadcast its choice, so that all ranks have the same plan. A
    machine that no file describes, as a CPU, is measured first, by all ranks, if there is a legal plan."""

    # late: large imports, rarely needed
    from meshwright.parallel.planner.hardware import find_hardware, load_hardware
    from meshwright.train.calibration.measure import FALLBACK, measure_here
    from meshwright.train.planning.auto import choose_for_device
    from meshwright.train.planning.predict import check_legal_plans

    kind = find_hardware(device_name)
    if kind is None:
        similar = load_hardware()[FALLBACK[device.type]]
        check_legal_plans(job, ranks.world_size, similar, ranks.local_world_size)
        measured = measure_here(job, ranks, device, lambda line: console.print(f"planner: {line}"))
        kind = measured.hardware
        console.print(f"planner: {measured.line}")
    console.print(f"planner: trying plans for {ranks.world_size} processes, up to half a minute")
    machines = _devices(device, ranks, kind, _smallest_memory(device, ranks))
    chosen = broadcast_from_rank0(ranks, lambda: choose_for_device(job, ranks, device, machines))
    return RunPlan(device, device_name, **vars(chosen))


def _needed_bytes(job: TrainingJob, planned: RunPlan, ranks: RankInfo, smallest: Sequence[int]) -> int:
    from meshwright.parallel.planner.hardware import find_hardware
    from meshwright.train.planning.suggest import check_fits

    # On a CPU, host memory is the device memory: cpu_offload saves nothing.
    plan = planned.plan
    if planned.device.type == "cpu":
        plan = replace(plan, cpu_offload=False)
        job = replace(job, parallel=replace(job.parallel, cpu_offload=False))
    devices = _devices(planned.device, ranks, find_hardware(planned.device_name), smallest)
    in_total_gib, name = smallest[1] / GIB, planned.device_name
    if (used_gib := in_total_gib - devices.available_bytes / GIB) > 0.05:
        name += f" ({in_total_gib:.1f} GiB, {used_gib:.1f} in use before this run allocates)"
    return check_fits(job, plan, devices, name).peak_bytes
