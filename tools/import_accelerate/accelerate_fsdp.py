"""Rules for accelerate's `fsdp_config` and `parallelism_config`: what is sharded over what, and how.

Read in accelerate 1.15.0: utils/dataclasses.py (FullyShardedDataParallelPlugin), utils/constants.py,
utils/launch.py, utils/fsdp_utils.py, parallelism_config.py, accelerator.py, commands/config/cluster.py,
commands/launch.py, commands/to_fsdp2.py.

Where two keys contradict each other, the one that accelerate obeys wins. Where accelerate's launcher puts a
default in the place of what the file says, the file's word counts, and a note says so.
"""

from collections.abc import Mapping
from typing import Any

from meshwright.tools.import_accelerate.rules import (
    FALSE,
    TRUE,
    Given,
    Rule,
    Verdict,
    as_bool,
    as_choice,
    as_int,
    dropped,
    drops,
    mapped,
    refused,
    refuses_any,
)

# numbered from 1
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}
WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")  # numbered from 1
LLAMA_BLOCK = "LlamaDecoderLayer"  # transformers' class of one Llama block
DEFAULT_MIN_PARAMS = 100_000_000  # of accelerate launch's --fsdp_min_num_params
SIZE = "parallelism_config_{}_size"
AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
ONE_MACHINE = (
    "HYBRID_SHARD on one machine has nothing to replicate, in accelerate as here: it shards over all "
    "processes. Started on several machines, parallel.strategy replicates across them"
)


def fsdp_version(given: Given) -> int:
    """1 unless the file says 2, as in accelerate. A version that is neither is refused by its own rule."""
    return 2 if str(given.get("fsdp_version")) == "2" else 1


def process_count(given: Given) -> int:
    """Processes of the run; 1 while the number is missing or wrong, which its own rule refuses."""
    return _positive(given.get("num_processes"))


def machine_count(given: Given) -> int:
    """Machines of the run."""
    return _positive(given.get("num_machines"))


def axis_sizes(given: Given) -> dict[str, int]:
    """Degrees that parallelism_config gives; empty without one."""
    return {
        axis: _positive(given[SIZE.format(axis)]) for axis in AXES if given.get(SIZE.format(axis)) is not None
    }


def _positive(value: Any) -> int:
    try:
        return as_int(value)
    except ValueError:
        return 1


def as_strategy(value: Any) -> str:
    """The name of a sharding strategy, given as a word or by its number."""
    if str(value).isdecimal() and 1 <= int(value) <= len(STRATEGIES):
        return STRATEGIES[int(value) - 1]
    try:
        return as_choice(value, STRATEGIES)
    except ValueError as error:
        raise ValueError(f"{error} Or their numbers, 1 to {len(STRATEGIES)}") from None


def shard_settings(strategy: str, given: Given) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Our keys for a strategy, and notes.

    A hybrid strategy shards within each machine and replicates across them, so that on several machines the
    degrees are written out: they hold however the processes are spread later.
    """
    machines = machine_count(given)
    if axis_sizes(given):
        settings = {"parallel.reshard_after_forward": RESHARDS[strategy]} if strategy in RESHARDS else {}
        return settings, (f"parallelism_config decides the degrees; {strategy} decides resharding only",)
    if strategy.startswith("HYBRID") and machines > 1:
        degrees = {"parallel.dp_replicate": machines, "parallel.dp_shard": process_count(given) // machines}
        return {**degrees, "parallel.reshard_after_forward": RESHARDS[strategy]}, ()
    return {"parallel.strategy": strategy.lower()}, (ONE_MACHINE,) if strategy.startswith("HYBRID") else ()


def _sharding_strategy(value: Any, given: Given) -> Verdict:
    strategy = as_strategy(value)
    if fsdp_version(given) == 2 and given.get("fsdp_reshard_after_forward") is not None:
        lost = (
            ""
            if strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
            else (
                f": parameters are sharded over all processes, which is not {strategy}. To keep that, give "
                "parallelism_config its sizes, or delete fsdp_reshard_after_forward"
            )
        )
        return dropped(
            "with fsdp_version 2 fsdp_reshard_after_forward decides, in accelerate too",
            f"fsdp_sharding_strategy={value} is ignored beside fsdp_reshard_after_forward{lost}",
        )
    settings, notes = shard_settings(strategy, given)
    if fsdp_version(given) == 2:
        notes += (
            f"accelerate 1.15 ignores fsdp_sharding_strategy with fsdp_version 2; here {strategy} is done as "
            "written",
        )
    return mapped(f"{strategy} by our names", settings, *notes)


def _reshard_after_forward(value: Any, given: Given) -> Verdict:
    return _reshard_2(value, given) if fsdp_version(given) == 2 else _reshard_1(value, given)


def _reshard_1(value: Any, given: Given) -> Verdict:
    """Version 1 takes a strategy's name here, and prefers fsdp_sharding_strategy; its launcher even prefers
    that key's default, which is FULL_SHARD, so that a strategy given here alone is never done."""
    strategy = (
        as_strategy(value) if not _is_truth(value) else ("FULL_SHARD" if as_bool(value) else "SHARD_GRAD_OP")
    )
    asked = given.get("fsdp_sharding_strategy")
    if asked is not None:
        return dropped(
            "with fsdp_version 1 fsdp_sharding_strategy takes precedence, in accelerate too",
            f"warning: fsdp_sharding_strategy={asked} wins over fsdp_reshard_after_forward={value}, "
            "as in accelerate's fsdp_version 1: delete one of them",
        )
    settings, notes = shard_settings(strategy, given)
    if strategy != "FULL_SHARD":
        notes += (
            "warning: accelerate launch 1.15 does FULL_SHARD for this file, because its own default of "
            f"fsdp_sharding_strategy takes precedence; here {strategy} is done as written",
        )
    return mapped(f"{strategy}, which version 1 spells here", settings, *notes)


