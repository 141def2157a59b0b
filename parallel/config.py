"""The `parallel` section of the config; `plan/make.py` makes a plan from it."""

from dataclasses import dataclass, field
from typing import Literal

from meshwright.parallel.errors import PlanError
from meshwright.parallel.structure import Count, Integer, Natural, Share, convert_fields

Auto = Literal["auto"]
Dtype = Literal["float32", "bfloat16"]  # float16 would need a gradient scaler
Exchange = Literal["heads", "gather"]
Kind = Literal["matrix", "embedding", "head", "router", "vector", "other"]  # of a parameter: model/kinds.py
ReduceGradients = Literal["every_micro_batch", "last_micro_batch"]
ActivationCheckpoint = Literal["none", "full", "selective", "budget", "offload"]
Recipe = Literal["none", "tensorwise", "rowwise"]


@dataclass(frozen=True)
class CompileConfig:
    """Compilation of the transformer blocks, each in place and without graph breaks.

    Args:
        enabled: compile the transformer blocks and the output head
        backend: torch.compile backend, such as inductor or aot_eager
        mode: torch.compile mode, of backend inductor only: default, or max-autotune-no-cudagraphs, which
            benchmarks kernels for minutes (docs/speed.md: when that pays)
        dynamic: compile one graph for all sequence lengths and batch sizes; false compiles one for each; null
            is false in train.main, whose batches have one shape, and in a loop of your own torch's default:
            one for the first, and a second for all others
        on_recompile: reaction to a recompile after the first step: warn (rank 0 logs the guard that failed),
            error, or ignore; metrics count recompiles on all ranks
        float32_matmul_precision: precision of float32 matrix products: highest, high (TF32 on a GPU) or
            medium. train.main sets it; in a loop of your own call torch.set_float32_matmul_precision
        cache_dir: folder of the compile cache, which makes later starts faster; null is
            TORCHINDUCTOR_CACHE_DIR or ~/.cache/meshwright/compile
        fullgraph: refuse a block that cannot be compiled as one graph; false splits it where it breaks
    """

    enabled: bool = True
    backend: str = "inductor"
    mode: str = "default"
    dynamic: bool | None = None
    on_recompile: Literal["warn", "error", "ignore"] = "warn"
    float32_matmul_precision: Literal["highest", "high", "medium"] = "highest"
    cache_dir: str | None = None
    fullgraph: bool = True

    def __post_init__(self) -> None:
        convert_fields(self, "parallel.compile")


@dataclass(frozen=True)
class Float8Config:
    """Matrix products of the blocks in float8, by torchao (pip install -e '.[float8]'): twice the rate of
    bfloat16 on Hopper and newer GPUs, emulated on a CPU. Parameters, gradients and checkpoints do not change.

    Args:
        recipe: none; tensorwise, one scale per tensor; or rowwise, one scale per row, more exact and slower
        linears: linear layers of the blocks, as patterns of their names
        min_dim: linear layers with fewer inputs or outputs on a tp rank stay in param_dtype, which is faster
            for them
        all_gather: all-gather the weights of float8 products in float8, with half the bytes of bfloat16;
            tensorwise only
    """

    recipe: Recipe = "none"
    linears: tuple[str, ...] = ("layers.*",)
    min_dim: Count = 1024
    all_gather: bool = False

    def __post_init__(self) -> None:
        convert_fields(self, "parallel.float8")


TP_MODULES = ("embedding", "attention", "feed_forward", "head")  # parts of the Llama


