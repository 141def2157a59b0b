"""Config -> plan: the part of a run that needs no process group and no device."""

import os
from pathlib import Path

from models.attention import ATTENTION_OPS
from models.llama import SHARDING, LlamaConfig, fsdp_units, tp_divides
from models.size import count_parameters
from parallel.check_plan import check_plan, key_mistakes
from parallel.make_plan import Job, make_plan
from parallel.plan import ModelUnits, Plan, PlanError
from parallel.plan_file import load_plan
from train.config import Config


def plan_run(config: Config, world_size: int, gpus_per_node: int | None = None) -> Plan:
    """The plan of a run on `world_size` processes: made from the config, or read from the file it names.

    Without `gpus_per_node` all processes share a node. Raises PlanError with all mistakes in one report.
    """
    model, train = model_units(config.model), config.train
    if config.parallel.plan == "auto":
        raise PlanError("parallel.plan=auto is for train.main and tools.plan, which know the machine. Let tools.plan choose, "
                        "with --save FILE, and use --parallel.plan=FILE")  # fmt: skip
    if config.parallel.plan == "manual":
        job = Job(world_size, gpus_per_node or world_size, train.seq_len, train.micro_batch_size, train.global_batch_size)
        return make_plan(config.parallel, model, job)
    path = Path(os.path.expanduser(config.parallel.plan))
    if not path.is_file():
        raise PlanError(f"parallel.plan={config.parallel.plan}: there is no such file. Use manual, auto, or the path of a "
                        "plan file, such as plan.yaml in a run's folder")  # fmt: skip
    plan = load_plan(path)
    mistakes = key_mistakes(config.parallel, plan, model)
    if plan.mesh.world_size == world_size:
        mistakes += _batch_mistakes(config, plan)
    try:
        check_plan(plan, model, world_size, train.seq_len)
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
            mistakes.append(f"train.{key}={asked}, but the plan file {config.parallel.plan} has {planned}: change one of them")
    return mistakes


def model_units(config: LlamaConfig) -> ModelUnits:
    """What a Llama publishes of itself, in the planner's terms."""
    counts = count_parameters(config)
    blocks = {f"layers.{i}": counts.block for i in range(config.n_layers)}
    return ModelUnits(
        modules={"tok_embeddings": counts.embedding, **blocks, "head": counts.head},
        units=fsdp_units(config),
        compiled=frozenset({*blocks, "head"}),
        checkpointed=frozenset(blocks),
        styles=SHARDING,
        tp_divides=tp_divides(config),
        shared_parts=frozenset({"embedding", "head"} if config.tie_embeddings else ()),
        attention_ops=ATTENTION_OPS,
    )
