"""A run with `parallel.plan: auto`: the planner on the machine at hand."""

import dataclasses
from collections.abc import Mapping

import torch

from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.cost_model import step_times
from meshwright.parallel.planner.explain import give_reasons
from meshwright.parallel.planner.hardware import Hardware, find_hardware, load_hardware
from meshwright.parallel.planner.search import Machines
from meshwright.parallel.planner.timeline import Timeline
from meshwright.train.best_dtype import dtype_here
from meshwright.train.choose import choose_plan
from meshwright.train.config import Config
from meshwright.train.cores import usable_cores
from meshwright.train.host_memory import device_memory_bytes
from meshwright.train.place import Place
from meshwright.train.plan_here import check_here
from meshwright.train.predict import Prediction, predict, trace_run


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A plan that the planner has chosen for this machine: the figures it predicts, by their names in
    metrics.jsonl, what it has to say, and a step."""

    plan: Plan
    peak_bytes: int
    predicted: Mapping[str, float]
    said: tuple[str, ...]
    timeline: Timeline


def choose_here(config: Config, place: Place, device: torch.device, device_name: str) -> Chosen:
    """Plan for as many processes as there are, on this kind of device with what memory it has. Raises
    PlanError for a device that no file in configs/hardware describes, and if nothing fits."""
    kind = _find_kind(device, device_name)
    asked = config.parallel
    if asked.param_dtype == "auto":
        asked = dataclasses.replace(asked, param_dtype=dtype_here(device))
    if kind.cores:  # its rates are of one core, and what cpu_offload keeps in host memory is on the device
        kind = dataclasses.replace(
            kind, cores=min(usable_cores(), place.local_world_size * torch.get_num_threads())
        )
        asked = dataclasses.replace(asked, cpu_offload=False)
    on_device = dataclasses.replace(config, parallel=asked)
    machines = Machines(kind, place.local_world_size, device_memory_bytes(device, place))
    choice = choose_plan(on_device, place.world_size, machines)
    plan = choice.best.plan
    check_here(config, plan, device)
    predicted = predict(config, plan, machines.hardware, place.local_world_size)
    times = step_times(plan, trace_run(config, plan), machines.hardware, place.local_world_size)
    said = (_headline(predicted, machines.hardware), *give_reasons(choice, machines, times))
    figures = {
        "step_time_s": predicted.timeline.step_s,
        "peak_memory_gib": _measured_peak(predicted, device) / GIB,
    }
    plan = dataclasses.replace(plan, cpu_offload=config.parallel.cpu_offload)
    return Chosen(plan, predicted.memory.peak_bytes, figures, said, predicted.timeline)


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
        f"tokens/s per "
        f"process, {predicted.memory.peak_bytes / GIB:.2f} GiB ({predicted.reserved_bytes / GIB:.2f} "
        f"reserved)"
    )


def _measured_peak(predicted: Prediction, device: torch.device) -> int:
    """What metrics call the peak: allocated memory on a GPU, on a CPU that of the whole process."""
    return predicted.memory.peak_bytes if device.type == "cuda" else predicted.reserved_bytes
