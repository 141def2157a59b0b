"""Rules for torchtitan's keys, by their names as of 0.2.2; names that it had in other versions, sections that
are not about the parallelisation, and its defaults. Sources: see torchtitan.py."""

from typing import Any

from meshwright.tools.import_accelerate.rules import (
    Given,
    Rule,
    Verdict,
    as_bool,
    as_choice,
    as_float,
    as_int,
    dropped,
    drops,
    launched,
    mapped,
    refused,
    refuses_any,
)

# torchtitan's defaults, of 0.1.0 to 0.2.2, where ours are others.
DEFAULTS: dict[str, Any] = {
    "training.mixed_precision_param": "bfloat16",
    "training.local_batch_size": 8,
    "training.seq_len": 2048,
    "training.steps": 10000,
    "activation_checkpoint.mode": "selective",
    "compile.enable": False,
    "optimizer.lr": 8e-4,
    "lr_scheduler.warmup_steps": 200,
    "lr_scheduler.decay_type": "linear",
    "lr_scheduler.min_lr_factor": 0.0,
}
# Names of older versions, and of 0.1.0's sections.
ALIASES = {
    "training.compile": "compile.enable",
    "compile": "compile.enable",
    "activation_checkpoint": "activation_checkpoint.mode",
    "training.batch_size": "training.local_batch_size",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    **{
        f"{section}.{name}": f"parallelism.{name}"
        for section, names in {
            "training": (
                "data_parallel_replicate_degree",
                "data_parallel_shard_degree",
                "tensor_parallel_degree",
                "enable_loss_parallel",
                "disable_loss_parallel",
            ),
            "experimental": (
                "context_parallel_degree",
                "pipeline_parallel_degree",
                "enable_async_tensor_parallel",
                "enable_compiled_autograd",
            ),
        }.items()
        for name in names
    },
}
# Sections that say nothing about the parallelisation, and what here has their place.
SECTIONS = {
    "job": "run.dir names the run's folder",
    "profiling": "see the section profile",
    "profiler": "see the section profile",
    "metrics": "see the section metrics; TensorBoard is always written",
    "checkpoint": "checkpoints are of another format: see the section checkpoint",
    "comm": "process groups are set up by train.main",
    "memory_estimation": "tools.plan and tools.simulate predict memory",
    "fault_tolerance": "it is off",
    "validation": "see train.eval_every",
    "debug": "see the section run",
    "quantize": "it counts with model.converters only, and there are none",
    "float8": "it counts with model.converters only, and there are none",
    "mx": "it counts with model.converters only, and there are none",
}


AC_MODES = ("none", "full", "selective", "memory_budget")
# torchtitan's Llama 3.1 shapes, and our configs
FLAVORS = {"8B": "llama_8b", "70B": "llama_70b", "405B": "llama_405b"}
DTYPES = ("bfloat16", "float32")
DEFAULT_BETAS = (0.9, 0.95)


def _degree(axis: str) -> Rule:
    return lambda value, given: mapped("the degree of the same axis", {f"parallel.{axis}": as_int(value)})


def _shard_degree(value: Any, given: Given) -> Verdict:
    degree = -1 if str(value) == "-1" else as_int(value)
    return mapped("the same; -1 is all that the other degrees leave", {"parallel.dp_shard": degree})


def _no_degree(name: str) -> Rule:
    def rule(value: Any, given: Given) -> Verdict:
        return (
            dropped("1 is off")
            if as_int(value) == 1
            else refused(f"{name} is not in this version: set it to 1")
        )

    return rule


def _reshard(value: Any, given: Given) -> Verdict:
    policy = as_choice(value, ("default", "always", "never"))
    notes = (
        ["the last unit of the forward stays gathered, as the backward needs it first"]
        if policy == "always"
        else []
    )
    why = "default is always where there is no pipeline" if policy == "default" else "the same, per FSDP unit"
    return mapped(why, {"parallel.reshard_after_forward": policy != "never"}, *notes)


