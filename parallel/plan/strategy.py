"""Common names for data parallelism, and the degrees and resharding that they stand for."""

from dataclasses import replace

from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.plan.mistakes import Mistake
from meshwright.parallel.plan.rules import nearest
from meshwright.parallel.plan.schema import MeshPlan

ZERO3, ZERO2 = "gathered parameters freed after use", "parameters stay gathered until the backward"
COPIES = "every process holds everything, only gradients are reduced"
# The names of FSDP1's ShardingStrategy (torch.distributed.fsdp), in lower case, and ddp -> the processes that
# parameters are sharded over ("all", those of a "node", or "none"); whether gathered parameters are freed
# after the forward (None: nothing is gathered); a phrase for people
STRATEGIES: dict[str, tuple[str, bool | None, str]] = {
    "full_shard": ("all", True, f"ZeRO-3: sharded over all processes, {ZERO3}"),
    "shard_grad_op": ("all", False, f"ZeRO-2: sharded over all processes, {ZERO2}"),
    "no_shard": ("none", None, COPIES),
    "ddp": ("none", None, COPIES),
    "hybrid_shard": ("node", True, "HSDP: ZeRO-3 within each node, replicated across nodes"),
    "hybrid_shard_zero2": ("node", False, "HSDP: ZeRO-2 within each node, replicated across nodes"),
}


def strategy_settings(
    config: ParallelConfig, inner: int, world_size: int, gpus_per_node: int
) -> dict[str, int | bool]:
    """Return the degrees and resharding that `config.strategy` stands for, by key of ParallelConfig.

    `inner`: tp x cp, of which a node has gpus_per_node / inner. Degrees that do not divide the number of
    processes are rounded down here; the check of the mesh reports them.
    """
    shards, reshard, _ = STRATEGIES[config.strategy or ""]
    data_parallel = max(world_size // inner, 1)
    node_shards = max(min(gpus_per_node, world_size) // inner, 1)
    shard = {"all": data_parallel, "node": node_shards, "none": 1}[shards]
    settings: dict[str, int | bool] = {"dp_replicate": max(data_parallel // shard, 1), "dp_shard": shard}
    if reshard is not None:
        settings["reshard_after_forward"] = reshard
    return settings


def resolve_strategy(
    config: ParallelConfig, inner: int, world_size: int, gpus_per_node: int
) -> tuple[ParallelConfig, list[Mistake]]:
    """Return the config with the strategy's settings in its keys, and mistakes: keys that contradict it.
    `inner`: tp x cp."""
    name = config.strategy or ""
    if name not in STRATEGIES:
        message = f"={name} is not one of {', '.join(STRATEGIES)}." + nearest(name, STRATEGIES)
        return config, [Mistake("parallel.strategy", message)]
    settings = strategy_settings(config, inner, world_size, gpus_per_node)
    mistakes = []
    for key, value in settings.items():
        requested = getattr(config, key)
        left_open = requested == "auto" or (key == "dp_shard" and requested == -1)
        if not left_open and (type(requested), requested) != (type(value), value):
            message = (
                f"={str(requested).lower()} contradicts parallel.strategy={config.strategy}, "
                f"which means {str(value).lower()} here: remove one of them"
            )
            mistakes.append(Mistake(f"parallel.{key}", message))
    return replace(config, **settings), mistakes  # type: ignore[arg-type]


def describe_strategy(name: str, mesh: MeshPlan) -> str:
    """Return one line on what the strategy means, and its degrees in this run."""
    shards, _, meaning = STRATEGIES[name]
    one_node = "; one node: nothing is replicated" if shards == "node" and mesh.dp_replicate == 1 else ""
    degrees = f"dp_replicate {mesh.dp_replicate}, dp_shard {mesh.dp_shard}{one_node}"
    return f"strategy {name}: {meaning} ({degrees})"
