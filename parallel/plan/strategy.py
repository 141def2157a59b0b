"""The names people know for data parallelism, and the degrees and resharding they stand for."""

from dataclasses import dataclass, replace

from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.plan.mistakes import Mistake
from meshwright.parallel.plan.rules import nearest
from meshwright.parallel.plan.schema import MeshPlan


@dataclass(frozen=True)
class Strategy:
    """A name's meaning. `shards`: what parameters are sharded over: "all" processes, a "node", or "none".

    `reshard`: whether gathered parameters are freed after the forward; None where there is nothing to free.
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
    config: ParallelConfig, tp: int, world_size: int, gpus_per_node: int
) -> dict[str, int | bool]:
    """Degrees and resharding that `config.strategy` stands for, by key of ParallelConfig.

    Processes that tp takes are taken from the shards of each node. Degrees that do not come out whole are
    left to the mesh's own check.
    """
    strategy = STRATEGIES[config.strategy or ""]
    data_parallel = max(world_size // tp, 1)
    in_a_node = max(min(gpus_per_node, world_size) // tp, 1)
    shard = {"all": data_parallel, "node": in_a_node, "none": 1}[strategy.shards]
    settings: dict[str, int | bool] = {"dp_replicate": max(data_parallel // shard, 1), "dp_shard": shard}
    if strategy.reshard is not None:
        settings["reshard_after_forward"] = strategy.reshard
    return settings


def resolve_strategy(
    config: ParallelConfig, tp: int, world_size: int, gpus_per_node: int
) -> tuple[ParallelConfig, list[Mistake]]:
    """The config with the strategy's settings in its keys, and the keys that contradict it."""
    name = config.strategy or ""
    if name not in STRATEGIES:
        says = f"={name} is not one of {', '.join(STRATEGIES)}." + nearest(name, STRATEGIES)
        return config, [Mistake("parallel.strategy", says)]
    settings = strategy_settings(config, tp, world_size, gpus_per_node)
    mistakes = []
    for key, value in settings.items():
        asked = getattr(config, key)
        open_ = asked == "auto" or (key == "dp_shard" and asked == -1)
        if not open_ and (type(asked), asked) != (type(value), value):
            says = (
                f"={str(asked).lower()} contradicts parallel.strategy={config.strategy}, "
                f"which means {str(value).lower()} here: leave one of them out"
            )
            mistakes.append(Mistake(f"parallel.{key}", says))
    return replace(config, **settings), mistakes  # type: ignore[arg-type]


def describe_strategy(name: str, mesh: MeshPlan) -> str:
    """One line that says what the strategy means, and its degrees here."""
    strategy = STRATEGIES[name]
    alone = (
        "; one node: nothing is replicated" if strategy.shards == "node" and mesh.dp_replicate == 1 else ""
    )
    return (
        f"strategy {name}: {strategy.meaning} (dp_replicate {mesh.dp_replicate}, dp_shard "
        f"{mesh.dp_shard}{alone})"
    )
