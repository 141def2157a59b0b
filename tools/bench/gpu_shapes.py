"""What `bench gpu` runs: Llama 8B's shape with fewer or all of its layers, and a tiny one that shows that the
suite works."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.models.llama import LlamaConfig

COMMON = (
    "--data.source=stdlib",
    "--checkpoint.every=0",
    "--train.eval_every=0",
    "--metrics.tensorboard=false",
    "--parallel.plan=manual",
    "--parallel.param_dtype=bfloat16",
)
STEPS_PER_REPORT = 2  # a report waits for the GPU
STEPS = 10  # 4 to warm up, then three reports of 2


@dataclass(frozen=True)
class GpuShape:
    """A model's width and its depths, from few layers to all; and how plain peers are compiled."""

    name: str
    dim: int
    heads: int
    kv_heads: int
    ffn_dim: int
    vocab_size: int
    seq_len: int
    layers: tuple[int, int, int, int]
    backend: str
    loss_chunk_tokens: int
    float8_min_dim: int
    budget_s: float

    def model(self, layers: int) -> LlamaConfig:
        """The model with so many layers."""
        return LlamaConfig(
            self.dim, layers, self.heads, self.kv_heads, self.ffn_dim, self.vocab_size, self.seq_len
        )


# Llama 3 8B (arXiv 2407.21783, table 3); chunks of 2,048 tokens keep the head's products at full speed.
LLAMA_8B = GpuShape("8b", 4096, 32, 8, 14336, 128256, 8192, (4, 8, 16, 32), "inductor", 2048, 1024, 1.0)
TINY = GpuShape("tiny", 32, 4, 2, 64, 264, 64, (1, 1, 1, 2), "aot_eager", 16, 16, 0.02)
SHAPES = {shape.name: shape for shape in (LLAMA_8B, TINY)}
TENSORWISE = "float8 tensorwise"
# What is switched on beside the rest of a run, by its name.
VARIANTS = {
    "": (),
    TENSORWISE: ("--parallel.float8.recipe=tensorwise",),
    "float8 rowwise": ("--parallel.float8.recipe=rowwise",),
    "joined projections": ("--parallel.fused_projections=true",),
    "half recomputed": ("--parallel.checkpointed_blocks={half}",),
}


@dataclass(frozen=True)
class EndToEnd:
    """A run of train.main: an optimizer step is `accumulation` x `micro_batch` sequences. `storage`: dtype of
    the parameters that are kept; `state`: of the optimizer's moments; `variant`: one of VARIANTS. Computation
    is in bfloat16."""

    layers: int
    accumulation: int
    micro_batch: int
    checkpoint: str
    storage: str
    state: str
    variant: str = ""

    @property
    def name(self) -> str:
        short = {"float32": "fp32", "bfloat16": "bf16"}
        batch = f"{self.accumulation} x {self.micro_batch}"
        more = f", {self.variant}" if self.variant else ""
        dtypes = f"weights {short[self.storage]}, moments {short[self.state]}"
        return f"{self.layers} layers, {batch}, {self.checkpoint}, {dtypes}{more}"

    def keys(self, shape: GpuShape) -> list[str]:
        """Config keys of train.main."""
        more = [key.format(half=max(1, self.layers // 2)) for key in VARIANTS[self.variant]]
        return [
            *COMMON,
            *model_keys(shape, self.layers),
            f"--train.micro_batch_size={self.micro_batch}",
            f"--train.global_batch_size={self.micro_batch * self.accumulation}",
            f"--parallel.activation_checkpoint={self.checkpoint}",
            f"--parallel.storage_dtype={self.storage}",
            f"--optim.state_dtype={self.state}",
            f"--parallel.compile.backend={shape.backend}",
            f"--parallel.float8.min_dim={shape.float8_min_dim}",
            *more,
            f"--train.steps={STEPS}",
        ]


def model_keys(shape: GpuShape, layers: int) -> Sequence[str]:
    """Config keys of the model and its sequences."""
    return (
        f"--model.dim={shape.dim}",
        f"--model.n_layers={layers}",
        f"--model.n_heads={shape.heads}",
        f"--model.n_kv_heads={shape.kv_heads}",
        f"--model.ffn_dim={shape.ffn_dim}",
        f"--model.vocab_size={shape.vocab_size}",
        f"--model.max_seq_len={shape.seq_len}",
        f"--train.seq_len={shape.seq_len}",
    )
