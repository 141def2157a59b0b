"""Config -> plan: the part of a run that needs no process group and no device."""

from meshwright.models.attention import ATTENTION_OPS, KERNELS
from meshwright.models.llama import SHARDING, LlamaConfig, block_linears, fsdp_units, tp_divides
from meshwright.models.size import count_parameters
from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.make import Job, make_plan
from meshwright.parallel.plan.schema import ModelUnits, Plan
from meshwright.train.config import Config
from meshwright.train.plan_from_file import read_plan


def plan_run(
    config: Config,
    world_size: int,
    gpus_per_node: int | None = None,
    attention: str = "cpu",
    param_dtype: str = "float32",
) -> Plan:
    """The plan of a run on `world_size` processes: made from the config, or read from the file it names.

    Without `gpus_per_node` all processes share a node. `attention` and `param_dtype`: what `auto` is on its
    devices, of `best_attention` and `best_dtype`. Raises PlanError with all mistakes in one report.
    """
    model = model_units(config.model)
    if config.parallel.plan == "auto":
        raise PlanError(
            "parallel.plan=auto is for train.main and tools.plan, which know the machine. Let tools.plan "
            "choose, "
            "with --save FILE, and use --parallel.plan=FILE"
        )
    if config.parallel.plan == "manual":
        job = make_job(config, world_size, gpus_per_node or world_size, attention, param_dtype)
        return make_plan(config.parallel, model, job)
    return read_plan(config, model, world_size)


def make_job(
    config: Config, world_size: int, gpus_per_node: int, attention: str, param_dtype: str = "float32"
) -> Job:
    """What the plan is made for; `attention` and `param_dtype` as in `plan_run`."""
    train = config.train
    return Job(
        world_size,
        gpus_per_node,
        train.seq_len,
        train.micro_batch_size,
        train.global_batch_size,
        attention,
        param_dtype,
    )


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
        attention_kernels=tuple(KERNELS),
        linears=block_linears(config),
    )