def _truth(key: str, why: str, turned: bool = False) -> Rule:
    """A rule for a truth value of ours; `turned`: theirs says the opposite."""
    return lambda value, given: mapped(why, {key: as_bool(value) != turned})


def _number(key: str, why: str = "the same") -> Rule:
    return lambda value, given: mapped(why, {key: as_float(value)})


def _count(key: str, why: str, least: int = 1) -> Rule:
    return lambda value, given: mapped(why, {key: as_int(value, least)})


def _global_batch(value: Any, given: Given) -> Verdict:
    size = -1 if str(value) == "-1" else as_int(value)
    return mapped(
        "sequences per optimizer step; -1 is one micro batch per rank", {"train.global_batch_size": size}
    )


def _seq_len(value: Any, given: Given) -> Verdict:
    length = as_int(value)
    return mapped(
        "tokens per sequence; position tables are as long",
        {"train.seq_len": length, "model.max_seq_len": length},
    )


def _dtype(key: str) -> Rule:
    def rule(value: Any, given: Given) -> Verdict:
        if value == "float16":
            return refused("float16 needs a gradient scaler, which this trainer does not have: use bfloat16")
        return mapped("the same", {key: as_choice(value, DTYPES)})

    return rule


def _training_dtype(value: Any, given: Given) -> Verdict:
    if as_choice(value, DTYPES) == "float32":
        return dropped("weights and optimizer state are float32 here")
    return refused(
        "weights and optimizer state are float32 here: use float32, and mixed_precision_param for the "
        "computation"
    )


def _ac_mode(value: Any, given: Given) -> Verdict:
    mode = as_choice(value, AC_MODES)
    settings: dict[str, Any] = {
        "parallel.activation_checkpoint": "budget" if mode == "memory_budget" else mode
    }
    if mode == "selective":
        settings["parallel.selective_policy"] = _policy(
            given.get("activation_checkpoint.selective_ac_option", 2)
        )
    if mode == "memory_budget":
        settings["parallel.activation_budget"] = as_float(
            given.get("activation_checkpoint.memory_budget", 0.5)
        )
    return mapped("activation checkpointing of each block", settings)


def _policy(option: Any) -> str:
    """torchtitan's `op` keeps every second matrix product; a number N recomputes every N-th block."""
    return "half_matmul" if option == "op" else f"every:{as_int(option)}"


def _ac_option(value: Any, given: Given) -> Verdict:
    if value != "op" and not str(value).isdecimal():
        raise ValueError("it must be op, or a number of blocks")
    if given.get("activation_checkpoint.mode", "selective") != "selective":
        return dropped("it counts with mode selective only")
    return mapped(
        "op is every second matrix product, a number every N-th block",
        {"parallel.selective_policy": _policy(value)},
    )


def _ac_budget(value: Any, given: Given) -> Verdict:
    if given.get("activation_checkpoint.mode", "selective") != "memory_budget":
        return dropped("it counts with mode memory_budget only")
    return mapped("the same share", {"parallel.activation_budget": as_float(value)})


def _components(given: Given) -> list[str]:
    value = given.get("compile.components", ["model", "loss"])
    return value if isinstance(value, list) else str(value).split(",")


def _compile(value: Any, given: Given) -> Verdict:
    enabled = as_bool(value) and "model" in _components(given)
    return mapped("blocks and head, with the loss", {"parallel.compile.enabled": enabled})


def _backend(value: Any, given: Given) -> Verdict:
    if not isinstance(value, str):
        raise ValueError("it must be the name of a torch.compile backend")
    return mapped("the same", {"parallel.compile.backend": value})


def _compile_components(value: Any, given: Given) -> Verdict:
    wrong = [part for part in _components(given) if part not in ("model", "loss")]
    if wrong:
        raise ValueError(f"{', '.join(map(str, wrong))} is not model or loss")
    if "model" not in _components(given):
        return dropped("without the model nothing is compiled here: the loss is part of the head")
    return dropped("blocks and head are compiled, the loss with the head")


