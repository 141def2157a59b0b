"""Every key of an accelerate config (`accelerate config`, versions 0.x to 1.15), and what becomes of it here.

Read in accelerate 1.15.0: commands/config/config_args.py and cluster.py (the keys of a file),
commands/launch.py and to_fsdp2.py, utils/launch.py (how they become arguments, how processes are spread),
utils/dataclasses.py (FullyShardedDataParallelPlugin, DynamoBackend, TorchDynamoPlugin), utils/constants.py,
utils/fsdp_utils.py, parallelism_config.py, accelerator.py, state.py (precision of FSDP, TF32).

Where two keys contradict each other, the one that accelerate obeys wins. Where accelerate's launcher puts a
default in the place of what the file says, the file's word counts, and a note says so.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.parallel.plan.rules import nearest
from meshwright.tools.import_accelerate.rules import (
    FALSE,
    TRUE,
    Given,
    Item,
    Rule,
    Verdict,
    as_bool,
    as_choice,
    as_int,
    as_numbered,
    dropped,
    drops,
    judge,
    launched,
    mapped,
    refused,
    refuses,
    sets,
)

TYPES = ("FSDP", "MULTI_GPU", "MULTI_CPU", "NO")
# A section -> the prefix of its keys, which a file may leave out.
PREFIXES = {
    "fsdp_config": "fsdp_",
    "dynamo_config": "dynamo_",
    "parallelism_config": "parallelism_config_",
}
# Numbered from 1 in accelerate. Whether a strategy frees a unit's parameters after its forward.
STRATEGIES = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "NO_SHARD": None,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
}
STRATEGY, RESHARD = "fsdp_sharding_strategy", "fsdp_reshard_after_forward"
# What accelerate does where a strategy stands under a key of another fsdp_version.
DIFFERENCES = {
    (1, RESHARD): "warning: accelerate launch 1.15 does FULL_SHARD for this file, because its own default of "
    f"{STRATEGY} takes precedence",
    (2, STRATEGY): f"accelerate 1.15 ignores {STRATEGY} with fsdp_version 2",
    (2, RESHARD): "accelerate 1.15 takes only true or false here with version 2",
}
ONE_MACHINE = (
    "HYBRID_SHARD on one machine has nothing to replicate, in accelerate as here: it shards over all "
    "processes. Started on several machines, parallel.strategy replicates across them"
)
WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")  # numbered from 1
LLAMA_BLOCK = "LlamaDecoderLayer"  # transformers' class of one Llama block
DEFAULT_MIN_PARAMS = 100_000_000  # of accelerate launch's --fsdp_min_num_params
DEFAULT_PORT = 29500  # accelerate's own
BACKENDS = ("inductor", "aot_eager", "eager")  # those that train here without further packages
MODES = ("default", "reduce-overhead", "max-autotune")  # accelerate's TORCH_DYNAMO_MODES
NO_FP16 = (
    "float16 needs a gradient scaler, which this trainer does not have: use bf16, which has float32's range"
)


def judge_accelerate(config: Mapping[Any, Any]) -> list[Item]:
    """What becomes of every key of the file, and of what it leaves to accelerate's defaults."""
    entries, items = _flatten(config)
    given = {plain: value for _, _, plain, value in entries if value is not None}
    seen: dict[str, str] = {}
    for key, section, plain, value in entries:
        if plain in seen:
            why = f"it is the same key as {seen[plain]}: delete one of them"
            items.append(Item(key, value, refused(why)))
        else:
            items.append(judge(key, value, given, _rule(section, plain, given)))
            seen[plain] = key
    return [*items, *_judge_missing(given)]


def _flatten(config: Mapping[Any, Any]) -> tuple[list[tuple[str, str, str, Any]], list[Item]]:
    """(key as written, section, plain name, value) of every entry, and the items of sections that cannot be
    read. accelerate adds the prefix of a section where a key in it has none, and so does this."""
    entries: list[tuple[str, str, str, Any]] = []
    items = []
    for key, value in config.items():
        prefix = PREFIXES.get(str(key))
        if prefix is None:
            entries.append((str(key), "", str(key), value))
        elif value in (None, {}):
            items.append(Item(str(key), value, dropped("the section is empty")))
        elif isinstance(value, dict):
            entries += [
                (f"{key}.{inner}", f"{key}.", prefix + str(inner).removeprefix(prefix), leaf)
                for inner, leaf in value.items()
            ]
        else:
            why = "it is a section and needs a mapping of keys to values"
            items.append(Item(str(key), value, refused(why)))
    return entries, items


