"""Resolves or chooses the plan of a run and checks it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from meshwright.parallel.compile.apply import check_compiler, use_cache_folder
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.schema import Plan
from meshwright.train.config import Config, TrainingJob
from meshwright.train.console import Console
from meshwright.train.distributed.process_group import choose_device, init_distributed
from meshwright.train.distributed.ranks import RankInfo, broadcast_from_rank0, comparable_settings
from meshwright.train.memory import device_memory_bytes, free_host_bytes
from meshwright.train.model.trained_model import model_of
from meshwright.train.planning.memory_bound import is_ample, memory_bound
from meshwright.train.planning.resolve import plan_on_device

if TYPE_CHECKING:
    from meshwright.train.planning.predict import Prediction


@dataclass(frozen=True)
class RunPlan:
    """The device and the plan of a run.

    Args:
        device, device_name: of this process
        plan: the plan of all processes
        peak_bytes: predicted peak memory of a process, or a bound of it; None before `check_memory`
        bounded: `peak_bytes` is a bound, because there is several times as much
        prediction: of the planner, if it chose the plan
        predicted: the part of it that is compared with the run, by the names in metrics.jsonl
    """

    device: torch.device
    device_name: str
    plan: Plan
    peak_bytes: int | None = None
    bounded: bool = False
    prediction: "Prediction | None" = None
    predicted: Mapping[str, float] = field(default_factory=dict)


def make_run_plan(config: Config, ranks: RankInfo, console: Console) -> RunPlan:
    """Choose the device and make the plan, checked against model, batch and machine.

    Only `parallel.plan=auto` initializes the process group. Raises PlanError, and ConfigError for a model
    that cannot be trained here.
    """
    model_of(config.model).check(config.job)
    device, device_name = choose_device(config.run, ranks)
    if config.parallel.plan == "auto":
        from meshwright.train.planning.auto import choose_for_run  # late, as the planner is a large import

        use_cache_folder(config.parallel.compile)  # the planner uses the compiler
        console.print_lines(init_distributed(config.run, comparable_settings(config), ranks, device))
        smallest = partial(_smallest_memory, device, ranks)
        chosen, peak_bytes = choose_for_run(config.job, ranks, device, device_name, console, smallest)
        predicted = {"step_time_s": chosen.timeline.step_s, "peak_memory_gib": peak_bytes / GIB}
        needed = chosen.memory.peak_bytes
        planned = RunPlan(device, device_name, chosen.plan, needed, False, chosen, predicted)
    else:
        planned = RunPlan(device, device_name, plan_on_device(config.job, ranks, device, device_name))
        use_cache_folder(planned.plan.compile)
    check_compiler(planned.plan, device.type, ranks.local_world_size)
    return planned


def check_memory(job: TrainingJob, planned: RunPlan, ranks: RankInfo) -> RunPlan:
    """Return `planned` with `peak_bytes`: a bound, if the rank that has the least memory has ample for it;
    else a prediction.

    Every rank calls it: rank 0 traces the model for all ranks, and compares its needs with that memory.
    Raises PlanError if it is too little.
    """
    if planned.peak_bytes is not None:  # the planner has checked it
        return planned
    smallest = _smallest_memory(planned.device, ranks)
    bound_bytes = memory_bound(job, planned.plan)
    if bound_bytes is not None and is_ample(bound_bytes, min(smallest)):
        return replace(planned, peak_bytes=bound_bytes, bounded=True)

    def predict_peak() -> int:
        from meshwright.train.planning.fit import check_run_fits  # late: the planner, and only on rank 0

        return check_run_fits(job, planned.plan, planned.device, planned.device_name, ranks, smallest)

    return replace(planned, peak_bytes=broadcast_from_rank0(ranks, predict_peak))


def _smallest_memory(device: torch.device, ranks: RankInfo) -> list[int]:
    """Return the free and the total device memory of a process, and the host memory for it, in bytes, each of
    the rank that has the least. Every rank calls it."""
    host = free_host_bytes() // ranks.local_world_size
    smallest = torch.tensor([*device_memory_bytes(device, ranks), host])
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return list(map(int, smallest))
