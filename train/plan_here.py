"""The plan of a run on the devices at hand: what a config leaves to them is decided here."""

import torch

from meshwright.parallel.float8 import check_float8
from meshwright.parallel.plan.schema import Plan
from meshwright.train.attention_kernel import attention_here, check_attention
from meshwright.train.best_dtype import dtype_here
from meshwright.train.config import Config
from meshwright.train.place import Place
from meshwright.train.planning import plan_run


def plan_here(config: Config, place: Place, device: torch.device, device_name: str) -> Plan:
    """As `plan_run`, for this process's place and device. Raises PlanError, also for an attention kernel that
    cannot run here."""
    asked = config.parallel.param_dtype
    attention, dtype = (
        attention_here(config, device, device_name),
        dtype_here(device) if asked == "auto" else asked,
    )
    plan = plan_run(config, place.world_size, place.local_world_size, attention, dtype)
    check_here(config, plan, device)
    return plan


def check_here(config: Config, plan: Plan, device: torch.device) -> None:
    """Raise PlanError for an attention kernel or products that this device cannot run."""
    check_attention(config, plan, device.type)
    if plan.float8.linears:
        check_float8(plan.float8, device)