def _reshard_2(value: Any, given: Given) -> Verdict:
    if _is_truth(value):
        return mapped("the same, per FSDP unit", {"parallel.reshard_after_forward": as_bool(value)})
    strategy = as_strategy(value)
    settings, notes = shard_settings(strategy, given)
    return mapped(
        f"{strategy} by our names",
        settings,
        *notes,
        f"accelerate 1.15 takes only true or false here with version 2; {strategy} is done as written",
    )


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool) or str(value).lower() in {*TRUE, *FALSE} - {"1"}


def _version(value: Any, given: Given) -> Verdict:
    if as_int(value) == 1:
        return dropped(
            "FSDP2 is what shards here, whatever the version",
            "fsdp_version 1: its keys are read by their meaning in version 1, and done by FSDP2",
        )
    if as_int(value) != 2:
        raise ValueError("it must be 1 or 2")
    return dropped("FSDP2 is what shards here")


def _wrap(value: Any, given: Given) -> Verdict:
    policy = as_choice(value, WRAPS)
    if policy == "SIZE_BASED_WRAP":
        least = given.get("fsdp_min_num_params")
        least = DEFAULT_MIN_PARAMS if least is None else as_int(least, 0)
        return mapped(
            "blocks are joined into units of at least so many parameters", {"parallel.unit_min_params": least}
        )
    if policy == "NO_WRAP":
        return mapped(
            "the nearest is a unit per block",
            {"parallel.unit_min_params": 0},
            "NO_WRAP gathers the whole model at once; here every block is a unit of its own, which needs "
            "less memory and trains the same",
        )
    return mapped("a unit per transformer block", {"parallel.unit_min_params": 0})


def _min_params(value: Any, given: Given) -> Verdict:
    least = as_int(value, 0)
    if str(given.get("fsdp_auto_wrap_policy")).upper() == "SIZE_BASED_WRAP":
        return mapped("the least size of a unit", {"parallel.unit_min_params": least})
    return dropped("it counts with fsdp_auto_wrap_policy SIZE_BASED_WRAP only, in accelerate too")


def _block_class(value: Any, given: Given) -> Verdict:
    names = value if isinstance(value, list) else str(value).split(",")
    wrong = [str(name).strip() for name in names if str(name).strip() not in ("", LLAMA_BLOCK)]
    if wrong:
        return refused(f"{', '.join(wrong)} is not a block of the model here, a Llama: only {LLAMA_BLOCK} is")
    return dropped(f"{LLAMA_BLOCK} is a block of the model here: a unit per block is what is done")


def _backward_prefetch(value: Any, given: Given) -> Verdict:
    number = str(value)
    policy = PREFETCHES[int(number) - 1] if number in ("1", "2", "3") else as_choice(value, PREFETCHES)
    notes = []
    if policy == "BACKWARD_POST":
        notes.append(
            "BACKWARD_POST gathers the next unit between this one's gradients and their reduction; "
            "the nearest here is no prefetch"
        )
    if fsdp_version(given) == 2:
        notes.append(
            "accelerate ignores fsdp_backward_prefetch with fsdp_version 2; here it is done as written"
        )
    return mapped(
        f"{policy} in units ahead", {"parallel.backward_prefetch": int(policy == "BACKWARD_PRE")}, *notes
    )


