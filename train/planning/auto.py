"""`parallel.plan: auto`: the planner's choice for a run on any machine, and the error if no plan fits."""

from dataclasses import replace

import torch

from meshwright.parallel.errors import PlanError
from meshwright.parallel.machine_memory import peak_resident_bytes, smallest_memory
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.planner.accuracy import trust
from meshwright.parallel.planner.cost_model import step_times
from meshwright.parallel.planner.explain import describe_choices, give_reasons
from meshwright.parallel.planner.hardware import Machines, find_hardware, load_hardware
from meshwright.parallel.planner.search import SearchResult
from meshwright.train.calibration.measure import FALLBACK, measure_here
from meshwright.train.config import TrainingJob
from meshwright.train.console import Console
from meshwright.train.distributed.agreement import broadcast_from_rank0
from meshwright.train.distributed.process_group import usable_cores
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.planning.correction import find_correction
from meshwright.train.planning.fit import suggest_fits, this_machine
from meshwright.train.planning.predict import (
    Prediction,
    check_legal_plans,
    predict,
    run_workload,
    search_plans,
)
from meshwright.train.planning.resolve import check_device_support, dtype_on_device
from meshwright.train.planning.tracing_aside import trace_share


def choose_for_run(
    job: TrainingJob,
    ranks: RankInfo,
    device: torch.device,
    device_name: str,
    console: Console,
) -> tuple[Prediction, int]:
    """Choose the plan on rank 0 and broadcast it, so that all ranks have the same. Return its prediction, and
    the predicted peak as metrics record it.

    A machine that no file describes, as a CPU, is measured first, by all ranks, if there is a legal plan.
    Raises PlanError if no plan fits.
    """
    kind = find_hardware(device_name)
    if kind is None:
        similar = load_hardware()[FALLBACK[device.type]]
        check_legal_plans(job, Machines(ranks.world_size, ranks.local_world_size, 0, similar))
        kind, _, line = measure_here(job, ranks, device, lambda line: console.print(f"planner: {line}"))
        console.print(f"planner: {line}")
    console.print(f"planner: trying plans for {ranks.world_size} processes, up to half a minute")
    correction = find_correction(job, kind, device)
    if correction.shares:
        console.print(f"planner: {correction.describe()}")
    corrected = replace(kind, correction=correction.factor)
    machines = this_machine(device, ranks, corrected, smallest_memory(device, ranks.local_world_size))
    if job.parallel.param_dtype == "auto":
        job = replace(job, parallel=replace(job.parallel, param_dtype=dtype_on_device(device)))
    # of rank 0's node those with a core of their own
    helper, helpers = ranks.rank - 1, min(ranks.local_world_size, usable_cores()) - 1
    share = trace_share(job, machines, helper, helpers) if 0 <= helper < helpers else ()

    def choose() -> tuple[Prediction, int]:
        predicted = replace(_choose_for_device(job, ranks, device, machines), correction=correction)
        # on a CPU of the entire process, which may have had it while it measured the machine and planned
        of_process = max(predicted.reserved_bytes, peak_resident_bytes())
        return predicted, predicted.memory.peak_bytes if device.type == "cuda" else of_process

    return broadcast_from_rank0(ranks, choose, meanwhile=share)


def _choose_for_device(
    job: TrainingJob, ranks: RankInfo, device: torch.device, machines: Machines
) -> Prediction:
    """Choose the plan for the processes of this run, on such devices, and predict it."""
    parallel, kind = job.parallel, machines.kind
    if kind.cores:  # a CPU: its rates are of one core, and host memory is the device memory
        cores = min(usable_cores(), ranks.local_world_size * torch.get_num_threads())
        machines = replace(machines, hardware=replace(kind, cores=cores))
        parallel = replace(parallel, cpu_offload=False)
    _, predicted = choose_plan(replace(job, parallel=parallel), machines)
    check_device_support(job, predicted.plan, device)
    headline = (
        f"{kind.name}: {predicted.timeline.step_s:.3g} s a step, {predicted.tokens_per_s_per_gpu:,.0f} "
        f"tokens/s per process, {predicted.memory.peak_bytes / GIB:.2f} GiB "
        f"({predicted.reserved_bytes / GIB:.2f} reserved)"
    )
    trusted = tuple(map(": ".join, trust(kind, machines.processes, machines.per_node)))
    plan = replace(predicted.plan, cpu_offload=job.parallel.cpu_offload)
    return replace(predicted, plan=plan, reasons=(headline, *trusted, *predicted.reasons))


def choose_plan(job: TrainingJob, machines: Machines) -> tuple[SearchResult, Prediction]:
    """Return the ranked plans of the job, and the prediction for the best, with reasons. Raises PlanError if
    none is legal, or if none fits, then with changes that fit."""
    choice = search_plans(job, machines)
    if choice.ranked:
        plan, kind, per_node = choice.best.plan, machines.kind, machines.per_node
        times = step_times(plan, run_workload(job, plan), kind, per_node)
        reasons = tuple(give_reasons(choice, machines, times))
        return choice, replace(predict(job, plan, kind, per_node), reasons=reasons)
    nearest = choice.does_not_fit[0]
    suggestions = suggest_fits(job, machines)
    raise PlanError(
        f"parallel.plan=auto: none of {len(choice.does_not_fit)} plans fits. A process has "
        f"{machines.available_bytes / GIB:.1f} GiB, but the leanest plan needs at least "
        f"{nearest.needed_bytes / GIB:.1f} GiB ({describe_choices(nearest.choices)}).\n"
        + "\n".join(f"  Fits: {suggestion.describe()}." for suggestion in suggestions)
    )
