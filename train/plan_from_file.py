"""The plan of a run that names a plan file."""

import os
from pathlib import Path

from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.schema import ModelUnits, Plan
from meshwright.parallel.plan.serialize import load_plan
from meshwright.parallel.plan.validate import check_plan, key_mistakes
from meshwright.train.config import Config


def read_plan(config: Config, model: ModelUnits, world_size: int) -> Plan:
    """The plan in the file that `parallel.plan` names, if it suits the run. Raises PlanError with all
    mistakes in one report."""
    path = Path(os.path.expanduser(config.parallel.plan))
    if not path.is_file():
        raise PlanError(
            f"parallel.plan={config.parallel.plan}: there is no such file. Use manual, auto, or the "
            f"path of a "
            "plan file, such as plan.yaml in a run's folder"
        )
    plan = load_plan(path)
    mistakes = key_mistakes(config.parallel, plan, model)
    if plan.mesh.world_size == world_size:
        mistakes += _batch_mistakes(config, plan)
    try:
        check_plan(plan, model, world_size, config.train.seq_len)
    except PlanError as error:
        mistakes += [f"plan file {path}: {line}" for line in str(error).splitlines()]
    if mistakes:
        raise PlanError("\n".join(mistakes))
    return plan


def _batch_mistakes(config: Config, plan: Plan) -> list[str]:
    """Batch sizes of the config that say other than the plan file, which decides."""
    mistakes = []
    for key, left_open in (("micro_batch_size", "auto"), ("global_batch_size", -1)):
        asked, planned = getattr(config.train, key), getattr(plan, key)
        if asked not in (left_open, planned):
            mistakes.append(
                f"train.{key}={asked}, but the plan file {config.parallel.plan} has {planned}: change one "
                f"of them"
            )
    return mistakes
