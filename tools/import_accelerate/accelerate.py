"""An accelerate config (`accelerate config`, versions 0.x to 1.15) as settings of ours, key by key.

Names and meanings read in accelerate 1.15.0: commands/config/config_args.py (the keys of a file),
commands/launch.py (how they become arguments), utils/launch.py (how the processes are spread); of
`mixed_precision` and `dynamo_config` state.py (precision of FSDP, TF32), utils/dataclasses.py (DynamoBackend,
TorchDynamoPlugin), utils/constants.py (TORCH_DYNAMO_MODES).
"""

import re
from collections.abc import Mapping
from typing import Any

from meshwright.tools.import_accelerate.accelerate_fsdp import (
    FSDP_RULES,
    PARALLELISM_RULES,
    axis_sizes,
    machine_count,
    process_count,
    size_mistakes,
)
from meshwright.tools.import_accelerate.rules import (
    Given,
    Item,
    Rule,
    Verdict,
    as_bool,
    as_choice,
    as_int,
    dropped,
    drops,
    judge,
    launched,
    mapped,
    refused,
    refuses_any,
    unknown_key,
)

BACKENDS = ("inductor", "aot_eager", "eager")
MODES = ("default", "reduce-overhead", "max-autotune")  # accelerate's TORCH_DYNAMO_MODES


def mixed_precision(value: Any, given: Given) -> Verdict:
    """accelerate's FSDP reduces in the dtype that it computes in; its DistributedDataParallel reduces float32
    gradients."""
    precision = as_choice(value, ("no", "fp16", "bf16", "fp8"))
    if precision == "fp16":
        return refused(
            "float16 needs a gradient scaler, which this trainer does not have: use bf16, which has "
            "float32's range"
        )
    if precision == "fp8":
        return refused("float8 is not in this version: use bf16")
    param = "bfloat16" if precision == "bf16" else "float32"
    if precision == "bf16" and str(given.get("distributed_type")).upper() == "FSDP":
        note = (
            "accelerate also reduces gradients in bfloat16 with FSDP; --parallel.reduce_dtype=float32 is "
            "the safer choice"
        )
        settings = {"parallel.param_dtype": param, "parallel.reduce_dtype": "bfloat16"}
        return mapped("computation and reduction in bfloat16, weights kept in float32", settings, note)
    settings = {"parallel.param_dtype": param, "parallel.reduce_dtype": "float32"}
    return mapped("computation; weights and reduction in float32", settings)


def old_fp16(value: Any, given: Given) -> Verdict:
    """What mixed_precision was called once."""
    return mixed_precision("fp16", given) if as_bool(value) else dropped("it is off")


def dynamo_backend(value: Any, given: Given) -> Verdict:
    """Of accelerate's backends, those that train here without further packages."""
    if value is False or str(value).lower() == "no":
        return mapped("nothing is compiled", {"parallel.compile.enabled": False})
    try:
        backend = as_choice(value, BACKENDS)
    except ValueError:
        return refused(f"it is no backend for training here: use {', '.join(BACKENDS)} or no")
    settings = {"parallel.compile.enabled": True, "parallel.compile.backend": backend}
    if str(given.get("mixed_precision", "no")).lower() in ("no", "false"):
        settings["parallel.compile.float32_matmul_precision"] = "high"
        return mapped(
            "blocks and head are compiled",
            settings,
            "accelerate allows TF32 when it compiles without mixed precision, so float32_matmul_precision is "
            "high",
        )
    return mapped("blocks and head are compiled", settings)


def _dynamo_mode(value: Any, given: Given) -> Verdict:
    mode = as_choice(value, MODES)
    backend = str(given.get("dynamo_backend", "no")).lower()
    if backend in ("no", "false"):
        return dropped("nothing is compiled")
    if mode != "default" and backend != "inductor":
        return refused(f"mode {mode} is for backend inductor, not {backend}: use default")
    notes = (
        [f"{mode} may use CUDA graphs; max-autotune-no-cudagraphs is the mode without them"]
        if mode != "default"
        else []
    )
    return mapped("the same", {"parallel.compile.mode": mode}, *notes)


def _dynamo_dynamic(value: Any, given: Given) -> Verdict:
    return mapped("the same", {"parallel.compile.dynamic": as_bool(value)})


def _whole_graph(value: Any, given: Given) -> Verdict:
    return dropped(
        "true is what is done" if as_bool(value) else "blocks are always compiled without graph breaks"
    )


def _regional(value: Any, given: Given) -> Verdict:
    return dropped(
        "true is what is done"
        if as_bool(value)
        else "blocks are always compiled one by one, never the whole model"
    )