def _forward_prefetch(value: Any, given: Given) -> Verdict:
    notes = ["accelerate has no fsdp_forward_prefetch with fsdp_version 2; here it is done as written"]
    return mapped(
        "in units ahead",
        {"parallel.forward_prefetch": int(as_bool(value))},
        *(notes if fsdp_version(given) == 2 and as_bool(value) else ()),
    )


def _switch(key: str, on: Any, off: Any, why: str) -> Rule:
    """A rule for a truth value that turns one of our keys on or off."""
    return lambda value, given: mapped(why, {key: on if as_bool(value) else off})


def _axis(axis: str) -> Rule:
    """A rule for a degree that we have."""

    def rule(value: Any, given: Given) -> Verdict:
        degree, distributed = as_int(value), str(given.get("distributed_type")).upper()
        if degree > 1 and distributed == "FSDP" and fsdp_version(given) == 1:
            return refused(
                "parallelism_config needs fsdp_version 2, in accelerate too: set fsdp_config.fsdp_version: 2"
            )
        if degree > 1 and distributed != "FSDP" and axis == "dp_shard":
            return refused(f"distributed_type {distributed} does not shard: set distributed_type: FSDP")
        return mapped("the degree of the same axis", {f"parallel.{axis}": degree})

    return rule


def _no_axis(name: str) -> Rule:
    """A rule for a degree that we do not have."""

    def rule(value: Any, given: Given) -> Verdict:
        return (
            dropped("1 is off")
            if as_int(value) == 1
            else refused(f"{name} is not in this version: set it to 1")
        )

    return rule


def size_mistakes(given: Given) -> list[str]:
    """The sizes of parallelism_config must multiply to the number of processes, as accelerate demands."""
    sizes, product = axis_sizes(given), 1
    for size in sizes.values():
        product *= size
    if not sizes or product == process_count(given):
        return []
    degrees = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    return [
        f"parallelism_config: {degrees} is {product} processes, num_processes is {process_count(given)}: "
        "make them equal (a size that is left out is 1)"
    ]


FREE = "the results do not depend on it here: "
FSDP_RULES: dict[str, Rule] = {
    "fsdp_version": _version,
    "fsdp_sharding_strategy": _sharding_strategy,
    "fsdp_reshard_after_forward": _reshard_after_forward,
    "fsdp_auto_wrap_policy": _wrap,
    "fsdp_min_num_params": _min_params,
    "fsdp_transformer_layer_cls_to_wrap": _block_class,
    "fsdp_backward_prefetch": _backward_prefetch,
    "fsdp_forward_prefetch": _forward_prefetch,
    "fsdp_activation_checkpointing": _switch(
        "parallel.activation_checkpoint", "full", "none", "each block is recomputed in its backward"
    ),
    "fsdp_offload_params": _switch(
        "parallel.cpu_offload", True, False, "shards, gradients and optimizer state in host memory"
    ),
    "fsdp_activation_checkpointing_offload": refuses_any(
        "offloading activations is not in this version: set it to false"
    ),
    "fsdp_ignored_modules": refuses_any(
        "every parameter is in a unit here: leave it out, or see train.freeze"
    ),
    "fsdp_state_dict_type": drops(
        "checkpoints here are always sharded; tools.checkpoint consolidate makes one file"
    ),
    "fsdp_sync_module_states": drops(FREE + "every rank computes the same weights from run.seed"),
    "fsdp_use_orig_params": drops("FSDP2 always keeps the original parameters"),
    "fsdp_cpu_ram_efficient_loading": drops(
        "weights here are always read in shards; no rank holds the model"
    ),
    "fsdp_limit_all_gathers": drops("FSDP2 limits all-gathers without a switch"),
    "fsdp_backward_prefetch_policy": lambda value, given: dropped(
        "accelerate's documentation spells it so, and accelerate ignores it",
        f"fsdp_backward_prefetch_policy={value} has no effect, in accelerate as here: the key is "
        "fsdp_backward_prefetch",
    ),
}
PARALLELISM_RULES: dict[str, Rule] = {
    **{SIZE.format(axis): _axis(axis) for axis in AXES[:3]},
    SIZE.format("cp"): _no_axis("context parallelism"),
    SIZE.format("sp"): _no_axis("sequence parallelism by DeepSpeed"),
    **{
        f"parallelism_config_{name}": drops("it counts with cp_size or sp_size above 1 only")
        for name in (
            "cp_backend",
            "cp_comm_strategy",
            "sp_backend",
            "sp_seq_length",
            "sp_seq_length_is_variable",
            "sp_attn_implementation",
        )
    },
}
