"""The Llama 3 model, and the data that `parallel/` needs to shard it.

Shapes: B batch, T tokens, D dim, N query heads, K key-value heads, H head dim, F ffn dim, V vocabulary.

Sources: The Llama 3 Herd of Models (arXiv 2407.21783) and the Hugging Face implementation, whose weight
layout (rotate-half RoPE) this follows. Blocks are pre-norm: x + attention(norm(x)), then x +
feed_forward(norm(x)).
"""

import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from meshwright.models.attention import (
    ATTENTION_OPS,
    FEWER_QUERIES,
    KERNELS,
    CausalAttention,
    Documents,
    document_mask,
)
from meshwright.models.config import LlamaConfig
from meshwright.models.head import Head
from meshwright.models.projections import Projection, project_as_one
from meshwright.models.rope import apply_rope, rope_frequencies, rope_tables

INIT_STD = 0.02  # normal initialization: GPT-2's report, and `initializer_range` of Hugging Face's Llama

# Tensor-parallel style of each weight: part of the model -> fqn pattern -> style.
# `parallel/tensor_parallel.py` implements the styles.
SHARDING: dict[str, dict[str, str]] = {
    "embedding": {"tok_embeddings": "vocab"},
    "attention": {
        "layers.*.attention_norm": "sequence",
        "layers.*.attention.wq": "colwise",
        "layers.*.attention.wk": "colwise",
        "layers.*.attention.wv": "colwise",
        "layers.*.attention.wo": "rowwise",
    },
    "feed_forward": {
        "layers.*.ffn_norm": "sequence",
        "layers.*.feed_forward.w1": "colwise",
        "layers.*.feed_forward.w3": "colwise",
        "layers.*.feed_forward.w2": "rowwise",
    },
    "head": {"head.norm": "sequence", "head.output": "logits", "head.loss": "loss"},
}
ATTENTION_CORES = ("layers.*.attention.inner",)  # context parallelism exchanges tokens around them