DYNAMO_RULES: dict[str, Rule] = {
    "dynamo_backend": dynamo_backend,
    "dynamo_mode": _dynamo_mode,
    "dynamo_use_fullgraph": _whole_graph,
    "dynamo_use_dynamic": _dynamo_dynamic,
    "dynamo_use_regional_compilation": _regional,
}


PREFIXES = {
    "fsdp_config": "fsdp_",
    "dynamo_config": "dynamo_",
    "parallelism_config": "parallelism_config_",
    "fp8_config": "fp8_",
}
TYPES = ("FSDP", "MULTI_GPU", "MULTI_CPU", "NO")
OTHER_TYPES = (
    "DEEPSPEED",
    "MEGATRON_LM",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_XPU",
    "MULTI_HPU",
    "MULTI_NEURON",
    "XLA",
    "TPU",
)
NO_FP8 = "float8 is not in this version: take fp8_config out and use mixed_precision: bf16"


def judge_accelerate(config: Mapping[Any, Any]) -> list[Item]:
    """What becomes of every key of the file, and of what it leaves to accelerate's defaults."""
    entries, items = _flatten(config)
    given = {name: value for _, name, value in entries if value is not None}
    seen: dict[str, str] = {}
    for key, name, value in entries:
        if name in seen:
            items.append(Item(key, value, refused(f"it is the same key as {seen[name]}: delete one of them")))
            continue
        seen[name] = key
        items.append(judge(key, value, given, _rule(key, name, given)))
    return [*items, *_missing(given)]


def _flatten(config: Mapping[Any, Any]) -> tuple[list[tuple[str, str, Any]], list[Item]]:
    """(key as written, plain name, value) of every entry, and the items of sections that cannot be read.

    accelerate adds the prefix of a section where a key in it has none, and so does this.
    """
    entries: list[tuple[str, str, Any]] = []
    items = []
    for key, value in config.items():
        prefix = PREFIXES.get(str(key))
        if prefix is None:
            entries.append((str(key), str(key), value))
        elif isinstance(value, dict):
            for inner, leaf in value.items():
                entries.append((f"{key}.{inner}", _with_prefix(str(inner), prefix), leaf))
        elif value is not None:
            items.append(
                Item(str(key), value, refused("it is a section and needs a mapping of keys to values"))
            )
        if prefix and value in (None, {}):
            items.append(Item(str(key), value, dropped("the section is empty")))
    return entries, items


def _with_prefix(name: str, prefix: str) -> str:
    return name if name.startswith(prefix) else prefix + name


def _rule(key: str, name: str, given: Given) -> Rule:
    distributed = str(given.get("distributed_type")).upper()
    if name.startswith("fp8_"):
        return lambda value, given: refused(NO_FP8)
    rules = FSDP_RULES if key.startswith("fsdp_config.") else TOP_RULES
    if key.startswith("dynamo_config."):
        rules = DYNAMO_RULES
    elif key.startswith("parallelism_config."):
        rules = PARALLELISM_RULES
    if name not in rules:
        return lambda value, given: unknown_key(key, known_keys())
    if key.startswith("fsdp_config.") and distributed in TYPES[1:]:
        return drops(f"distributed_type {distributed} does not read fsdp_config, in accelerate too")
    return rules[name]


def known_keys() -> list[str]:
    """Every key, with its section."""
    sections = {
        "fsdp_config": FSDP_RULES,
        "parallelism_config": PARALLELISM_RULES,
        "dynamo_config": DYNAMO_RULES,
    }
    inner = [f"{section}.{name}" for section, rules in sections.items() for name in rules]
    return [*TOP_RULES, *PREFIXES, *inner]


def _missing(given: Given) -> list[Item]:
    """What must be there and is not; and accelerate's default where ours is another: it does not compile."""
    items = []
    if given.get("distributed_type") is None:
        items.append(
            Item("distributed_type", None, refused(f"the file must have it: one of {', '.join(TYPES)}"))
        )
    if given.get("num_processes") is None and not _is_single(given):
        items.append(
            Item(
                "num_processes",
                None,
                refused("the file must say how many processes there are, over all machines"),
            )
        )
    for mistake in size_mistakes(given):
        items.append(Item("parallelism_config", None, refused(mistake.removeprefix("parallelism_config: "))))
    if given.get("dynamo_backend") is None:
        note = (
            "nothing is compiled, as accelerate does by default; --parallel.compile.enabled=true "
            "compiles every block"
        )
        items.append(
            Item(
                "dynamo_backend",
                None,
                mapped("accelerate's default", {"parallel.compile.enabled": False}, note),
            )
        )
    return items


def _is_single(given: Given) -> bool:
    value = given.get("distributed_type")
    return value is False or str(value).upper() == "NO"


