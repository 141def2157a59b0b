"""Other trainers of the same model on one GPU, each in a process of its own: plain PyTorch, and transformers
with accelerate.

Shapes: B sequences of a step, T tokens, V vocabulary.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from meshwright.parallel.memory_breakdown import GIB
from meshwright.tools.bench.gpu.cases import (
    ACCELERATE,
    PLAIN_PEERS,
    STEPS,
    STEPS_PER_REPORT,
    TORCHTITAN,
    GpuShape,
)
from meshwright.tools.bench.gpu.parts import draw_model
from meshwright.tools.bench.train_run import WARM_UP_STEPS, spread

NEEDED = {
    **dict.fromkeys(PLAIN_PEERS, ()),
    ACCELERATE: ("transformers", "accelerate"),
    TORCHTITAN: ("torchtitan",),
}
LR = 3e-4


def missing_packages(peer: str) -> Sequence[str]:
    """What a peer needs and this machine has not."""
    return [package for package in NEEDED[peer] if find_spec(package) is None]


def measure_peer(
    peer: str, shape: GpuShape, layers: int, checkpoint: str, device: torch.device
) -> dict[str, Any]:
    """Tokens per second and peak memory of a peer, one sequence a step."""
    build = build_accelerate if peer == ACCELERATE else build_plain
    step = build(shape, layers, checkpoint, device, compiled=peer != PLAIN_PEERS[0])
    return figures_of(time_steps(step, device), shape.seq_len, device)


def build_plain(
    shape: GpuShape, layers: int, checkpoint: str, device: torch.device, compiled: bool
) -> Callable[[], None]:
    """A step of our model without anything of ours around it: weights and fused AdamW in bfloat16, all logits
    at once."""
    model = draw_model(shape, layers, "bfloat16", device)
    if checkpoint == "full":
        for i, block in enumerate(model.layers):
            model.layers[i] = checkpoint_wrapper(block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())

    compute = torch.compile(loss_of, backend=shape.backend) if compiled else loss_of
    tokens, targets = draw_tokens(shape, device)

    def step() -> None:
        compute(tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def build_accelerate(
    shape: GpuShape, layers: int, checkpoint: str, device: torch.device, compiled: bool
) -> Callable[[], None]:
    """A step of transformers' Llama under accelerate's FSDP2 plugin: float32 weights, bfloat16 computation,
    blocks compiled."""
    from accelerate import Accelerator  # type: ignore[import-not-found]
    from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin  # type: ignore[import-not-found]
    from transformers import LlamaConfig, LlamaForCausalLM

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        activation_checkpointing=checkpoint == "full",
    )
    dynamo = TorchDynamoPlugin(backend=shape.backend, use_regional_compilation=True) if compiled else None
    accelerator = Accelerator(
        mixed_precision="bf16", fsdp_plugin=plugin, dynamo_plugin=dynamo, cpu=device.type == "cpu"
    )
    config = LlamaConfig(  # type: ignore[call-arg]
        hidden_size=shape.dim,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        use_cache=False,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.ffn_dim,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.seq_len,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens, _ = draw_tokens(shape, device)

    def step() -> None:
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def draw_tokens(shape: GpuShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """tokens[1, T] and targets[1, T]."""
    ids = torch.randint(0, shape.vocab_size, (1, shape.seq_len + 1), device=device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def time_steps(step: Callable[[], None], device: torch.device) -> list[float]:
    """Seconds of a step, in reports of STEPS_PER_REPORT, which wait for the device; the warm-up's left
    out."""
    times = []
    for _ in range(STEPS // STEPS_PER_REPORT):
        started_at = time.perf_counter()
        for _ in range(STEPS_PER_REPORT):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - started_at) / STEPS_PER_REPORT)
    return times[WARM_UP_STEPS // STEPS_PER_REPORT :]


def figures_of(step_times_s: Sequence[float], tokens: int, device: torch.device) -> dict[str, Any]:
    """Rates and memory, by the names that ours have; memory is what torch has allocated, null on a CPU."""
    rates = [tokens / s for s in step_times_s]
    peak_gib = torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None
    median = statistics.median(rates)
    return {
        "tokens_per_s_per_rank": median,
        "tokens_per_s_per_rank_best": max(rates),
        "spread": spread(rates, median),
        "peak_memory_gib": peak_gib,
        "step_times_s": list(step_times_s),
    }