def _flavor(value: Any, given: Given) -> Verdict:
    if str(value) in FLAVORS:
        return launched("the same shape", {"--config": FLAVORS[str(value)]})
    return dropped(
        "no config has this name",
        f"{value} is not one of the shapes in configs/: give it in the section model",
    )


def _registered(value: Any, given: Given) -> Verdict:
    """A config of torchtitan 0.3's registry, such as llama3_8b: its shape is the flavor at its end."""
    return _flavor(str(value).removeprefix("llama3_").upper(), given)


def _model_name(value: Any, given: Given) -> Verdict:
    return (
        dropped("a Llama is what is trained")
        if value == "llama3"
        else refused("only llama3 is the model here")
    )


def _betas(value: Any, given: Given) -> Verdict:
    betas = [
        as_float(given.get(f"optimizer.beta{i}", default)) for i, default in enumerate(DEFAULT_BETAS, start=1)
    ]
    return mapped("both in one key", {"optim.betas": betas})


def _optimizer(value: Any, given: Given) -> Verdict:
    return dropped("AdamW is what is used") if value == "AdamW" else refused("only AdamW is in this version")


def _decay_type(value: Any, given: Given) -> Verdict:
    shape, ratio = as_choice(value, ("linear", "sqrt", "cosine")), given.get("lr_scheduler.decay_ratio")
    if shape == "sqrt" or (shape == "cosine" and ratio is not None):
        return refused("use linear or cosine without decay_ratio, or linear with it: the schedules here")
    return mapped("the shape after warm-up", {"optim.schedule": shape if ratio is None else "wsd"})


def _decay_ratio(value: Any, given: Given) -> Verdict:
    return mapped("constant, then linear", {"optim.schedule": "wsd", "optim.decay_ratio": as_float(value)})


def _total_steps(value: Any, given: Given) -> Verdict:
    if value == given.get("training.steps", DEFAULTS["training.steps"]):
        return dropped("the schedule is as long as train.steps")
    return refused("the schedule here is always as long as train.steps: leave it out")


def _async_tp(value: Any, given: Given) -> Verdict:
    if not as_bool(value):
        return dropped("it is off")
    return dropped(
        "not in this version: the same results, with tp's communication not hidden behind its products",
        "asynchronous tensor parallelism is not in this version: steps with tp may be slower",
    )


