"""Config -> plan: the part of a run that needs no process group and no device."""

import dataclasses
from pathlib import Path

from models.attention import ATTENTION_OPS
from models.llama import SHARDING, LlamaConfig, fsdp_units, tp_divides
from models.size import count_parameters
from parallel.check_plan import check_plan
from parallel.config import ParallelConfig
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
        raise PlanError("parallel.plan=auto: this version has no planner yet. Use manual, or the path of a plan file")
    if config.parallel.plan == "manual":
        job = Job(world_size, gpus_per_node or world_size, train.seq_len, train.micro_batch_size, train.global_batch_size)
        return make_plan(config.parallel, model, job)
    plan = load_plan(Path(config.parallel.plan).expanduser())
    _refuse_other_keys(config, plan)
    check_plan(plan, model, world_size, train.seq_len)
    return plan


def _refuse_other_keys(config: Config, plan: Plan) -> None:
    """A plan file decides alone: a key that says otherwise would be ignored in silence."""
    default = ParallelConfig()
    mistakes = [f"parallel.{field.name} is decided by the plan file {config.parallel.plan}: leave the key out, or edit the file"
                for field in dataclasses.fields(ParallelConfig)
                if field.name != "plan" and getattr(config.parallel, field.name) != getattr(default, field.name)]  # fmt: skip
    for key, left_open in (("micro_batch_size", "auto"), ("global_batch_size", -1)):
        asked, planned = getattr(config.train, key), getattr(plan, key)
        if asked not in (left_open, planned):
            mistakes.append(f"train.{key}={asked}, but the plan file {config.parallel.plan} has {planned}: change one of them")
    if mistakes:
        raise PlanError("\n".join(mistakes))


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
