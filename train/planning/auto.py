"""`parallel.plan: auto`: the plan that the planner chooses for a run on the machine at hand or on another,
and what is said when none will do."""

import dataclasses
from collections.abc import Iterator, Mapping

import torch

from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.make import RunShape
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.cost_model import step_times
from meshwright.parallel.planner.explain import give_reasons
from meshwright.parallel.planner.hardware import Hardware, find_hardware, load_hardware
from meshwright.parallel.planner.search import Cluster, SearchResult, frugal, search
from meshwright.parallel.planner.timeline import Timeline
from meshwright.train.config import Config
from meshwright.train.distributed.process_group import usable_cores
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.memory import device_memory_bytes
from meshwright.train.planning.device_defaults import best_attention, best_dtype, dtype_here
from meshwright.train.planning.memory_fit import MAX_PROCESSES, halvings
from meshwright.train.planning.predict import Prediction, predict, run_workload
from meshwright.train.planning.resolve import check_here, make_job, model_units


@dataclasses.dataclass(frozen=True)
class AutoPlan:
    """A plan that the planner has chosen for this machine: the figures it predicts, by their names in
    metrics.jsonl, what it has to say, and a step."""

    plan: Plan
    peak_bytes: int
    predicted: Mapping[str, float]
    said: tuple[str, ...]
    timeline: Timeline


def choose_here(config: Config, ranks: RankInfo, device: torch.device, device_name: str) -> AutoPlan:
    """Plan for as many processes as there are, on this kind of device with what memory it has. Raises
    PlanError for a device that no file in configs/hardware describes, and if nothing fits."""
    kind = _find_kind(device, device_name)
    asked = config.parallel
    if asked.param_dtype == "auto":
        asked = dataclasses.replace(asked, param_dtype=dtype_here(device))
    if kind.cores:  # its rates are of one core, and what cpu_offload keeps in host memory is on the device
        kind = dataclasses.replace(
            kind, cores=min(usable_cores(), ranks.local_world_size * torch.get_num_threads())
        )
        asked = dataclasses.replace(asked, cpu_offload=False)
    on_device = dataclasses.replace(config, parallel=asked)
    machines = Cluster(kind, ranks.local_world_size, device_memory_bytes(device, ranks))
    choice = choose_plan(on_device, ranks.world_size, machines)
    plan = choice.best.plan
    check_here(config, plan, device)
    predicted = predict(config, plan, machines.hardware, ranks.local_world_size)
    times = step_times(plan, run_workload(config, plan), machines.hardware, ranks.local_world_size)
    said = (_headline(predicted, machines.hardware), *give_reasons(choice, machines, times))
    figures = {
        "step_time_s": predicted.timeline.step_s,
        "peak_memory_gib": _measured_peak(predicted, device) / GIB,
    }
    plan = dataclasses.replace(plan, cpu_offload=config.parallel.cpu_offload)
    return AutoPlan(plan, predicted.memory.peak_bytes, figures, said, predicted.timeline)


def _find_kind(device: torch.device, device_name: str) -> Hardware:
    if device.type == "cpu":
        return load_hardware()["cpu"]
    kind = find_hardware(device_name)
    if kind is None:
        raise PlanError(
            f"parallel.plan=auto: no file in configs/hardware describes {device_name}. Measure it (python -m "
            "tools.bench calibrate -h), or use --parallel.plan=manual"
        )
    return kind


def _headline(predicted: Prediction, hardware: Hardware) -> str:
    return (
        f"{hardware.name}: {predicted.timeline.step_s:.3g} s a step, {predicted.tokens_per_s_per_gpu:,.0f} "
        f"tokens/s per process, {predicted.memory.peak_bytes / GIB:.2f} GiB "
        f"({predicted.reserved_bytes / GIB:.2f} reserved)"
    )


def _measured_peak(predicted: Prediction, device: torch.device) -> int:
    """What metrics call the peak: allocated memory on a GPU, on a CPU that of the whole process."""
    return predicted.memory.peak_bytes if device.type == "cuda" else predicted.reserved_bytes


def choose_plan(config: Config, world_size: int, machines: Cluster) -> SearchResult:
    """The best plan for the run that `config` describes, and the others. Raises PlanError if none is legal or
    none fits, with what would."""
    job = _make_job(config, world_size, machines)
    choice = search(
        config.parallel, model_units(config.model), job, machines, lambda plan: run_workload(config, plan)
    )
    if choice.ranked:
        return choice
    nearest = choice.does_not_fit[0]
    raise PlanError(
        f"parallel.plan=auto: none of {len(choice.does_not_fit)} plans fits. A process has "
        f"{machines.available_bytes / GIB:.1f} GiB, and the plan that needs least needs at least "
        f"{nearest.needed_bytes / GIB:.1f} ({describe_choices(nearest.choices)}).\n"
        + "\n".join(f"  Fits: {way}." for way in _ways_out(config, world_size, machines))
    )


def fewest_gpus(config: Config, machines: Cluster, at_least: int = 1) -> int:
    """The smallest number of GPUs, `at_least` or twice as many and so on, that some plan fits on; 0 if none
    does."""
    counts = [at_least * 2**n for n in range(MAX_PROCESSES.bit_length()) if at_least * 2**n <= MAX_PROCESSES]
    return next((gpus for gpus in counts if _fits_somehow(config, gpus, machines, config.train.seq_len)), 0)


def describe_choices(choices: Mapping[str, object]) -> str:
    """As they are written on the command line, without sections."""
    return " ".join(f"{key}={str(value).lower()}" for key, value in choices.items())


def _make_job(config: Config, world_size: int, machines: Cluster) -> RunShape:
    kind, per_node = machines.hardware, min(machines.gpus_per_node, world_size)
    return make_job(config, world_size, per_node, best_attention(config, kind), best_dtype(kind))


def _fits_somehow(config: Config, gpus: int, machines: Cluster, seq_len: int) -> bool:
    """Whether a plan that spends as little memory as it can fits on so many GPUs, with sequences of `seq_len`
    tokens."""
    model = model_units(config.model)
    parallel, job = frugal(config.parallel, _make_job(config, gpus, machines), len(model.checkpointed))
    try:
        choice = search(
            parallel,
            model,
            dataclasses.replace(job, seq_len=seq_len),
            machines,
            lambda plan: run_workload(config, plan).shortened(seq_len),
        )
    except PlanError:
        return False
    return bool(choice.ranked)


def _ways_out(config: Config, world_size: int, machines: Cluster) -> Iterator[str]:
    """The nearest asks that are possible."""
    if gpus := fewest_gpus(config, machines, world_size):
        yield f"{gpus} processes with as much memory each"
    for shorter in halvings(config.train.seq_len):
        if shorter < config.train.seq_len and _fits_somehow(config, world_size, machines, shorter):
            yield f"here, with --train.seq_len={shorter}"
            break
