"""Plans that can run but make little sense: said, not refused."""

from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.plan.schema import Plan

GRAPH_MODES = ("reduce-overhead", "max-autotune")  # of inductor: those that capture CUDA graphs


def advise(plan: Plan, gpus_per_node: int) -> list[str]:
    """What an expert would say of the plan at a glance, a sentence each; [] if nothing."""
    mesh, advice = plan.mesh, []
    if mesh.world_size == 1:
        advice.append("one process: nothing is sharded, gathered or reduced")
    if mesh.dp_replicate > 1 and mesh.dp_shard > 1 and mesh.world_size <= gpus_per_node:
        advice.append(
            f"dp_replicate={mesh.dp_replicate} within a single node: HSDP takes more memory there and saves "
            f"no time; dp_shard={mesh.data_parallel} shards further"
        )
    if mesh.tp > 1 and gpus_per_node % mesh.tp:
        advice.append(
            f"tp={mesh.tp} does not divide the {gpus_per_node} processes of a node, so tensor parallelism, "
            "which waits for every exchange, crosses nodes: use a degree within one"
        )
    group = mesh.dp_shard * mesh.tp  # of shards: part of a node, or several whole ones
    if (
        mesh.world_size > gpus_per_node
        and mesh.dp_replicate > 1
        and gpus_per_node % group
        and group % gpus_per_node
    ):
        advice.append(
            f"dp_shard x tp = {group} is neither a part nor a multiple of the {gpus_per_node} processes of a "
            "node: some groups of shards cross nodes needlessly"
        )
    if mesh.dp_shard == 1 and mesh.dp_replicate > 1:
        advice.append(
            "dp_shard=1: every process holds all parameters, gradients and optimizer state, and there is "
            f"nothing to reshard or prefetch; dp_shard={mesh.dp_replicate} holds a share of them"
        )
    if mesh.tp > 1 and all(style.startswith("whole_") for style in plan.tensor.styles.values()):
        advice.append(f"tp={mesh.tp} splits no part of the model: every tp rank computes the same; use tp=1")
    if plan.cpu_offload and mesh.world_size == 1:
        advice.append(
            "cpu_offload with one process: every parameter crosses to the device and back each step"
        )
    if plan.compile.enabled and plan.compile.mode in GRAPH_MODES:
        # torch 2.13, _inductor/cudagraph_trees.py: StaticInputIdxMismatch, which no limit counts
        advice.append(
            f"compile.mode={plan.compile.mode} captures CUDA graphs on a GPU, each for parameters at fixed "
            "addresses, but FSDP2 gathers them into new memory every time: for each new address a graph is "
            "recorded again, which takes longer than running it, and kept. Use max-autotune-no-cudagraphs, "
            "or default"
        )
    return advice


def unused_keys(config: ParallelConfig) -> list[str]:
    """Keys that were given a value and have no effect, because another key does not ask for what they are
    about."""
    needs = {
        "activation_budget": ("activation_checkpoint", "budget"),
        "selective_policy": ("activation_checkpoint", "selective"),
        **dict.fromkeys(("tp_modules", "sequence_parallel", "loss_parallel"), ("tp", "2 or more")),
    }
    default, advice = ParallelConfig(), []
    if config.plan != "manual":
        return []  # the file decides, and a key beside it that says otherwise is an error
    for key, (other, wanted) in needs.items():
        asked, value = getattr(config, key), getattr(config, other)
        works = value not in ("auto", 1) if other == "tp" else value == wanted
        if asked != getattr(default, key) and not works:
            advice.append(
                f"parallel.{key}={str(asked).lower()} has no effect with parallel.{other}={value}: it needs "
                f"{wanted}"
            )
    if not config.compile.enabled:
        odd = [
            key
            for key in ("backend", "mode", "dynamic", "on_recompile", "cache_dir")
            if getattr(config.compile, key) != getattr(default.compile, key)
        ]
        advice += [f"parallel.compile.{key} has no effect with parallel.compile.enabled=false" for key in odd]
    return advice
