"""What the user asks of the parallelisation; `plan/make.py` turns it into what is done."""

from dataclasses import dataclass, field
from typing import Literal

Auto = Literal["auto"]


@dataclass(frozen=True)
class CompileConfig:
    """How blocks are compiled, each in place and without graph breaks.

    Args:
        enabled: compile the transformer blocks and the output head
        backend: torch.compile backend, such as inductor or aot_eager
        mode: torch.compile mode, of backend inductor only: default, or max-autotune-no-cudagraphs, which
            tries kernels against one another for minutes (docs/speed.md says when that pays)
        dynamic: compile for any sequence length and batch at once; false makes a graph for each
        on_recompile: what a compilation after the first step does: warn (rank 0 says which guard
            failed), error, or ignore; metrics count them on all ranks
        float32_matmul_precision: of matrix products in float32: highest, high (TF32 on a GPU) or medium
        cache_dir: folder of compiled graphs, which make a second start warm; null is TORCHINDUCTOR_CACHE_DIR
            or ~/.cache/meshwright/compile
    """

    enabled: bool = True
    backend: str = "inductor"
    mode: str = "default"
    dynamic: bool = False
    on_recompile: Literal["warn", "error", "ignore"] = "warn"
    float32_matmul_precision: Literal["highest", "high", "medium"] = "highest"
    cache_dir: str | None = None


@dataclass(frozen=True)
class Float8Config:
    """Matrix products of the blocks in float8, by torchao (pip install -e '.[float8]'): on Hopper and newer
    GPUs at twice the rate of bfloat16, on a CPU emulated. Parameters, gradients and checkpoints stay as they
    are.

    Args:
        recipe: none; tensorwise, one scale for a tensor; or rowwise, one for each row, which is more exact
            and slower
        linears: which of the blocks' linears, as patterns of their names
        min_dim: linears with fewer inputs or outputs, on a tp rank, stay in param_dtype: they would lose more
            than win
        all_gather: send what is multiplied in float8 in it, half the bytes of bfloat16: weights, and the
            tokens that tensor parallelism gathers; tensorwise only
    """

    recipe: Literal["none", "tensorwise", "rowwise"] = "none"
    linears: tuple[str, ...] = ("layers.*",)
    min_dim: int = 1024
    all_gather: bool = False


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is laid out over the processes. auto: as said here; with plan=auto the planner chooses.

    Args:
        plan: manual (the keys below decide), auto (the planner chooses what they leave open, for this
            machine), or the path of a plan file, which then decides alone
        strategy: a name for degrees and resharding: full_shard, shard_grad_op, no_shard (also called ddp),
            hybrid_shard or hybrid_shard_zero2; null leaves them to the keys below
        dp_replicate: degree of replication across groups of shards (HSDP); auto is 1
        dp_shard: degree of sharding (FSDP2); -1 or auto is all processes that the other degrees leave
        tp: degree of tensor parallelism; auto is 1
        tp_modules: parts of the model that tensor parallelism splits; the others are whole on every tp rank
        sequence_parallel: between the parts split by tensor parallelism each rank holds its share of the
            tokens
        loss_parallel: the loss is computed from logits split over the vocabulary; false gathers them first
        reshard_after_forward: free a block's gathered parameters after its forward and gather them again for
            its backward; an int reshards to groups of that many processes; auto is true
        forward_prefetch: how many units ahead a unit's forward starts the next all-gathers; auto is 1
        backward_prefetch: how many units ahead in backward; auto is 1
        activation_checkpoint: none keeps a block's activations; full recomputes each block in its backward;
            selective recomputes what selective_policy does not keep; budget lets the compiler choose within
            activation_budget; offload keeps them in host memory, but for those of its last block, which are
            needed first; auto is none
        activation_checkpoint_blocks: how many blocks activation_checkpoint is for, the first ones (units of them,
            where unit_min_params joins some); auto is all
        selective_policy: what selective keeps: matmul (every matrix product, attention and tp reduction),
            half_matmul (every second product), attention (no products), every:N (recomputes every N-th unit
            of blocks in full), or a comma-separated list of operators such as aten.mm,aten.silu; OP/2 keeps
            every second call
        activation_budget: share of a block's activations that budget keeps, from 0 (recompute all) to 1
        unit_min_params: join neighbouring blocks into units of at least this many parameters; 0 is a unit per
            block
        storage_dtype: dtype in which parameters, and their gradients, are kept sharded: float32, or bfloat16,
            whose updates are rounded stochastically
        param_dtype: dtype of gathered parameters and of computation: float32 or bfloat16; auto is bfloat16
            where the device multiplies it faster
        reduce_dtype: dtype of gradient reduction: float32 or bfloat16
        cpu_offload: keep sharded parameters, gradients and optimizer state in host memory
        attention: kernel of attention, which runs or fails: cudnn, flash, efficient, math, flex (documents
            apart, on a GPU), cpu (ours); auto is cpu on a CPU, on a GPU the fastest known for it
        loss_chunk_tokens: tokens whose logits are there at a time: the head's gradients are made chunk by
            chunk; 0 makes the logits of a micro batch at once; auto is 2048 for longer micro batches
        fused_projections: one product for wq, wk and wv, and one for w1 and w3; the weights stay apart
        async_tp: run tensor-parallel collectives beside the products that need them, in pieces (compiled,
            over NVLink)
        float8: products in float8
        compile: how blocks are compiled
    """

    plan: str = "manual"
    strategy: str | None = None
    dp_replicate: Auto | int = "auto"
    dp_shard: Auto | int = "auto"
    tp: Auto | int = "auto"
    tp_modules: tuple[str, ...] = ("embedding", "attention", "feed_forward", "head")
    sequence_parallel: bool = True
    loss_parallel: bool = True
    reshard_after_forward: Auto | bool | int = "auto"
    forward_prefetch: Auto | int = "auto"
    backward_prefetch: Auto | int = "auto"
    activation_checkpoint: Literal["auto", "none", "full", "selective", "budget", "offload"] = "auto"
    activation_checkpoint_blocks: Auto | int = "auto"
    selective_policy: str = "matmul"
    activation_budget: float = 0.5
    unit_min_params: int = 0
    storage_dtype: str = "float32"
    param_dtype: str = "float32"
    reduce_dtype: str = "float32"
    cpu_offload: bool = False
    attention: str = "auto"
    loss_chunk_tokens: Auto | int = "auto"
    fused_projections: bool = False
    async_tp: bool = False
    float8: Float8Config = field(default_factory=Float8Config)
    compile: CompileConfig = field(default_factory=CompileConfig)
