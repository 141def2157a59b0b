"""Common names for data parallelism, and the degrees and resharding that they stand for."""

from dataclasses import dataclass, replace

from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.plan.mistakes import Mistake
from meshwright.parallel.plan.rules import nearest
from meshwright.parallel.plan.schema import MeshPlan


@dataclass(frozen=True)
class Strategy:
    """The settings that a name stands for.

    Args:
        meaning: a phrase for people
        shards: the processes that parameters are sharded over: "all", those of a "node", or "none"
        reshard: free gathered parameters after the forward; None if there is nothing to free
    """

    meaning: str
    shards: str
    reshard: bool | None


# The names of FSDP1's ShardingStrategy (torch.distributed.fsdp), in lower case, and ddp.
STRATEGIES = {
    "full_shard": Strategy(
        "ZeRO-3: sharded over all processes, gathered parameters freed after use", "all", True
    ),
    "shard_grad_op": Strategy(
        "ZeRO-2: sharded over all processes, parameters stay gathered until the backward", "all", False
    ),
    "no_shard": Strategy("every process holds everything, only gradients are reduced", "none", None),
    "ddp": Strategy("every process holds everything, only gradients are reduced", "none", None),
    "hybrid_shard": Strategy("HSDP: ZeRO-3 within each node, replicated across nodes", "node", True),
    "hybrid_shard_zero2": Strategy("HSDP: ZeRO-2 within each node, replicated across nodes", "node", False),
}


def strategy_settings(
    config: ParallelConfig, inner: int, world_size: int, gpus_per_node: int
) -> dict[str, int | bool]:
    """Return the degrees and resharding that `config.strategy` stands for, by key of ParallelConfig.

    `inner`: tp x cp, of which a node has gpus_per_node / inner. Degrees that do not divide the number of
    processes are rounded down here; the check of the mesh reports them.
    """
    strategy = STRATEGIES[config.strategy or ""]
    data_parallel = max(world_size // inner, 1)
    node_shards = max(min(gpus_per_node, world_size) // inner, 1)
    shard = {"all": data_parallel, "node": node_shards, "none": 1}[strategy.shards]
    settings: dict[str, int | bool] = {"dp_replicate": max(data_parallel // shard, 1), "dp_shard": shard}
    if strategy.reshard is not None:
        settings["reshard_after_forward"] = strategy.reshard
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
    strategy = STRATEGIES[name]
    single_node = (
        "; one node: nothing is replicated" if strategy.shards == "node" and mesh.dp_replicate == 1 else ""
    )
    return (
        f"strategy {name}: {strategy.meaning} (dp_replicate {mesh.dp_replicate}, dp_shard "
        f"{mesh.dp_shard}{single_node})"
    )
