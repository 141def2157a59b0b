"""`parallel.plan: auto`: the planner's choice for a run on any machine, and the error if no plan fits."""

import dataclasses
from collections.abc import Mapping

import torch

from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.cost_model import step_times
from meshwright.parallel.planner.devices import Devices
from meshwright.parallel.planner.explain import give_reasons
from meshwright.parallel.planner.hardware import Hardware
from meshwright.parallel.planner.search import SearchResult
from meshwright.parallel.planner.timeline import Timeline
from meshwright.train.config import TrainingJob
from meshwright.train.distributed.process_group import usable_cores
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.memory import peak_resident_bytes
from meshwright.train.planning.device_defaults import dtype_on_device
from meshwright.train.planning.predict import Prediction, predict, run_workload, search_plans
from meshwright.train.planning.resolve import check_device_support
from meshwright.train.planning.suggest import suggest_fits


@dataclasses.dataclass(frozen=True)
class AutoPlan:
    """The planner's choice for this machine: the fields of RunPlan that it sets."""

    plan: Plan
    peak_bytes: int
    predicted: Mapping[str, float]
    reasons: tuple[str, ...]
    timeline: Timeline


def choose_for_device(job: TrainingJob, ranks: RankInfo, device: torch.device, machines: Devices) -> AutoPlan:
    """Choose the plan for the processes of this run, on such devices. Raises PlanError if no plan fits."""
    parallel = job.parallel
    if parallel.param_dtype == "auto":
        parallel = dataclasses.replace(parallel, param_dtype=dtype_on_device(device))
    if machines.kind.cores:  # a CPU: its rates are of one core, and host memory is the device memory
        cores = min(usable_cores(), ranks.local_world_size * torch.get_num_threads())
        machines = dataclasses.replace(machines, hardware=dataclasses.replace(machines.kind, cores=cores))
        parallel = dataclasses.replace(parallel, cpu_offload=False)
    on_device = dataclasses.replace(job, parallel=parallel)
    choice = choose_plan(on_device, ranks.world_size, machines)
    plan = choice.best.plan
    check_device_support(job, plan, device)
    predicted = predict(job, plan, machines.kind, ranks.local_world_size)
    times = step_times(plan, run_workload(job, plan), machines.kind, ranks.local_world_size)
    reasons = (_headline(predicted, machines.kind), *give_reasons(choice, machines, times))
    figures = {
        "step_time_s": predicted.timeline.step_s,
        "peak_memory_gib": _measured_peak(predicted, device) / GIB,
    }
    return AutoPlan(
        plan=dataclasses.replace(plan, cpu_offload=job.parallel.cpu_offload),
        peak_bytes=predicted.memory.peak_bytes,
        predicted=figures,
        reasons=reasons,
        timeline=predicted.timeline,
    )


def _headline(predicted: Prediction, hardware: Hardware) -> str:
    return (
        f"{hardware.name}: {predicted.timeline.step_s:.3g} s a step, {predicted.tokens_per_s_per_gpu:,.0f} "
        f"tokens/s per process, {predicted.memory.peak_bytes / GIB:.2f} GiB "
        f"({predicted.reserved_bytes / GIB:.2f} reserved)"
    )


def _measured_peak(predicted: Prediction, device: torch.device) -> int:
    """Return the peak that metrics record: allocated memory on a GPU, of the entire process on a CPU, which
    may have had it already, while it measured the machine and planned."""
    if device.type == "cuda":
        return predicted.memory.peak_bytes
    return max(predicted.reserved_bytes, peak_resident_bytes())


def choose_plan(job: TrainingJob, world_size: int, machines: Devices) -> SearchResult:
    """Return the ranked plans of the job. Raises PlanError if none is legal, or if none fits, then with
    changes that fit."""
    choice = search_plans(job, world_size, machines)
    if choice.ranked:
        return choice
    nearest = choice.does_not_fit[0]
    suggestions = suggest_fits(job, world_size, machines)
    raise PlanError(
        f"parallel.plan=auto: none of {len(choice.does_not_fit)} plans fits. A process has "
        f"{machines.available_bytes / GIB:.1f} GiB, but the leanest plan needs at least "
        f"{nearest.needed_bytes / GIB:.1f} GiB ({describe_choices(nearest.choices)}).\n"
        + "\n".join(f"  Fits: {suggestion.describe()}." for suggestion in suggestions)
    )


def describe_choices(choices: Mapping[str, object]) -> str:
    """Return a plan's choices as key=value, without sections."""
    return " ".join(f"{key}={str(value).lower()}" for key, value in choices.items())