@dataclass(frozen=True)
class ParallelConfig:
    """Layout of the model over the processes; auto: the default, or with plan=auto the planner's choice

    Args:
        plan: manual (the keys below decide), auto (the planner chooses what they leave open, for this
            machine), or the path of a plan file, which sets all of them
        strategy: preset for degrees and resharding: full_shard, shard_grad_op, no_shard (also called ddp),
            hybrid_shard or hybrid_shard_zero2; null leaves them to the keys below
        dp_replicate: degree of replication of shard groups (HSDP); auto is 1
        dp_shard: degree of sharding (FSDP2); -1 or auto is the number of processes divided by the other
            degrees
        cp: degree of context parallelism: the number of processes that hold the tokens of the same
            sequences, and shard the parameters with those of dp_shard; auto is 1
        cp_exchange: what they exchange around attention: heads (all-to-all: each gets all tokens of some
            heads) or gather (all-gather of keys and values: any degree); auto is heads if tp x cp divides the
            key-value heads, else gather
        tp: degree of tensor parallelism; auto is 1
        tp_modules: parts of the model that tensor parallelism splits; the others are unsharded on every tp
            rank
        sequence_parallel: shard the tokens over the tp ranks between the parts that tensor parallelism splits
        loss_parallel: compute the loss from logits that are sharded over the vocabulary; false gathers them
            first
        reshard_after_forward: free a block's gathered parameters after its forward and gather them again for
            its backward; an int reshards over groups of that many processes; auto is true
        reshard_after_backward: free a unit's gathered parameters after the backward of every micro batch;
            false keeps them until the last micro batch of a step; auto is true
        reduce_gradients: every_micro_batch reduces gradients into this rank's shard after each backward;
            last_micro_batch sums whole gradients on every rank, in reduce_dtype, and reduces them once per
            step; auto is every_micro_batch
        forward_prefetch: number of units whose all-gathers a unit's forward starts ahead; auto is 1
        backward_prefetch: number of units ahead in the backward; auto is 1
        activation_checkpoint: none saves a block's activations; full recomputes each block in its backward;
            selective recomputes activations that selective_policy does not save; budget lets the compiler
            choose within activation_budget; offload copies them to host memory, except for the last block,
            whose backward is first; auto is none
        activation_checkpoint_blocks: number of blocks, from the first, that activation_checkpoint applies to
            (units, if unit_min_params joins blocks); auto is all
        selective_policy: results that selective saves: matmul (every matrix product, attention and tp
            reduction), half_matmul (every second product), attention (no products), every:N (recomputes every
            N-th unit of blocks in full), or a comma-separated list of operators such as aten.mm,aten.silu;
            OP/2 saves every second call
        activation_budget: share of a block's activations that budget saves, from 0 (recompute all) to 1
        unit_min_params: join neighboring blocks into units of at least this many parameters; 0 is a unit per
            block
        storage_dtype: dtype of sharded parameters and their gradients: float32, or bfloat16, with
            stochastically rounded updates
        param_dtype: dtype of gathered parameters and of computation: float32 or bfloat16; auto is bfloat16 on
            a device that multiplies it faster
        reduce_dtype: dtype of gradient reduction: float32 or bfloat16
        cpu_offload: keep sharded parameters, gradients and optimizer state in host memory
        attention: attention kernel, without fallback: cudnn, flash, efficient, math, flex (document
            mask on a GPU), cpu (our own); auto is cpu on a CPU, and the fastest known on a GPU
        loss_chunk_tokens: tokens per chunk of logits; the head's gradients are computed chunk by chunk; 0
            computes all logits of a micro batch at the same time; auto is 2048 for longer micro batches
        fused_projections: one matrix product for wq, wk and wv, and one for w1 and w3; the weights stay
            separate
        async_tp: overlap tensor-parallel collectives with the matrix products next to them, in pieces
            (compiled, over NVLink)
        float8: matrix products in float8
        compile: compilation of the blocks
    """

    plan: str = "manual"
    strategy: str | None = None
    dp_replicate: Auto | Count = "auto"
    dp_shard: Auto | Integer = "auto"
    cp: Auto | Count = "auto"
    cp_exchange: Literal[Auto, Exchange] = "auto"
    tp: Auto | Count = "auto"
    tp_modules: tuple[str, ...] = TP_MODULES
    sequence_parallel: bool = True
    loss_parallel: bool = True
    reshard_after_forward: Auto | bool | Integer = "auto"
    reshard_after_backward: Auto | bool = "auto"
    reduce_gradients: Literal[Auto, ReduceGradients] = "auto"
    forward_prefetch: Auto | Natural = "auto"
    backward_prefetch: Auto | Natural = "auto"
    activation_checkpoint: Literal[Auto, ActivationCheckpoint] = "auto"
    activation_checkpoint_blocks: Auto | Natural = "auto"
    selective_policy: str = "matmul"
    activation_budget: Share = 0.5
    unit_min_params: Natural = 0
    storage_dtype: Dtype = "float32"
    param_dtype: Literal[Auto, Dtype] = "float32"
    reduce_dtype: Dtype = "float32"
    cpu_offload: bool = False
    attention: str = "auto"
    loss_chunk_tokens: Auto | Natural = "auto"
    fused_projections: bool = False
    async_tp: bool = False
    float8: Float8Config = field(default_factory=Float8Config)
    compile: CompileConfig = field(default_factory=CompileConfig)

    def __post_init__(self) -> None:
        convert_fields(self, "parallel")
        if self.dp_shard != "auto" and self.dp_shard != -1 and self.dp_shard < 1:
            rule = "auto, -1 (all that is left) or an integer of at least 1"
            raise PlanError(f"parallel.dp_shard={self.dp_shard} must be {rule}")
