"""Makes a plan from config keys or reads it from a plan file, without a process group: for any devices
(`plan_run`) or for those of this machine (`plan_on_device`)."""

import os
from pathlib import Path

import torch

from meshwright.parallel.errors import PlanError
from meshwright.parallel.float8 import check_float8
from meshwright.parallel.plan.make import RunShape, make_plan
from meshwright.parallel.plan.schema import ModelUnits, Plan
from meshwright.parallel.plan.serialize import load_plan
from meshwright.parallel.plan.validate import plan_file_mistakes
from meshwright.train.config import TrainingJob
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.model.choose import source_of
from meshwright.train.planning.device_defaults import attention_on_device, check_attention, dtype_on_device


def read_plan(job: TrainingJob, model: ModelUnits, world_size: int) -> Plan:
    """Read the plan file that `parallel.plan` names and check it for the run. Raises PlanError that lists all
    mistakes, one line each."""
    path = Path(os.path.expanduser(job.parallel.plan))
    if not path.is_file():
        raise PlanError(
            f"parallel.plan={job.parallel.plan}: there is no such file. Use manual, auto, or the path of a "
            "plan file, such as plan.yaml in the folder of a run"
        )
    plan = load_plan(path)
    batch = {f"train.{key}": getattr(job, key) for key in ("micro_batch_size", "global_batch_size")}
    if mistakes := plan_file_mistakes(plan, path, job.parallel, model, world_size, job.seq_len, batch):
        raise PlanError("\n".join(mistakes))
    return plan


def plan_on_device(job: TrainingJob, ranks: RankInfo, device: torch.device, device_name: str) -> Plan:
    """Make or read the plan as `plan_run` does, for this process and its device.

    Raises PlanError, also for an attention kernel or float8 products that the device does not support.
    """
    attention = attention_on_device(job, device, device_name)
    plan = plan_run(job, ranks.world_size, ranks.local_world_size, attention, dtype_on_device(device))
    check_device_support(job, plan, device)
    return plan


def check_device_support(job: TrainingJob, plan: Plan, device: torch.device) -> None:
    """Raise PlanError for an attention kernel or float8 products that this device does not support."""
    check_attention(job, plan, device.type)
    if plan.float8.linears:
        check_float8(plan.float8, device)


def plan_run(
    job: TrainingJob,
    world_size: int,
    gpus_per_node: int | None = None,
    attention: str = "cpu",
    param_dtype: str = "float32",
) -> Plan:
    """Make the plan of a run on `world_size` processes from the job, or read it from the file that it names.

    Args:
        gpus_per_node: None: all processes share a node
        attention, param_dtype: what `auto` resolves to on the run's devices: `best_attention`, `best_dtype`

    Raises PlanError that lists all mistakes, one line each.
    """
    model = source_of(job.model).units
    if job.parallel.plan == "auto":
        raise PlanError(
            "parallel.plan=auto works only in train.main and tools.plan: run tools.plan with --save FILE, "
            "and use --parallel.plan=FILE"
        )
    if job.parallel.plan == "manual":
        shape = make_shape(job, world_size, gpus_per_node or world_size, attention, param_dtype)
        return make_plan(job.parallel, model, shape)
    return read_plan(job, model, world_size)


def make_shape(
    job: TrainingJob, world_size: int, gpus_per_node: int, attention: str, param_dtype: str
) -> RunShape:
    """Return the sizes that the plan is made for; `attention` and `param_dtype` as in `plan_run`."""
    sizes = job.seq_len, job.micro_batch_size, job.global_batch_size
    return RunShape(world_size, gpus_per_node, *sizes, attention, param_dtype, dynamic=False)