def _distributed_type(value: Any, given: Given) -> Verdict:
    kind = as_choice(value, (*TYPES, *OTHER_TYPES))
    if kind in OTHER_TYPES:
        return refused(f"{kind} is not supported: only {', '.join(TYPES)} are")
    if kind in ("MULTI_GPU", "MULTI_CPU"):
        return mapped("DistributedDataParallel: every process holds everything", {"parallel.strategy": "ddp"})
    if kind == "NO":
        return launched("one process", {"--nproc-per-node": "1"})
    return dropped("FSDP2 is what shards here")


def _num_processes(value: Any, given: Given) -> Verdict:
    processes, machines = as_int(value), machine_count(given)
    if _is_single(given):
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
    if machine_count(given) == 1:
        return dropped("one machine needs no meeting point")
    return launched("where the machines meet", {"--rdzv-endpoint": _meeting_point(given)})


def _meeting_point(given: Given) -> str:
    """Address and port in one, as torchrun wants them; a port that is left out is accelerate's own default.
    ValueError for what would be more than a word of the command line."""
    point = f"{given.get('main_process_ip') or 'HOST'}:{given.get('main_process_port') or 29500}"
    if not re.fullmatch(r"[\w.:\[\]-]+", point, re.ASCII):
        raise ValueError("address and port must be such as 10.0.0.1 and 29500")
    return point


def _gpu_ids(value: Any, given: Given) -> Verdict:
    if str(value) == "all":
        return dropped("all GPUs are torchrun's default")
    if not re.fullmatch(r"[\w,.-]+", str(value), re.ASCII):
        raise ValueError("it must be all, or numbers with commas between, such as 0,1")
    return launched("which GPUs the processes see", {"CUDA_VISIBLE_DEVICES": str(value)})


def _accumulation(value: Any, given: Given) -> Verdict:
    steps = as_int(value)
    if steps == 1:
        return dropped("1 is the default")
    data_parallel = process_count(given) // axis_sizes(given).get("tp", 1)
    settings = {"train.micro_batch_size": 1, "train.global_batch_size": steps * data_parallel}
    return mapped(
        f"{steps} micro batches on each of {data_parallel} data-parallel ranks",
        settings,
        "the batch size is not in the file, so a micro batch is 1 sequence here: for B, set "
        f"train.micro_batch_size to B and train.global_batch_size to B x {steps * data_parallel}",
    )


def _environment(value: Any, given: Given) -> Verdict:
    if str(value) != "LOCAL_MACHINE":
        return refused("only LOCAL_MACHINE is supported: torchrun starts the run")
    return dropped("torchrun starts the run")


def _use_cpu(value: Any, given: Given) -> Verdict:
    if as_bool(value):
        return mapped("train on the CPU", {"run.device": "cpu"})
    return dropped("a GPU is taken where every process has one")


TORCHRUN = "torchrun's business: "
TPU_KEYS = (
    "tpu_name",
    "tpu_zone",
    "tpu_use_cluster",
    "tpu_use_sudo",
    "command_file",
    "commands",
    "tpu_vm",
    "tpu_env",
)
TPU = "TPUs are not supported"
TOP_RULES: dict[str, Rule] = {
    "distributed_type": _distributed_type,
    "num_processes": _num_processes,
    "num_machines": _num_machines,
    "mixed_precision": mixed_precision,
    "fp16": old_fp16,
    "gradient_accumulation_steps": _accumulation,
    "dynamo_backend": dynamo_backend,
    "compute_environment": _environment,
    "use_cpu": _use_cpu,
    "gpu_ids": _gpu_ids,
    "main_process_ip": _main_process,
    "main_process_port": _main_process,
    "machine_rank": drops(TORCHRUN + "with rendezvous c10d the machines number themselves"),
    "rdzv_backend": drops(TORCHRUN + "the launch line uses c10d"),
    "same_network": drops(TORCHRUN + "rendezvous c10d needs only an address that all reach"),
    "main_training_function": drops("the program is train.main"),
    "debug": drops("shapes are checked when the plan is made"),
    "enable_cpu_affinity": drops(
        "processes are not pinned to cores; run.threads shares the cores among them"
    ),
    "downcast_bf16": refuses_any(TPU),
    "deepspeed_config": refuses_any(
        "DeepSpeed is not supported: ZeRO 2 is parallel.strategy shard_grad_op, ZeRO 3 full_shard"
    ),
    "megatron_lm_config": refuses_any("Megatron-LM is not supported: its tp_degree is parallel.tp here"),
    "mpirun_config": refuses_any("mpirun does not start this trainer: torchrun does"),
    **{name: refuses_any(TPU) for name in TPU_KEYS},
}
