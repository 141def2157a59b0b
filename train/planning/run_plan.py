"""The plan of a run, of which everything that can be checked has been checked."""

import dataclasses
from collections.abc import Mapping

import torch

from meshwright.parallel.compile.setup import check_compiler, use_cache_folder
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.hardware import find_hardware
from meshwright.parallel.planner.memory_model import usable_bytes
from meshwright.parallel.planner.timeline import Timeline
from meshwright.train.config import Config
from meshwright.train.console import Console
from meshwright.train.distributed.process_group import init_distributed
from meshwright.train.distributed.ranks import RankInfo, broadcast_from_rank0, choose_device
from meshwright.train.memory import device_memory_bytes
from meshwright.train.planning.auto import choose_here
from meshwright.train.planning.memory_fit import check_fits
from meshwright.train.planning.resolve import plan_here


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """Where a run computes and how, the bytes a process needs; and where the planner chose, its figures,
    reasons and step."""

    device: torch.device
    device_name: str
    plan: Plan
    needed_bytes: int
    predicted: Mapping[str, float] = dataclasses.field(default_factory=dict)
    said: tuple[str, ...] = ()
    timeline: Timeline | None = None


def make_run_plan(config: Config, ranks: RankInfo, console: Console) -> RunPlan:
    """The device and the plan for it, of which everything that can be checked has been checked."""
    device, device_name = choose_device(config.run, ranks)
    if config.parallel.plan == "auto":
        use_cache_folder(config.parallel.compile)  # the planner asks the compiler
        init_distributed(config, ranks, device)  # one process plans for all: they must not differ
        console.print(f"planner: trying plans for {ranks.world_size} processes, up to half a minute")
        chosen = broadcast_from_rank0(ranks, lambda: choose_here(config, ranks, device, device_name))
        check_compiler(chosen.plan, device.type, ranks.local_world_size)
        return RunPlan(
            device,
            device_name,
            chosen.plan,
            chosen.peak_bytes,
            chosen.predicted,
            chosen.said,
            chosen.timeline,
        )
    plan = plan_here(config, ranks, device, device_name)
    use_cache_folder(plan.compile)
    check_compiler(plan, device.type, ranks.local_world_size)
    return RunPlan(device, device_name, plan, _check_memory(config, plan, ranks, device, device_name))


def _check_memory(config: Config, plan: Plan, ranks: RankInfo, device: torch.device, device_name: str) -> int:
    """Bytes that a process will need. Raises PlanError if it has less."""
    # On a CPU what cpu_offload keeps in host memory is on the device.
    in_memory = dataclasses.replace(plan, cpu_offload=plan.cpu_offload and device.type != "cpu")
    available, kind = device_memory_bytes(device, ranks), find_hardware(device_name)
    return check_fits(
        config, in_memory, usable_bytes(available, kind) if kind else available, device_name
    ).peak_bytes
