"""The rule for every key of an accelerate config (`accelerate config`, versions 0.x to 1.15).

Source, accelerate 1.15.0: commands/config/config_args.py and cluster.py (the keys of a file),
commands/launch.py and to_fsdp2.py, utils/launch.py (how they become arguments, how processes are spread),
utils/dataclasses.py (FullyShardedDataParallelPlugin, DynamoBackend, TorchDynamoPlugin,
GradientAccumulationPlugin), utils/constants.py, utils/fsdp_utils.py, parallelism_config.py, accelerator.py
(no_sync), state.py (precision of FSDP, TF32). A file of `accelerate config` has no keys of gradient
accumulation: users add those of GradientAccumulationPlugin, or of transformers' accelerator_config.

Of two keys that contradict each other, the one that accelerate uses wins. Where accelerate's launcher
replaces a value of the file by a default, the file's value is used, with a note.
"""

import re
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
    as_numbered,
    dropped,
    drops,
    launched,
    mapped,
    refused,
    refuses,
    sets,
)

TYPES = ("FSDP", "MULTI_GPU", "MULTI_CPU", "NO")
# Section -> prefix of its keys, which a file may omit.
PREFIXES = {
    "fsdp_config": "fsdp_",
    "dynamo_config": "dynamo_",
    "parallelism_config": "parallelism_config_",
    "gradient_accumulation_kwargs": "",
}
# Numbered from 1 in accelerate. The value: whether the strategy reshards an FSDP unit after its forward.
STRATEGIES = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "NO_SHARD": None,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
}
STRATEGY, RESHARD = "fsdp_sharding_strategy", "fsdp_reshard_after_forward"
STEPS, REDUCE = "gradient_accumulation_steps", "parallel.reduce_gradients"
# What accelerate does if a strategy is given under a key of the other fsdp_version.
DIFFERENCES = {
    (1, RESHARD): "warning: accelerate launch 1.15 does FULL_SHARD for this file, because its own default of "
    f"{STRATEGY} takes precedence",
    (2, STRATEGY): f"accelerate 1.15 ignores {STRATEGY} with fsdp_version 2",
    (2, RESHARD): f"accelerate 1.15 accepts only true or false for {RESHARD} with fsdp_version 2",
}
ONE_MACHINE = (
    "HYBRID_SHARD on one machine has nothing to replicate, as in accelerate: it shards over all processes. "
    "On several machines, parallel.strategy replicates across them"
)
WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")  # numbered from 1
LLAMA_BLOCK = "LlamaDecoderLayer"  # transformers' class of one Llama block
DEFAULT_MIN_PARAMS = 100_000_000  # default of accelerate launch's --fsdp_min_num_params
DEFAULT_PORT = 29500  # accelerate's default
BACKENDS = ("inductor", "aot_eager", "eager")  # those that train without further packages
MODES = ("default", "reduce-overhead", "max-autotune")  # accelerate's TORCH_DYNAMO_MODES
NO_FP16 = (
    "float16 needs a gradient scaler, which this trainer lacks: use bf16, which has the range of float32"
)


def distributed(given: Given) -> str:
    """Return distributed_type. YAML reads a bare `no` as false."""
    kind = given.get("distributed_type")
    return "NO" if kind is False else str(kind).upper()


def _fsdp_version(given: Given) -> int:
    """Return 2 if the file sets it, else 1, as in accelerate. The key's own rule refuses other versions."""
    return 2 if str(given.get("fsdp_version")) == "2" else 1


def count(given: Given, key: str) -> int:
    """Return the integer under a key; 1 if it is missing or wrong, which the key's own rule refuses."""
    try:
        return as_int(given.get(key, 1))
    except ValueError:
        return 1


# How the run is started


def _distributed_type(value: Any, given: Given) -> Verdict:
    match distributed(given):
        case "FSDP":
            return dropped("this trainer always shards with FSDP2")
        case "NO":
            return launched("one process", {"--nproc-per-node": "1"})
        case "MULTI_GPU" | "MULTI_CPU":
            why = "DistributedDataParallel: every process holds the full model"
            return mapped(why, {"parallel.strategy": "ddp"})
    return refused(f"{value} is not supported: only {', '.join(TYPES)} are")