NO_PP, NO_CP = drops("it counts with a pipeline only"), drops("it counts with context parallelism only")
NO_EXPERTS = drops("it counts for mixtures of experts only")
PIPELINE = (
    "split_points",
    "first_stage_less_layers",
    "last_stage_less_layers",
    "layers_per_stage",
    "schedule",
    "schedule_csv",
    "microbatch_size",
    "expert_parallel_overlap",
)
RULES: dict[str, Rule] = {
    "parallelism.data_parallel_replicate_degree": _degree("dp_replicate"),
    "parallelism.data_parallel_shard_degree": _shard_degree,
    "parallelism.tensor_parallel_degree": _degree("tp"),
    "parallelism.pipeline_parallel_degree": _no_degree("pipeline parallelism"),
    "parallelism.context_parallel_degree": _no_degree("context parallelism"),
    "parallelism.expert_parallel_degree": _no_degree("expert parallelism"),
    "parallelism.expert_tensor_parallel_degree": _no_degree("expert parallelism"),
    "parallelism.fsdp_reshard_after_forward": _reshard,
    "parallelism.enable_sequence_parallel": _truth("parallel.sequence_parallel", "the same"),
    "parallelism.disable_loss_parallel": _truth("parallel.loss_parallel", "the opposite", turned=True),
    "parallelism.enable_loss_parallel": _truth("parallel.loss_parallel", "the same"),
    "parallelism.enable_async_tensor_parallel": _async_tp,
    "parallelism.enable_compiled_autograd": drops(
        "compiled autograd is not used: blocks are compiled with their backward"
    ),
    "parallelism.enable_fsdp_symm_mem": drops("symmetric memory is not in this version: the same results"),
    "parallelism.spmd_backend": drops("torchtitan's own way to DTensor"),
    "parallelism.module_fqns_per_model_part": NO_PP,
    "parallelism.context_parallel_rotate_method": NO_CP,
    "parallelism.context_parallel_load_balancer": NO_CP,
    "parallelism.context_parallel_ptrr_mask_key": NO_CP,
    "parallelism.expert_parallel_comm_backend": NO_EXPERTS,
    **{f"parallelism.pipeline_parallel_{name}": NO_PP for name in PIPELINE},
    "training.local_batch_size": _count(
        "train.micro_batch_size", "sequences per rank in one forward and backward"
    ),
    "training.global_batch_size": _global_batch,
    "training.seq_len": _seq_len,
    "training.steps": _count("train.steps", "optimizer steps"),
    "training.max_norm": _number("train.grad_clip"),
    "training.seed": _count("run.seed", "the same number, which draws other weights here", least=0),
    "training.enable_cpu_offload": _truth("parallel.cpu_offload", "the same"),
    "training.mixed_precision_param": _dtype("parallel.param_dtype"),
    "training.mixed_precision_reduce": _dtype("parallel.reduce_dtype"),
    "training.dtype": _training_dtype,
    "training.deterministic": drops("the same order of data and the same weights come from run.seed"),
    **{
        f"training.{name}": drops("data.source and data.tokenizer say what is read")
        for name in ("dataset", "dataset_path")
    },
    **{
        f"training.{name}": drops("the loop here keeps its own house")
        for name in ("gc_freq", "gc_debug", "disable_cuda_graphs")
    },
    **{
        f"training.dataloader.{name}": drops("the loader here needs no such settings")
        for name in ("num_workers", "persistent_workers", "pin_memory", "prefetch_factor")
    },
    "activation_checkpoint.mode": _ac_mode,
    "activation_checkpoint.selective_ac_option": _ac_option,
    "activation_checkpoint.memory_budget": _ac_budget,
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": drops(
        "no shapes are excepted from the policy here"
    ),
    **{
        f"activation_checkpoint.{name}": drops(
            "the forward here draws no random numbers, and recomputing is what torch does"
        )
        for name in (
            "early_stop",
            "preserve_rng_state",
            "determinism_check",
            "debug",
            "visualize_memory_budget_pareto",
        )
    },
    "compile.enable": _compile,
    "compile.components": _compile_components,
    "compile.backend": _backend,
    "compile.enable_async_tensor_parallel": _async_tp,
    "model.name": _model_name,
    "model.flavor": _flavor,
    "module": _model_name,
    "config": _registered,
    "model.converters": refuses_any(
        "float8 and other converters are not in this version: leave the list empty"
    ),
    **{
        f"model.{name}": drops("data.tokenizer and checkpoint.init_from say what is read")
        for name in ("tokenizer_path", "hf_assets_path")
    },
    "model.print_after_conversion": drops("nothing is converted"),
    "optimizer.name": _optimizer,
    "optimizer.lr": _number("optim.lr"),
    "optimizer.beta1": _betas,
    "optimizer.beta2": _betas,
    "optimizer.eps": _number("optim.eps"),
    "optimizer.weight_decay": _number("optim.weight_decay", "the same, of matrices only"),
    "optimizer.implementation": drops("fused is what is used"),
    "optimizer.early_step_in_backward": refuses_any(
        "the optimizer steps after the backward here: set it to false"
    ),
    "lr_scheduler.warmup_steps": _count("optim.warmup_steps", "the same", least=0),
    "lr_scheduler.decay_type": _decay_type,
    "lr_scheduler.decay_ratio": _decay_ratio,
    "lr_scheduler.min_lr_factor": _number("optim.min_lr_ratio"),
    "lr_scheduler.total_steps": _total_steps,
    "debug.seed": _count("run.seed", "the same number, which draws other weights here", least=0),
    "fault_tolerance.enable": refuses_any("fault tolerance by torchft is not in this version"),
    "experimental.custom_import": refuses_any("code of other projects is not imported"),
    "experimental.custom_args_module": refuses_any("code of other projects is not imported"),
    "job.custom_config_module": refuses_any("code of other projects is not imported"),
}