class Attention(nn.Module):
    """Grouped-query self-attention with RoPE: x[B, T, D] -> [B, T, D]. `fused`: compute queries, keys and
    values by one matrix product."""

    fused = False

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        kv_dim = config.n_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.wq = Projection(config.dim, config.dim, bias=False)
        self.wk = Projection(config.dim, kv_dim, bias=False)
        self.wv = Projection(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        self.inner = CausalAttention()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Documents = None) -> Tensor:
        projections = self.wq, self.wk, self.wv
        projected = project_as_one(x, projections) if self.fused else (w(x) for w in projections)
        q_BTNH, k_BTKH, v_BTKH = (
            rearrange(y, "B T (heads H) -> B T heads H", H=self.head_dim) for y in projected
        )
        # Autograd saves the values, but not the unrotated queries and keys: as a view of the fused output,
        # the values would keep all three in memory.
        q_BTNH, k_BTKH = apply_rope(q_BTNH, cos, sin), apply_rope(k_BTKH, cos, sin)
        v_BTKH = v_BTKH.contiguous()
        return self.wo(rearrange(self.inner(q_BTNH, k_BTKH, v_BTKH, documents), "B T N H -> B T (N H)"))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x), x[B, T, D] -> [B, T, F] -> [B, T, D]. `fused`: compute w1 and w3 by
    one matrix product."""

    fused = False

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = Projection(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = Projection(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project_as_one(x, (self.w1, self.w3)) if self.fused else (self.w1(x), self.w3(x))
        return self.w2(F.silu(gate) * up)


class Block(nn.Module):
    """One pre-norm transformer block, x[B, T, D] -> [B, T, D]."""

    draws_random_numbers = False

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Documents = None) -> Tensor:
        h = x + self.attention(self.attention_norm(x), cos, sin, documents)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    """tokens[B, T] -> logits[B, T, V]; with targets[B, T] -> the summed loss in nats, a float32 scalar,
    divided by `divisor` (a scalar on the device; None: 1).

    The caller passes the divisor instead of dividing the loss, because the chunked loss computes gradients
    in the forward: dividing them afterwards would read and write the head's entire weight gradient again.

    With first[B, T], the position in its sequence at which each token's document begins, attention does not
    cross documents, and positions count from the start of the document. With positions[t] the tokens and
    targets, [B, t], are those at these positions of longer sequences; first has all positions.

    Can be built on any device, including meta; call `initialise` before the first forward.
    """

    frequencies: Tensor
    logits_and_loss = ("head.output", "head.loss")

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.head = Head(config.dim, config.vocab_size, config.norm_eps)
        if config.tie_embeddings:
            self.head.output.weight = self.tok_embeddings.weight
        self.register_buffer("frequencies", torch.empty(config.head_dim // 2), persistent=False)

    def sharding(self) -> dict[str, Any]:
        """Return the description that planning reads (`parallel.plan.schema.ShardableModel`)."""
        blocks = [f"layers.{i}" for i in range(self.config.n_layers)]
        return {
            "modules": ["tok_embeddings", *blocks, "head"],
            "units": fsdp_units(self.config),
            "compiled": frozenset({*blocks, "head"}),
            "checkpointed": frozenset(blocks),
            "styles": SHARDING,
            "tp_divides": tp_divides(self.config),
            "shared_parts": frozenset({"embedding", "head"} if self.config.tie_embeddings else ()),
            "attention_ops": ATTENTION_OPS,
            "attention_kernels": tuple(KERNELS),
            "attention_cores": ATTENTION_CORES,
            "core_heads": {"model.n_kv_heads": self.config.n_kv_heads},
            "shifted_kernels": FEWER_QUERIES,
            "linears": block_linears(self.config),
        }

    def choose_kernels(self, attention: str, loss_chunk_tokens: int, fused_projections: bool) -> None:
        """Set the attention kernel of all blocks (one of `models.attention.KERNELS`), the loss's
        `chunk_tokens`, and whether projections of the same input are fused into one matrix product."""
        for block in self.layers:
            block.attention.inner.kernel = attention  # type: ignore[union-attr]
            block.attention.fused = block.feed_forward.fused = fused_projections  # type: ignore[union-attr]
        self.head.loss.chunk_tokens = loss_chunk_tokens

    def set_z_loss(self, z_loss: float) -> None:
        """Set the weight of the squared log-partition of the logits in the loss."""
        self.head.loss.z_loss = z_loss

    def forward_flops(self, seq_len: int) -> tuple[float, float]:
        """Return the operations of a forward per token: 2 N of products with weights, where N is their number
        (a tied output head counts, an embedding does not), and 2 L D S of attention for L layers, D channels
        and S tokens, half of the full square: scores above the diagonal are masked. With a backward of twice
        as many they are those of PaLM, appendix B: 6 N + 12 L D S in full."""
        weights = sum(module.weight.numel() for module in self.modules() if isinstance(module, nn.Linear))
        return 2.0 * weights, 2.0 * self.config.n_layers * self.config.dim * seq_len

    def table_bytes(self, tokens: int) -> int:
        """Return the bytes of models.rope's tables: cosines and sines of half of a head's channels."""
        return tokens * self.config.head_dim * torch.float32.itemsize

    @torch.no_grad()
    def initialise(self, seed: int, copy: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> None:
        """Initialize parameters and RoPE's frequencies in place, with the same values on any mesh.

        Normal with standard deviation 0.02; projections into the residual stream are scaled by 1/sqrt(2
        n_layers) (GPT-2); norms are one. Each parameter has its own generator, seeded by (seed, fqn), so its
        values depend neither on other parameters nor on sharding (they do depend on the device type).
        `copy(parameter, value)` copies a full tensor into a parameter, which may be a shard of it.
        """
        config = self.config
        if config.tie_embeddings:
            # `to_empty` has allocated a separate tensor for each
            self.head.output.weight = self.tok_embeddings.weight
        residual_std = INIT_STD / (2 * config.n_layers) ** 0.5
        for fqn, parameter in self.named_parameters():
            if parameter.dim() == 1:
                value = torch.ones(parameter.shape, device=parameter.device)
            else:
                is_residual = fqn.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
                of_parameter = zlib.crc32(f"{seed}:{fqn}".encode())
                generator = torch.Generator(parameter.device).manual_seed(of_parameter)
                value = torch.randn(parameter.shape, generator=generator, device=parameter.device)
                value = value * (residual_std if is_residual else INIT_STD)
            copy(parameter, value)
        self.frequencies.copy_(rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling))

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        first_BT: Tensor | None = None,
        divisor: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        x, documents = self.tok_embeddings(tokens_BT), None
        if positions is None:
            positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        if first_BT is not None:
            documents, positions = document_mask(first_BT), positions - first_BT[:, positions]
        cos, sin = rope_tables(positions, self.frequencies)
        for block in self.layers:
            x = block(x, cos, sin, documents)
        if targets_BT is not None and divisor is None:
            divisor = torch.ones((), device=x.device)  # not None, which would compile another graph
        return self.head(x, targets_BT, divisor)


def tp_divides(config: LlamaConfig) -> dict[str, dict[str, int]]:
    """Return sizes that the tensor-parallel degree must divide: part of the model -> config key -> size."""
    vocabulary = {"model.vocab_size": config.vocab_size}
    return {
        "embedding": vocabulary,
        "attention": {"model.n_heads": config.n_heads, "model.n_kv_heads": config.n_kv_heads},
        "feed_forward": {"model.ffn_dim": config.ffn_dim},
        "head": vocabulary,
    }


def block_linears(config: LlamaConfig) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of each linear layer of a block, by fqn pattern."""
    dim, kv_dim, ffn_dim = config.dim, config.n_kv_heads * config.head_dim, config.ffn_dim
    return {
        "layers.*.attention.wq": (dim, dim),
        "layers.*.attention.wk": (kv_dim, dim),
        "layers.*.attention.wv": (kv_dim, dim),
        "layers.*.attention.wo": (dim, dim),
        "layers.*.feed_forward.w1": (ffn_dim, dim),
        "layers.*.feed_forward.w2": (dim, ffn_dim),
        "layers.*.feed_forward.w3": (ffn_dim, dim),
    }


def fsdp_units(config: LlamaConfig) -> list[tuple[str, ...]]:
    """Return the modules of each FSDP unit, in the order in which the forward finishes them: embedding; each
    block; norm and output.

    Tied embeddings join the first and the last unit, because a parameter belongs to one unit only. The
    joined unit is gathered first and stays gathered until the end of the forward.
    """
    blocks: list[tuple[str, ...]] = [(f"layers.{i}",) for i in range(config.n_layers)]
    if config.tie_embeddings:
        return [*blocks, ("tok_embeddings", "head")]
    return [("tok_embeddings",), *blocks, ("head",)]
