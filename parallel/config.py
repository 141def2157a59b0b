"""What the user asks of the parallelisation; `plan.py` turns it into what is done."""

from dataclasses import dataclass, field
from typing import Literal

Auto = Literal["auto"]


@dataclass(frozen=True)
class CompileConfig:
    """How blocks are compiled, each in place and without graph breaks.

    Args:
        enabled: compile the transformer blocks and the output head
        backend: torch.compile backend, such as inductor or aot_eager
        mode: torch.compile mode, such as default or max-autotune-no-cudagraphs (backend inductor only)
    """

    enabled: bool = True
    backend: str = "inductor"
    mode: str = "default"


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is laid out over the processes. A key left at auto takes the default said here.

    Args:
        plan: manual (the keys below decide), or the path of a plan file, which then decides alone
        dp_replicate: degree of replication across groups of shards (HSDP); auto is 1
        dp_shard: degree of sharding (FSDP2); -1 or auto is all processes that the other degrees leave
        tp: degree of tensor parallelism; auto is 1, the only degree this version supports
        reshard_after_forward: free a block's gathered parameters after its forward and gather them again for its
            backward; an int reshards to groups of that many processes; auto is true
        forward_prefetch: how many units ahead a unit's forward starts the next all-gathers; auto is 1
        backward_prefetch: how many units ahead in backward; auto is 1
        activation_checkpoint: none keeps a block's activations, full recomputes each block in backward; auto is none
        param_dtype: dtype of gathered parameters and of computation: float32 or bfloat16
        reduce_dtype: dtype of gradient reduction: float32 or bfloat16
        compile: how blocks are compiled
    """

    plan: str = "manual"
    dp_replicate: Auto | int = "auto"
    dp_shard: Auto | int = "auto"
    tp: Auto | int = "auto"
    reshard_after_forward: Auto | bool | int = "auto"
    forward_prefetch: Auto | int = "auto"
    backward_prefetch: Auto | int = "auto"
    activation_checkpoint: Literal["auto", "none", "full"] = "auto"
    param_dtype: str = "float32"
    reduce_dtype: str = "float32"
    compile: CompileConfig = field(default_factory=CompileConfig)