def _rule(section: str, plain: str, given: Given) -> Rule:
    if section + plain not in TABLE:
        known = [*TABLE, *PREFIXES]
        same_end = [name for name in known if name.rsplit(".", 1)[-1] == plain]
        hint = f" Did you mean {same_end[0]}?" if same_end else nearest(section + plain, known)
        return lambda value, given: refused(f"unknown key.{hint or ' Take it out.'}")
    if section == "fsdp_config." and _distributed(given) in TYPES[1:]:
        return drops(f"distributed_type {_distributed(given)} does not read fsdp_config, in accelerate too")
    return TABLE[section + plain]


def _judge_missing(given: Given) -> Iterator[Item]:
    """What must be there and is not; and accelerate's default where ours is another: it does not compile."""
    if "distributed_type" not in given:
        yield Item("distributed_type", None, refused(f"the file must have it: one of {', '.join(TYPES)}"))
    if "num_processes" not in given and _distributed(given) != "NO":
        why = "the file must say how many processes there are, over all machines"
        yield Item("num_processes", None, refused(why))
    if "dynamo_backend" not in given:
        note = (
            "nothing is compiled, as accelerate does by default; --parallel.compile.enabled=true compiles "
            "every block"
        )
        verdict = mapped("accelerate's default", {"parallel.compile.enabled": False}, note)
        yield Item("dynamo_backend", None, verdict)


def _distributed(given: Given) -> str:
    """distributed_type, of which YAML reads a bare `no` as false."""
    kind = given.get("distributed_type")
    return "NO" if kind is False else str(kind).upper()


def _fsdp_version(given: Given) -> int:
    """1 unless the file says 2, as in accelerate. A version that is neither is refused by its own rule."""
    return 2 if str(given.get("fsdp_version")) == "2" else 1


def _count(given: Given, key: str) -> int:
    """A number; 1 while it is missing or wrong, which its own rule refuses."""
    try:
        return as_int(given.get(key, 1))
    except ValueError:
        return 1


# How the run is started


def _distributed_type(value: Any, given: Given) -> Verdict:
    match _distributed(given):
        case "FSDP":
            return dropped("FSDP2 is what shards here")
        case "NO":
            return launched("one process", {"--nproc-per-node": "1"})
        case "MULTI_GPU" | "MULTI_CPU":
            why = "DistributedDataParallel: every process holds everything"
            return mapped(why, {"parallel.strategy": "ddp"})
    return refused(f"{value} is not supported: only {', '.join(TYPES)} are")


