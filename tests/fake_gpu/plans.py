"""The plans whose steps run on the fake GPU: together they use every part of the CUDA code."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A plan: config arguments, and the number of GPUs, in nodes of eight."""

    arguments: tuple[str, ...]
    world_size: int


def of_8b(keys: str = "", layers: int = 2, world_size: int = 8) -> Case:
    """Return a plan of Llama 8B's layers, with config keys without their dashes."""
    given = f"config=llama_8b.yaml model.n_layers={layers} {keys}".split()
    return Case(tuple(f"--{key}" for key in given), world_size)


CASES = {
    "fsdp-8": of_8b(),
    "one-gpu-bfloat16-state": of_8b(
        "parallel.storage_dtype=bfloat16 optim.state_dtype=bfloat16", world_size=1
    ),
    "hsdp-2x4-accumulation-full-recomputation": of_8b(
        "parallel.dp_replicate=2 parallel.dp_shard=4 parallel.activation_checkpoint=full "
        "train.micro_batch_size=1 train.global_batch_size=16"
    ),
    # the last layer's activations stay on the GPU, and one of the other two is fetched ahead
    "tp-2-offload": of_8b("parallel.tp=2 parallel.activation_checkpoint=offload", layers=3),
    "bfloat16-state-float8-documents": of_8b(
        "parallel.storage_dtype=bfloat16 optim.state_dtype=bfloat16 parallel.float8.recipe=tensorwise "
        "data.document_mask=true"
    ),
    "tp-8-without-sequence-parallelism": of_8b("parallel.tp=8 parallel.sequence_parallel=false"),
    "hsdp-2-nodes": of_8b("parallel.dp_replicate=2 parallel.dp_shard=8", world_size=16),
    "shard-grad-op": of_8b("parallel.strategy=shard_grad_op"),
    "fsdp-8-32-layers": of_8b(layers=32),
    "reduced-once-kept-gathered": of_8b(
        "train.micro_batch_size=1 train.global_batch_size=24 parallel.reduce_gradients=last_micro_batch "
        "parallel.reshard_after_backward=false"
    ),
}
