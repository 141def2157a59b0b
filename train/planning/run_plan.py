"""The plan of a run: resolved or chosen, and everything about it checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from meshwright.parallel.compile.setup import check_compiler, use_cache_folder
from meshwright.parallel.plan.schema import Plan
from meshwright.train.config import Config, TrainingJob
from meshwright.train.console import Console
from meshwright.train.distributed.process_group import init_distributed
from meshwright.train.distributed.ranks import RankInfo, broadcast_from_rank0, choose_device, settings_of
from meshwright.train.memory import device_memory_bytes
from meshwright.train.planning.resolve import plan_here

if TYPE_CHECKING:
    from meshwright.parallel.planner.timeline import Timeline


@dataclass(frozen=True)
class RunPlan:
    """Where a run computes, and how.

    Args:
        device, device_name: of this process
        plan: all of it
        peak_bytes: that a process needs, as the planner predicts it; None until it is asked
        predicted: where the planner chose the plan, its figures by their names in metrics.jsonl
        reasons: why it chose this plan, a sentence each
        timeline: the step it expects
    """

    device: torch.device
    device_name: str
    plan: Plan
    peak_bytes: int | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    timeline: "Timeline | None" = None


def make_run_plan(config: Config, ranks: RankInfo, console: Console) -> RunPlan:
    """The device, and the plan for it, checked against model, data shape and machine. Only
    `parallel.plan=auto` joins the process group for that. Raises PlanError."""
    device, device_name = choose_device(config.run, ranks)
    if config.parallel.plan == "auto":
        use_cache_folder(config.parallel.compile)  # the planner asks the compiler
        init_distributed(config.run, settings_of(config), ranks, device)
        planned = _choose(config.job, ranks, device, device_name, console)
    else:
        planned = RunPlan(device, device_name, plan_here(config.job, ranks, device, device_name))
        use_cache_folder(planned.plan.compile)
    check_compiler(planned.plan, device.type, ranks.local_world_size)
    return planned


def check_memory(job: TrainingJob, planned: RunPlan, ranks: RankInfo) -> RunPlan:
    """The same with the bytes that a process will need. Every rank calls it: rank 0 traces the model, once
    for all, and holds it against the memory of the rank that has least. Raises PlanError if that is too
    little."""
    if planned.peak_bytes is not None:  # the planner has looked
        return planned
    available = torch.tensor(device_memory_bytes(planned.device, ranks))
    dist.all_reduce(available, op=dist.ReduceOp.MIN)
    peak_bytes = broadcast_from_rank0(ranks, lambda: _needed_bytes(job, planned, ranks, int(available)))
    return replace(planned, peak_bytes=peak_bytes)


def _choose(
    job: TrainingJob, ranks: RankInfo, device: torch.device, device_name: str, console: Console
) -> RunPlan:
    """What the planner chooses, on rank 0 for all: they must not differ."""

    from meshwright.train.planning.auto import choose_here  # late: the planner is large, and rarely chooses

    console.print(f"planner: trying plans for {ranks.world_size} processes, up to half a minute")
    chosen = broadcast_from_rank0(ranks, lambda: choose_here(job, ranks, device, device_name))
    return RunPlan(device, device_name, **vars(chosen))


def _needed_bytes(job: TrainingJob, planned: RunPlan, ranks: RankInfo, available_bytes: int) -> int:
    from meshwright.parallel.planner.hardware import find_hardware
    from meshwright.train.planning.suggest import Devices, check_fits

    # On a CPU what cpu_offload keeps in host memory is on the device.
    plan = planned.plan
    if planned.device.type == "cpu":
        plan = replace(plan, cpu_offload=False)
        job = replace(job, parallel=replace(job.parallel, cpu_offload=False))
    devices = Devices(available_bytes, ranks.local_world_size, find_hardware(planned.device_name))
    return check_fits(job, plan, devices, planned.device_name).peak_bytes
