"""Whether a plan fits into memory, by the planner's estimate; if not, what would."""

import dataclasses

from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB, StepMemory
from meshwright.parallel.plan.schema import Plan
from meshwright.train.config import TrainingJob
from meshwright.train.planning.predict import predict_memory
from meshwright.train.planning.suggest import Devices, suggest_changes


def check_fits(job: TrainingJob, plan: Plan, devices: Devices, device_name: str) -> StepMemory:
    """Raise PlanError if the plan needs more than a process has, saying the nearest changes that would
    fit."""
    needed = predict_memory(job, plan)
    if needed.peak_bytes <= devices.usable_bytes:
        return needed
    kinds = ", ".join(f"{kind} {gib:.1f}" for kind, gib in needed.at_peak.gib().items() if gib > 0.05)
    # what auto is here
    parallel = dataclasses.replace(job.parallel, param_dtype=plan.units[0].param_dtype)
    fits = suggest_changes(dataclasses.replace(job, parallel=parallel), plan, devices, "fit")
    raise PlanError(
        f"this plan needs {needed.peak_bytes / GIB:.1f} GiB per process, and {device_name} has "
        f"{devices.usable_bytes / GIB:.1f} GiB for each.\n  It needs, in GiB: {kinds}.\n"
        + "\n".join(f"  Fits: {way.describe()}." for way in fits)
    )
