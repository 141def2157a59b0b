"""The plans whose steps run on the fake GPU: together they use every part of the CUDA code."""

from dataclasses import dataclass

LLAMA_8B = ("--config=llama_8b.yaml",)
WORLD = 8


@dataclass(frozen=True)
class Case:
    """A plan: config arguments, name prefixes of kernels that may spill registers, with the reason, and the
    number of GPUs, in nodes of eight."""

    arguments: tuple[str, ...]
    spills: tuple[tuple[str, str], ...] = ()
    world_size: int = WORLD


CASES = {
    "fsdp-8": Case((*LLAMA_8B, "--model.n_layers=2")),
    "hsdp-2x4-accumulation-full-recomputation": Case(
        (
            *LLAMA_8B,
            "--model.n_layers=2",
            "--parallel.dp_replicate=2",
            "--parallel.dp_shard=4",
            "--train.micro_batch_size=1",
            "--train.global_batch_size=16",
            "--parallel.activation_checkpoint=full",
        )
    ),
    # Three layers: the last layer's activations stay on the GPU, and one of the other two is fetched ahead.
    "tp-2-offload": Case(
        (*LLAMA_8B, "--model.n_layers=3", "--parallel.tp=2", "--parallel.activation_checkpoint=offload")
    ),
    "bfloat16-state-float8-documents": Case(
        (
            *LLAMA_8B,
            "--model.n_layers=2",
            "--parallel.storage_dtype=bfloat16",
            "--optim.state_dtype=bfloat16",
            "--parallel.float8.recipe=tensorwise",
            "--data.document_mask=true",
        ),
        spills=(
            (
                "triton_tem_fused_flex_attention_backward",
                "FlexAttention's backward in torch's default configuration for an H100: 255 registers x "
                "8 warps",
            ),
        ),
    ),
    "tp-8-without-sequence-parallelism": Case(
        (*LLAMA_8B, "--model.n_layers=2", "--parallel.tp=8", "--parallel.sequence_parallel=false")
    ),
    "hsdp-2-nodes": Case(
        (*LLAMA_8B, "--model.n_layers=2", "--parallel.dp_replicate=2", "--parallel.dp_shard=8"),
        world_size=16,
    ),
    "shard-grad-op": Case((*LLAMA_8B, "--model.n_layers=2", "--parallel.strategy=shard_grad_op")),
    "fsdp-8-32-layers": Case(LLAMA_8B),
}
