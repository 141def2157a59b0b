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
from meshwright.train.memory import device_memory_bytes, free_host_bytes, peak_resident_bytes
from meshwright.train.model.choose import source_of
from meshwright.train.planning.memory_bound import is_ample, memory_bound
from meshwright.train.planning.resolve import plan_on_device

if TYPE_CHECKING:
    from meshwright.parallel.planner.hardware import Hardware
    from meshwright.parallel.planner.machines import Machines
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
    peak_bytes = broadcast_from_rank0(ranks, lambda: _needed_bytes(job, planned, ranks, smallest))
    return replace(planned, peak_bytes=peak_bytes)


def _smallest_memory(device: torch.device, ranks: RankInfo) -> list[int]:
    """Return the free and the total device memory of a process, and the host memory for it, in bytes, each of
    the rank that has the least. Every rank calls it."""
    host = free_host_bytes() // ranks.local_world_size
    smallest = torch.tensor([*device_memory_bytes(device, ranks), host])
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return list(map(int, smallest))


def _machines(
    device: torch.device, ranks: RankInfo, kind: "Hardware | None", smallest: Sequence[int]
) -> "Machines":
    """Return the machines of this run. What a process takes of a GPU before its tensors is part of its needs,
    if the kind is known, so it is not taken off what is free."""
    from meshwright.parallel.planner.machines import Machines

    free, in_total, host = smallest
    available = min(in_total, free + (round(kind.reserved_gib * GIB) if kind else 0))
    host_bytes = None if device.type == "cpu" else host
    return Machines(ranks.world_size, ranks.local_world_size, available, kind, host_bytes)


def _choose(
    job: TrainingJob, ranks: RankInfo, device: torch.device, device_name: str, console: Console
) -> RunPlan:
    """Let the planner choose on rank 0 and broadcast its choice, so that all ranks have the same plan. A
    machine that no file describes, as a CPU, is measured first, by all ranks, if there is a legal plan."""
    # late: large imports, rarely needed
    from meshwright.parallel.planner.hardware import find_hardware, load_hardware
    from meshwright.parallel.planner.machines import Machines
    from meshwright.train.calibration.measure import FALLBACK, measure_here
    from meshwright.train.planning.auto import choose_for_device
    from meshwright.train.planning.predict import check_legal_plans

    kind = find_hardware(device_name)
    if kind is None:
        similar = Machines(
            ranks.world_size, ranks.local_world_size, hardware=load_hardware()[FALLBACK[device.type]]
        )
        check_legal_plans(job, similar)
        measured = measure_here(job, ranks, device, lambda line: console.print(f"planner: {line}"))
        kind = measured.hardware
        console.print(f"planner: {measured.line}")
    console.print(f"planner: trying plans for {ranks.world_size} processes, up to half a minute")
    machines = _machines(device, ranks, kind, _smallest_memory(device, ranks))

    def choose() -> tuple["Prediction", dict[str, float]]:
        prediction = choose_for_device(job, ranks, device, machines)
        peak_gib = _measured_peak(prediction, device) / GIB
        return prediction, {"step_time_s": prediction.timeline.step_s, "peak_memory_gib": peak_gib}

    prediction, predicted = broadcast_from_rank0(ranks, choose)
    peak_bytes = prediction.memory.peak_bytes
    return RunPlan(
        device, device_name, prediction.plan, peak_bytes, prediction=prediction, predicted=predicted
    )


def _measured_peak(predicted: "Prediction", device: torch.device) -> int:
    """Return the peak that metrics record: allocated memory on a GPU, of the entire process on a CPU, which
    may have had it already, while it measured the machine and planned."""
    if device.type == "cuda":
        return predicted.memory.peak_bytes
    return max(predicted.reserved_bytes, peak_resident_bytes())


def _needed_bytes(job: TrainingJob, planned: RunPlan, ranks: RankInfo, smallest: Sequence[int]) -> int:
    from meshwright.parallel.planner.hardware import find_hardware
    from meshwright.train.planning.fit import check_fits

    # On a CPU, host memory is the device memory: cpu_offload saves nothing.
    plan = planned.plan
    if planned.device.type == "cpu":
        plan = replace(plan, cpu_offload=False)
        job = replace(job, parallel=replace(job.parallel, cpu_offload=False))
    machines = _machines(planned.device, ranks, find_hardware(planned.device_name), smallest)
    in_total_gib, name = smallest[1] / GIB, planned.device_name
    if (used_gib := in_total_gib - machines.available_bytes / GIB) > 0.05:
        name += f" ({in_total_gib:.1f} GiB, {used_gib:.1f} in use before this run allocates)"
    return check_fits(job, plan, machines, name).peak_bytes