def _num_processes(value: Any, given: Given) -> Verdict:
    processes, machines = as_int(value), count(given, "num_machines")
    if distributed(given) == "NO":
        return dropped("distributed_type NO means one process")
    if processes % machines:
        return refused(f"it must be a multiple of num_machines={machines}")
    return launched("processes per machine", {"--nproc-per-node": str(processes // machines)})


def _num_machines(value: Any, given: Given) -> Verdict:
    if as_int(value) == 1:
        return dropped("one machine is torchrun's default")
    rendezvous = {"--rdzv-backend": "c10d", "--rdzv-endpoint": _rendezvous_endpoint(given)}
    return launched("the number of machines", {"--nnodes": str(as_int(value)), **rendezvous})


def _main_process(value: Any, given: Given) -> Verdict:
    if count(given, "num_machines") == 1:
        return dropped("one machine needs no rendezvous address")
    return launched("the rendezvous address", {"--rdzv-endpoint": _rendezvous_endpoint(given)})


def _rendezvous_endpoint(given: Given) -> str:
    """Return torchrun's `address:port`. Raises ValueError for characters that a shell would interpret."""
    endpoint = f"{given.get('main_process_ip') or 'HOST'}:{given.get('main_process_port') or DEFAULT_PORT}"
    if not re.fullmatch(r"[\w.:\[\]-]+", endpoint, re.ASCII):
        raise ValueError("it must be an address or a port, such as 10.0.0.1 and 29500")
    return endpoint


def _gpu_ids(value: Any, given: Given) -> Verdict:
    if str(value) == "all":
        return dropped("all GPUs are torchrun's default")
    if not re.fullmatch(r"[\w,.-]+", str(value), re.ASCII):
        raise ValueError("it must be all, or numbers separated by commas, such as 0,1")
    return launched("the GPUs that the processes see", {"CUDA_VISIBLE_DEVICES": str(value)})


def _environment(value: Any, given: Given) -> Verdict:
    why = "torchrun starts the run"
    return dropped(why) if value == "LOCAL_MACHINE" else refused(f"only LOCAL_MACHINE is supported: {why}")


def _use_cpu(value: Any, given: Given) -> Verdict:
    if as_bool(value):
        return mapped("train on the CPU", {"run.device": "cpu"})
    return dropped("GPUs are used if there is one for every process")


def _accumulation(value: Any, given: Given) -> Verdict:
    steps = as_int(value)
    if steps == 1:
        return dropped("1 is the default")
    inner = count(given, "parallelism_config_cp_size") * count(given, "parallelism_config_tp_size")
    data_parallel = count(given, "num_processes") // inner
    sequences = steps * data_parallel
    return mapped(
        f"{steps} micro batches on each of {data_parallel} data-parallel ranks",
        {"train.micro_batch_size": 1, "train.global_batch_size": sequences},
        "the file does not contain the batch size, so a micro batch is 1 sequence: for B, set "
        f"train.micro_batch_size to B and train.global_batch_size to B x {sequences}",
    )


def _sync_each_batch(value: Any, given: Given) -> Verdict:
    """Map sync_each_batch. DistributedDataParallel needs no setting: its gradients are all-reduced in the
    last micro batch only, with either value of our key."""
    each = as_bool(value)
    if distributed(given) == "NO":
        return dropped("one process has no gradients to reduce")
    if count(given, STEPS) == 1:
        return dropped(f"a step has one micro batch: {STEPS} is not above 1")
    if distributed(given) != "FSDP":
        return dropped("this trainer's DistributedDataParallel always all-reduces gradients once per step")
    if each:
        return mapped("each rank sums its shard of the gradients", {REDUCE: "every_micro_batch"})
    return mapped("each rank sums whole gradients", {REDUCE: "last_micro_batch"})


def cost_of_whole_gradients(given: Given) -> str:
    """Return the note on accelerate's default of sync_each_batch; its FSDP reduces in the computing dtype."""
    bf16 = str(given.get("mixed_precision")).lower() == "bf16"
    size = "bfloat16, 2 bytes" if bf16 else "float32, 4 bytes"
    return (
        "gradients are reduced in the last micro batch only, as accelerate does by default (with "
        f"fsdp_version 2 since 1.11): until then every rank sums whole gradients ({size} per parameter); "
        f"--{REDUCE}=every_micro_batch keeps shards only, and auto leaves the choice to --parallel.plan=auto"
    )


# Precision and compilation


def _mixed_precision(value: Any, given: Given) -> Verdict:
    """Map mixed_precision to our dtypes. accelerate's FSDP reduces gradients in the dtype of the computation,
    its DistributedDataParallel in float32."""
    precision = as_choice(value, ("no", "fp16", "bf16", "fp8"))
    if precision in ("fp16", "fp8"):
        return refused(NO_FP16 if precision == "fp16" else "float8 is not in this version: use bf16")
    if precision == "bf16" and distributed(given) == "FSDP":
        return mapped(
            "computation and reduction in bfloat16, weights kept in float32",
            {"parallel.param_dtype": "bfloat16", "parallel.reduce_dtype": "bfloat16"},
            "accelerate's FSDP reduces gradients in bfloat16; --parallel.reduce_dtype=float32 is safer",
        )
    param = "bfloat16" if precision == "bf16" else "float32"
    settings = {"parallel.param_dtype": param, "parallel.reduce_dtype": "float32"}
    return mapped("computation; weights and reduction in float32", settings)


def _dynamo_backend(value: Any, given: Given) -> Verdict:
    backend = "no" if value is False else str(value).lower()
    if backend == "no":
        return mapped("nothing is compiled", {"parallel.compile.enabled": False})
    if backend not in BACKENDS:
        return refused(f"the backend is not supported for training: use {', '.join(BACKENDS)} or no")
    settings, notes = {"parallel.compile.enabled": True, "parallel.compile.backend": backend}, []
    if str(given.get("mixed_precision", "no")).lower() in ("no", "false"):
        settings["parallel.compile.float32_matmul_precision"] = "high"
        notes.append(
            "float32_matmul_precision is high because accelerate allows TF32 in compiled float32 runs"
        )
    return mapped("blocks and head are compiled", settings, *notes)


def _dynamo_mode(value: Any, given: Given) -> Verdict:
    mode = as_choice(value, MODES)
    note = f"{mode} may use CUDA graphs; max-autotune-no-cudagraphs is the mode without them"
    return mapped("the same", {"parallel.compile.mode": mode}, *([] if mode == "default" else [note]))


# Sharding


def _no_degree(name: str) -> Rule:
    """Return the rule for a degree of an unsupported parallelism: only 1 is accepted."""
    why = f"{name} is not in this version: set it to 1"
    return lambda value, given: dropped("1 is off") if as_int(value) == 1 else refused(why)


def _version(value: Any, given: Given) -> Verdict:
    if as_int(value) > 2:
        raise ValueError("it must be 1 or 2")
    return dropped("this trainer always shards with FSDP2; keys of version 1 keep their meaning in version 1")


def _sharding_strategy(value: Any, given: Given) -> Verdict:
    strategy, requested = as_numbered(value, [*STRATEGIES]), given.get(RESHARD)
    if _fsdp_version(given) == 1 or requested is None:
        return _sharded(strategy, given, DIFFERENCES.get((_fsdp_version(given), STRATEGY)))
    lost = (
        f": parameters are sharded over all processes, which is not {strategy}. To keep {strategy}, set the "
        f"sizes in parallelism_config, or delete {RESHARD}"
    )
    return dropped(
        f"with fsdp_version 2 {RESHARD} takes precedence, as in accelerate",
        f"{STRATEGY}={value} is ignored because {RESHARD} is set"
        f"{'' if strategy in ('FULL_SHARD', 'SHARD_GRAD_OP') else lost}",
    )


def _reshard_after_forward(value: Any, given: Given) -> Verdict:
    """Map fsdp_reshard_after_forward: a truth value in version 2, a strategy's name in version 1.

    With version 1, accelerate prefers fsdp_sharding_strategy, and its launcher even prefers that key's
    default FULL_SHARD, so that accelerate never uses a strategy given only under this key.
    """
    version, requested = _fsdp_version(given), given.get(STRATEGY)
    is_truth = str(value).lower() in {*TRUE, *FALSE} - {"1"}
    if is_truth and version == 2:
        return mapped("the same, per FSDP unit", {"parallel.reshard_after_forward": as_bool(value)})
    by_truth = {True: "FULL_SHARD", False: "SHARD_GRAD_OP"}
    strategy = by_truth[as_bool(value)] if is_truth else as_numbered(value, [*STRATEGIES])
    if version == 1 and requested is not None:
        return dropped(
            f"with fsdp_version 1 {STRATEGY} takes precedence, as in accelerate",
            f"warning: {STRATEGY}={requested} takes precedence over {RESHARD}={value}, as in accelerate's "
            "fsdp_version 1: delete one of them",
        )
    as_accelerate = version == 1 and strategy == "FULL_SHARD"
    return _sharded(strategy, given, None if as_accelerate else DIFFERENCES[version, RESHARD])


def _sharded(strategy: str, given: Given, difference: str | None) -> Verdict:
    """Map a strategy to our keys. `difference`: what accelerate does instead of what the file requests.

    A hybrid strategy shards within each machine and replicates across machines. On several machines the
    degrees are written out, so that they do not depend on how processes are later spread over machines.
    """
    reshard, machines = STRATEGIES[strategy], count(given, "num_machines")
    resharding = {} if reshard is None else {"parallel.reshard_after_forward": reshard}
    notes = [f"{difference}; this trainer uses {strategy} as written"] if difference else []
    if any(key.startswith(PREFIXES["parallelism_config"]) for key in given):
        notes.append(f"parallelism_config sets the degrees; {strategy} sets resharding only")
        return mapped(f"{strategy} in our keys", resharding, *notes)
    if strategy.startswith("HYBRID") and machines > 1:
        shard = count(given, "num_processes") // machines
        settings = {"parallel.dp_replicate": machines, "parallel.dp_shard": shard, **resharding}
        return mapped(f"{strategy} in our keys", settings, *notes)
    if strategy.startswith("HYBRID"):
        notes.append(ONE_MACHINE)
    return mapped(f"{strategy} in our keys", {"parallel.strategy": strategy.lower()}, *notes)


def _wrap(value: Any, given: Given) -> Verdict:
    policy, notes = as_choice(value, WRAPS), []
    if policy == "SIZE_BASED_WRAP":
        least = as_int(given.get("fsdp_min_num_params", DEFAULT_MIN_PARAMS), 0)
        why = f"blocks are joined into units of at least {least} parameters"
        return mapped(why, {"parallel.unit_min_params": least})
    if policy == "NO_WRAP":
        notes.append(
            "NO_WRAP gathers the entire model at once; here every block is a separate FSDP unit, which needs "
            "less memory and gives the same training results"
        )
    return mapped("a unit per transformer block", {"parallel.unit_min_params": 0}, *notes)


def _min_params(value: Any, given: Given) -> Verdict:
    least = as_int(value, 0)
    if str(given.get("fsdp_auto_wrap_policy")).upper() == "SIZE_BASED_WRAP":
        return mapped("the minimum size of an FSDP unit", {"parallel.unit_min_params": least})
    return dropped("it applies only with fsdp_auto_wrap_policy SIZE_BASED_WRAP, as in accelerate")


def _block_class(value: Any, given: Given) -> Verdict:
    names = value if isinstance(value, list) else str(value).split(",")
    wrong = [str(name).strip() for name in names if str(name).strip() not in ("", LLAMA_BLOCK)]
    if wrong:
        return refused(
            f"{', '.join(wrong)} is not supported: the model is a Llama, its block is {LLAMA_BLOCK}"
        )
    return dropped(f"{LLAMA_BLOCK} is the model's block: every block is an FSDP unit by default")


TORCHRUN, NO_TPU = "torchrun handles it: ", refuses("TPUs are not supported")
AS_BLOCKS = drops("every block is always compiled separately and without graph breaks")
ONLY_SP = drops("it applies only with sp_size above 1")
TABLE: dict[str, Rule] = {
    "distributed_type": _distributed_type,
    "num_processes": _num_processes,
    "num_machines": _num_machines,
    "main_process_ip": _main_process,
    "main_process_port": _main_process,
    "machine_rank": drops(TORCHRUN + "rendezvous c10d numbers the machines"),
    "rdzv_backend": drops(TORCHRUN + "the launch line uses c10d"),
    "same_network": drops(TORCHRUN + "rendezvous c10d needs only an address that all machines reach"),
    "gpu_ids": _gpu_ids,
    "use_cpu": _use_cpu,
    "compute_environment": _environment,
    "main_training_function": drops("the program is train.main"),
    "debug": drops("shapes are checked when the plan is made, before the run"),
    "enable_cpu_affinity": drops(
        "processes are not pinned to cores; run.threads divides the cores among them"
    ),
    STEPS: _accumulation,
    "sync_each_batch": _sync_each_batch,
    "gradient_accumulation_kwargs.sync_each_batch": _sync_each_batch,
    "gradient_accumulation_kwargs.num_steps": refuses(f"set {STEPS} instead"),
    "mixed_precision": _mixed_precision,
    "fp16": refuses(NO_FP16),  # an old name of mixed_precision
    "deepspeed_config": refuses(
        "DeepSpeed is not supported: for ZeRO 2 use parallel.strategy shard_grad_op, for ZeRO 3 full_shard"
    ),
    "megatron_lm_config": refuses("Megatron-LM is not supported: for its tp_degree use parallel.tp"),
    "fp8_config": refuses("float8 is not in this version: remove it and use mixed_precision: bf16"),
    "mpirun_config": refuses("mpirun is not supported: start this trainer with torchrun"),
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
        "BACKWARD_PRE prefetches one unit ahead; BACKWARD_POST, which gathers between a unit's gradients and "
        "their reduction, becomes no prefetch; accelerate ignores the key with fsdp_version 2",
    ),
    "fsdp_config.fsdp_backward_prefetch_policy": drops(
        "accelerate ignores this spelling, which only its documentation uses: the key is "
        "fsdp_backward_prefetch"
    ),
    "fsdp_config.fsdp_forward_prefetch": sets(
        "parallel.forward_prefetch",
        lambda value: int(as_bool(value)),
        "the number of units to prefetch; accelerate ignores the key with fsdp_version 2",
    ),
    "fsdp_config.fsdp_activation_checkpointing": sets(
        "parallel.activation_checkpoint",
        lambda value: "full" if as_bool(value) else "none",
        "each block is recomputed in its backward",
    ),
    "fsdp_config.fsdp_activation_checkpointing_offload": refuses(
        "offloading of activations is not in this version: set it to false"
    ),
    "fsdp_config.fsdp_offload_params": sets(
        "parallel.cpu_offload", as_bool, "parameter shards, gradients and optimizer state in host memory"
    ),
    "fsdp_config.fsdp_ignored_modules": refuses(
        "every parameter belongs to an FSDP unit: remove the key, or see train.freeze"
    ),
    "fsdp_config.fsdp_state_dict_type": drops(
        "checkpoints are always sharded; tools.checkpoint consolidate makes one file"
    ),
    "fsdp_config.fsdp_sync_module_states": drops(
        "results do not depend on it: every rank computes the same weights from run.seed"
    ),
    "fsdp_config.fsdp_use_orig_params": drops("FSDP2 always keeps the original parameters"),
    "fsdp_config.fsdp_cpu_ram_efficient_loading": drops(
        "weights are always read in shards; no rank holds the full model"
    ),
    "fsdp_config.fsdp_limit_all_gathers": drops("FSDP2 always limits all-gathers"),
    **{
        f"parallelism_config.parallelism_config_{axis}_size": sets(
            f"parallel.{axis}", as_int, "the degree of the same axis"
        )
        for axis in ("dp_replicate", "dp_shard", "cp", "tp")
    },
    "parallelism_config.parallelism_config_sp_size": _no_degree("sequence parallelism by DeepSpeed"),
    **{
        f"parallelism_config.parallelism_config_{name}": drops(
            "the planner chooses what the ranks of cp exchange: parallel.cp_exchange"
        )
        for name in ("cp_backend", "cp_comm_strategy")
    },
    **{
        f"parallelism_config.parallelism_config_{name}": ONLY_SP
        for name in ("sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation")
    },
}
