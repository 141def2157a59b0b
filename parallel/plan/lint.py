"""Advice on plans that run but are poor choices. Nothing here is an error."""

from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.plan.mistakes import key_values
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import value_text

GRAPH_MODES = ("reduce-overhead", "max-autotune")  # inductor's modes that capture CUDA graphs


def advise(plan: Plan, gpus_per_node: int) -> list[str]:
    """Return advice on the plan, one sentence per item; [] if there is none."""
    mesh, advice = plan.mesh, []
    if mesh.world_size == 1:
        advice.append("one process: nothing is sharded, gathered or reduced")
    if mesh.dp_replicate > 1 and mesh.shards > 1 and mesh.world_size <= gpus_per_node:
        advice.append(
            f"dp_replicate={mesh.dp_replicate} within a single node: HSDP needs more memory there and saves "
            f"no time; use dp_shard={mesh.data_parallel}"
        )
    if mesh.tp > 1 and gpus_per_node % mesh.tp:
        advice.append(
            f"tp={mesh.tp} does not divide the {gpus_per_node} processes of a node, so tp collectives, "
            "which every layer waits for, cross nodes: use a degree within one"
        )
    if mesh.cp > 1 and gpus_per_node % (mesh.cp * mesh.tp):
        advice.append(
            f"cp x tp = {mesh.cp * mesh.tp} does not divide the {gpus_per_node} processes of a node, so the "
            "exchanges around attention, which every layer waits for, cross nodes: use degrees within one if "
            "the memory allows it"
        )
    group = mesh.shards * mesh.tp  # ranks of one replica: should be part of a node, or several full nodes
    if (
        mesh.world_size > gpus_per_node
        and mesh.dp_replicate > 1
        and gpus_per_node % group
        and group % gpus_per_node
    ):
        axes = "dp_shard x tp" if mesh.cp == 1 else "dp_shard x cp x tp"
        advice.append(
            f"{axes} = {group} is neither a part nor a multiple of the {gpus_per_node} processes of a node: "
            "some groups of shards cross nodes needlessly; use degrees that divide or fill nodes"
        )
    if mesh.shards == 1 and mesh.dp_replicate > 1:
        advice.append(
            "dp_shard=1: every process holds all parameters, gradients and optimizer state, and there is "
            f"nothing to reshard or prefetch; with dp_shard={mesh.dp_replicate} each holds a shard of them"
        )
    if mesh.tp > 1 and all(style.startswith("whole_") for style in plan.tensor.styles.values()):
        advice.append(f"tp={mesh.tp} splits no part of the model: every tp rank computes the same; use tp=1")
    if plan.cpu_offload and mesh.world_size == 1:
        advice.append(
            "cpu_offload with one process: every parameter is copied to the device and back in each step"
        )
    if plan.compile.enabled and plan.compile.mode in GRAPH_MODES:
        # torch 2.13, _inductor/cudagraph_trees.py: StaticInputIdxMismatch is not counted by any limit
        advice.append(
            f"compile.mode={plan.compile.mode} captures CUDA graphs on a GPU, each for parameters at fixed "
            "addresses, but FSDP2 gathers them into new memory every time: for each new address another "
            "graph is captured, which takes longer than running it, and kept; use "
            "max-autotune-no-cudagraphs or default"
        )
    return advice


def unused_keys(config: ParallelConfig) -> list[str]:
    """Return a sentence for each key that was set but has no effect with the value of another key."""
    of_compile = ("backend", "mode", "dynamic", "on_recompile", "cache_dir")
    needs = {
        "activation_budget": ("activation_checkpoint", "budget"),
        "selective_policy": ("activation_checkpoint", "selective"),
        **dict.fromkeys(("tp_modules", "sequence_parallel", "loss_parallel"), ("tp", "2 or more")),
        **dict.fromkeys((f"compile.{key}" for key in of_compile), ("compile.enabled", "true")),
    }
    if config.plan != "manual":
        return []  # the plan file or the planner decides; a key that contradicts the file is an error
    values, default, advice = key_values(config), key_values(ParallelConfig()), []
    for key, (other, needed) in needs.items():
        key, other = f"parallel.{key}", f"parallel.{other}"
        value = value_text(values[other])
        works = value not in ("auto", "1") if needed == "2 or more" else value == needed
        if values[key] != default[key] and not works:
            requested = value_text(values[key])
            advice.append(f"{key}={requested} has no effect with {other}={value}: it needs {needed}")
    return advice
