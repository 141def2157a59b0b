"""Names that torchtitan had in other versions, sections that are not about the parallelisation, and its
defaults."""

from typing import Any

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