def _num_processes(value: Any, given: Given) -> Verdict:
    processes, machines = as_int(value), _count(given, "num_machines")
    if _distributed(given) == "NO":
        return dropped("distributed_type NO is one process")
    if processes % machines:
        return refused(f"it must be a multiple of num_machines={machines}")
    return launched("processes of each machine", {"--nproc-per-node": str(processes // machines)})


def _num_machines(value: Any, given: Given) -> Verdict:
    if as_int(value) == 1:
        return dropped("one machine is torchrun's default")
    meeting = {"--rdzv-backend": "c10d", "--rdzv-endpoint": _meeting_point(given)}
    return launched("the same, on every machine", {"--nnodes": str(as_int(value)), **meeting})


def _main_process(value: Any, given: Given) -> Verdict:
    if _count(given, "num_machines") == 1:
        return dropped("one machine needs no meeting point")
    return launched("where the machines meet", {"--rdzv-endpoint": _meeting_point(given)})


def _meeting_point(given: Given) -> str:
    """Address and port in one, as torchrun wants them. ValueError for what would be more than a word of the
    command line."""
    point = f"{given.get('main_process_ip') or 'HOST'}:{given.get('main_process_port') or DEFAULT_PORT}"
    if not re.fullmatch(r"[\w.:\[\]-]+", point, re.ASCII):
        raise ValueError("address and port must be such as 10.0.0.1 and 29500")
    return point


def _gpu_ids(value: Any, given: Given) -> Verdict:
    if str(value) == "all":
        return dropped("all GPUs are torchrun's default")
    if not re.fullmatch(r"[\w,.-]+", str(value), re.ASCII):
        raise ValueError("it must be all, or numbers with commas between, such as 0,1")
    return launched("which GPUs the processes see", {"CUDA_VISIBLE_DEVICES": str(value)})


def _environment(value: Any, given: Given) -> Verdict:
    why = "torchrun starts the run"
    return dropped(why) if value == "LOCAL_MACHINE" else refused(f"only LOCAL_MACHINE is supported: {why}")


def _use_cpu(value: Any, given: Given) -> Verdict:
    if as_bool(value):
        return mapped("train on the CPU", {"run.device": "cpu"})
    return dropped("a GPU is taken where every process has one")


def _accumulation(value: Any, given: Given) -> Verdict:
    steps = as_int(value)
    if steps == 1:
        return dropped("1 is the default")
    data_parallel = _count(given, "num_processes") // _count(given, "parallelism_config_tp_size")
    sequences = steps * data_parallel
    return mapped(
        f"{steps} micro batches on each of {data_parallel} data-parallel ranks",
        {"train.micro_batch_size": 1, "train.global_batch_size": sequences},
        "the batch size is not in the file, so a micro batch is 1 sequence here: for B, set "
        f"train.micro_batch_size to B and train.global_batch_size to B x {sequences}",
    )


# Precision and compilation


def _mixed_precision(value: Any, given: Given) -> Verdict:
    """accelerate's FSDP reduces in the dtype that it computes in; its DistributedDataParallel reduces float32
    gradients."""
    precision = as_choice(value, ("no", "fp16", "bf16", "fp8"))
    if precision in ("fp16", "fp8"):
        return refused(NO_FP16 if precision == "fp16" else "float8 is not in this version: use bf16")
    if precision == "bf16" and _distributed(given) == "FSDP":
        return mapped(
            "computation and reduction in bfloat16, weights kept in float32",
            {"parallel.param_dtype": "bfloat16", "parallel.reduce_dtype": "bfloat16"},
            "accelerate also reduces gradients in bfloat16 with FSDP; --parallel.reduce_dtype=float32 is the "
            "safer choice",
        )
    param = "bfloat16" if precision == "bf16" else "float32"
    settings = {"parallel.param_dtype": param, "parallel.reduce_dtype": "float32"}
    return mapped("computation; weights and reduction in float32", settings)


def _dynamo_backend(value: Any, given: Given) -> Verdict:
    backend = "no" if value is False else str(value).lower()
    if backend == "no":
        return mapped("nothing is compiled", {"parallel.compile.enabled": False})
    if backend not in BACKENDS:
        return refused(f"it is no backend for training here: use {', '.join(BACKENDS)} or no")
    settings, notes = {"parallel.compile.enabled": True, "parallel.compile.backend": backend}, []
    if str(given.get("mixed_precision", "no")).lower() in ("no", "false"):
        settings["parallel.compile.float32_matmul_precision"] = "high"
        notes.append("float32_matmul_precision is high: compiling in float32, accelerate allows TF32")
    return mapped("blocks and head are compiled", settings, *notes)


def _dynamo_mode(value: Any, given: Given) -> Verdict:
    mode = as_choice(value, MODES)
    note = f"{mode} may use CUDA graphs; max-autotune-no-cudagraphs is the mode without them"
    return mapped("the same", {"parallel.compile.mode": mode}, *([] if mode == "default" else [note]))


# What is sharded over what, and how


def _no_degree(name: str) -> Rule:
    """A rule for a degree that we do not have."""
    why = f"{name} is not in this version: set it to 1"
    return lambda value, given: dropped("1 is off") if as_int(value) == 1 else refused(why)


def _version(value: Any, given: Given) -> Verdict:
    if as_int(value) > 2:
        raise ValueError("it must be 1 or 2")
    return dropped("FSDP2 is what shards here; version 1's keys are read by their meaning in version 1")


def _sharding_strategy(value: Any, given: Given) -> Verdict:
    strategy, asked = as_numbered(value, [*STRATEGIES]), given.get(RESHARD)
    if _fsdp_version(given) == 1 or asked is None:
        return _sharded(strategy, given, DIFFERENCES.get((_fsdp_version(given), STRATEGY)))
    lost = (
        f": parameters are sharded over all processes, which is not {strategy}. To keep that, give "
        f"parallelism_config its sizes, or delete {RESHARD}"
    )
    return dropped(
        f"with fsdp_version 2 {RESHARD} decides, in accelerate too",
        f"{STRATEGY}={value} is ignored beside {RESHARD}"
        f"{'' if strategy in ('FULL_SHARD', 'SHARD_GRAD_OP') else lost}",
    )


def _reshard_after_forward(value: Any, given: Given) -> Verdict:
    """Version 2 takes a truth value. Version 1 takes a strategy's name, and prefers fsdp_sharding_strategy;
    its launcher even prefers that key's default, which is FULL_SHARD, so that a strategy given here alone is
    never done."""
    version, asked = _fsdp_version(given), given.get(STRATEGY)
    is_truth = str(value).lower() in {*TRUE, *FALSE} - {"1"}
    if is_truth and version == 2:
        return mapped("the same, per FSDP unit", {"parallel.reshard_after_forward": as_bool(value)})
    by_truth = {True: "FULL_SHARD", False: "SHARD_GRAD_OP"}
    strategy = by_truth[as_bool(value)] if is_truth else as_numbered(value, [*STRATEGIES])
    if version == 1 and asked is not None:
        return dropped(
            f"with fsdp_version 1 {STRATEGY} takes precedence, in accelerate too",
            f"warning: {STRATEGY}={asked} wins over {RESHARD}={value}, as in accelerate's fsdp_version 1: "
            "delete one of them",
        )
    as_accelerate = version == 1 and strategy == "FULL_SHARD"
    return _sharded(strategy, given, None if as_accelerate else DIFFERENCES[version, RESHARD])


def _sharded(strategy: str, given: Given, difference: str | None) -> Verdict:
    """A strategy in our keys. `difference`: what accelerate does instead, where it does not do as written.

    A hybrid strategy shards within each machine and replicates across them, so that on several machines the
    degrees are written out: they hold however the processes are spread later.
    """
    reshard, machines = STRATEGIES[strategy], _count(given, "num_machines")
    resharding = {} if reshard is None else {"parallel.reshard_after_forward": reshard}
    notes = [f"{difference}; here {strategy} is done as written"] if difference else []
    if any(key.startswith(PREFIXES["parallelism_config"]) for key in given):
        notes.append(f"parallelism_config decides the degrees; {strategy} decides resharding only")
        return mapped(f"{strategy} by our names", resharding, *notes)
    if strategy.startswith("HYBRID") and machines > 1:
        shard = _count(given, "num_processes") // machines
        settings = {"parallel.dp_replicate": machines, "parallel.dp_shard": shard, **resharding}
        return mapped(f"{strategy} by our names", settings, *notes)
    if strategy.startswith("HYBRID"):
        notes.append(ONE_MACHINE)
    return mapped(f"{strategy} by our names", {"parallel.strategy": strategy.lower()}, *notes)


def _wrap(value: Any, given: Given) -> Verdict:
    policy, notes = as_choice(value, WRAPS), []
    if policy == "SIZE_BASED_WRAP":
        least = as_int(given.get("fsdp_min_num_params", DEFAULT_MIN_PARAMS), 0)
        why = "blocks are joined into units of at least so many parameters"
        return mapped(why, {"parallel.unit_min_params": least})
    if policy == "NO_WRAP":
        notes.append(
            "NO_WRAP gathers the whole model at once; here every block is a unit of its own, which needs "
            "less memory and trains the same"
        )
    return mapped("a unit per transformer block", {"parallel.unit_min_params": 0}, *notes)


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


TORCHRUN, NO_TPU = "torchrun's business: ", refuses("TPUs are not supported")
AS_BLOCKS = drops("whatever it says, every block is compiled by itself and without graph breaks")
ONLY_CP = drops("it counts with cp_size or sp_size above 1 only")
TABLE: dict[str, Rule] = {
    "distributed_type": _distributed_type,
    "num_processes": _num_processes,
    "num_machines": _num_machines,
    "main_process_ip": _main_process,
    "main_process_port": _main_process,
    "machine_rank": drops(TORCHRUN + "with rendezvous c10d the machines number themselves"),
    "rdzv_backend": drops(TORCHRUN + "the launch line uses c10d"),
    "same_network": drops(TORCHRUN + "rendezvous c10d needs only an address that all reach"),
    "gpu_ids": _gpu_ids,
    "use_cpu": _use_cpu,
    "compute_environment": _environment,
    "main_training_function": drops("the program is train.main"),
    "debug": drops("shapes are checked when the plan is made"),
    "enable_cpu_affinity": drops(
        "processes are not pinned to cores; run.threads shares the cores among them"
    ),
    "gradient_accumulation_steps": _accumulation,
    "mixed_precision": _mixed_precision,
    "fp16": refuses(NO_FP16),  # what mixed_precision was called once
    "deepspeed_config": refuses(
        "DeepSpeed is not supported: ZeRO 2 is parallel.strategy shard_grad_op, ZeRO 3 full_shard"
    ),
    "megatron_lm_config": refuses("Megatron-LM is not supported: its tp_degree is parallel.tp here"),
    "fp8_config": refuses("float8 is not in this version: take it out and use mixed_precision: bf16"),
    "mpirun_config": refuses("mpirun does not start this trainer: torchrun does"),
    **{f"tpu_{name}": NO_TPU for name in ("name", "zone", "use_cluster", "use_sudo", "vm", "env")},
    **dict.fromkeys(("command_file", "commands", "downcast_bf16"), NO_TPU),
    "dynamo_backend": _dynamo_backend,
    "dynamo_config.dynamo_backend": _dynamo_backend,
    "dynamo_config.dynamo_mode": _dynamo_mode,
    "dynamo_config.dynamo_use_fullgraph": AS_BLOCKS,
    "dynamo_config.dynamo_use_regional_compilation": AS_BLOCKS,
    "dynamo_config.dynamo_use_dynamic": sets("parallel.compile.dynamic", as_bool, "the same"),
    "fsdp_config.fsdp_version": _version,
    f"fsdp_config.{STRATEGY}": _sharding_strategy,
    f"fsdp_config.{RESHARD}": _reshard_after_forward,
    "fsdp_config.fsdp_auto_wrap_policy": _wrap,
    "fsdp_config.fsdp_min_num_params": _min_params,
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": _block_class,
    "fsdp_config.fsdp_backward_prefetch": sets(
        "parallel.backward_prefetch",
        lambda value: int(as_numbered(value, PREFETCHES) == "BACKWARD_PRE"),
        "BACKWARD_PRE is one unit ahead; the nearest to BACKWARD_POST, which gathers between a unit's "
        "gradients and their reduction, is none; accelerate ignores the key with fsdp_version 2",
    ),
    "fsdp_config.fsdp_backward_prefetch_policy": drops(
        "accelerate's documentation spells it so, and accelerate ignores it, as is done here: the key is "
        "fsdp_backward_prefetch"
    ),
    "fsdp_config.fsdp_forward_prefetch": sets(
        "parallel.forward_prefetch",
        lambda value: int(as_bool(value)),
        "in units ahead; accelerate ignores it with fsdp_version 2",
    ),
    "fsdp_config.fsdp_activation_checkpointing": sets(
        "parallel.activation_checkpoint",
        lambda value: "full" if as_bool(value) else "none",
        "each block is recomputed in its backward",
    ),
    "fsdp_config.fsdp_activation_checkpointing_offload": refuses(
        "offloading activations is not in this version: set it to false"
    ),
    "fsdp_config.fsdp_offload_params": sets(
        "parallel.cpu_offload", as_bool, "shards, gradients and optimizer state in host memory"
    ),
    "fsdp_config.fsdp_ignored_modules": refuses(
        "every parameter is in a unit here: leave it out, or see train.freeze"
    ),
    "fsdp_config.fsdp_state_dict_type": drops(
        "checkpoints here are always sharded; tools.checkpoint consolidate makes one file"
    ),
    "fsdp_config.fsdp_sync_module_states": drops(
        "the results do not depend on it here: every rank computes the same weights from run.seed"
    ),
    "fsdp_config.fsdp_use_orig_params": drops("FSDP2 always keeps the original parameters"),
    "fsdp_config.fsdp_cpu_ram_efficient_loading": drops(
        "weights here are always read in shards; no rank holds the model"
    ),
    "fsdp_config.fsdp_limit_all_gathers": drops("FSDP2 limits all-gathers without a switch"),
    **{
        f"parallelism_config.parallelism_config_{axis}_size": sets(
            f"parallel.{axis}", as_int, "the degree of the same axis"
        )
        for axis in ("dp_replicate", "dp_shard", "tp")
    },
    "parallelism_config.parallelism_config_cp_size": _no_degree("context parallelism"),
    "parallelism_config.parallelism_config_sp_size": _no_degree("sequence parallelism by DeepSpeed"),
    **{
        f"parallelism_config.parallelism_config_{name}": ONLY_CP
        for name in (
            *("cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length"),
            *("sp_seq_length_is_variable", "sp_attn_implementation"),
        )
    },
}
