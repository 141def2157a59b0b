"""Tiny models of ten families, each with the tensor-parallel styles that a user would write for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from benchmarks.zoo.case import VOCABULARY, ids
from benchmarks.zoo.published import ALTERNATING, EXPERTS, GPT2, GPT2_DROPOUT, causal

SEED = 0
Build = Callable[[], tuple[nn.Module, Any]]  # a model with values, and an example of its arguments
Styles = Callable[[], Mapping[str, ParallelStyle]]  # by module, as parallelize_module takes them


@dataclass(frozen=True)
class Model:
    """A model to shard.

    Args:
        styles: of tensor parallelism, as a user would write them by hand
    """

    build: Build
    styles: Styles


def own_llama() -> tuple[nn.Module, Any]:
    """Return meshwright's Llama with tied embeddings."""
    from meshwright.models.config import LlamaConfig
    from meshwright.models.llama import Llama

    sizes = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48}
    model = Llama(LlamaConfig(**sizes, vocab_size=VOCABULARY, tie_embeddings=True))  # type: ignore[arg-type]
    model.initialise(SEED)
    return model, (ids(SEED),)


def published(kind: str, **changes: Any) -> tuple[nn.Module, Any]:
    """Return transformers' causal language model of a kind."""
    return causal(kind, **changes), {"input_ids": ids(SEED)}


def only_vectors(build: Build) -> tuple[nn.Module, Any]:
    """Return a model of which all matrices are frozen."""
    model, example = build()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    return model, example


def gathered() -> ParallelStyle:
    """The style of a split product whose outputs every rank needs whole."""
    return ColwiseParallel(output_layouts=Replicate())


def split_inputs() -> ParallelStyle:
    """The style of a product that splits whole inputs itself."""
    return RowwiseParallel(input_layouts=Replicate())


def of_blocks(blocks: str, styles: Mapping[str, ParallelStyle | None]) -> dict[str, ParallelStyle]:
    return {f"{blocks}.*.{name}": style for name, style in styles.items() if style is not None}


def own_styles() -> dict[str, ParallelStyle]:
    return {
        "tok_embeddings": split_inputs(),
        "head.output": gathered(),
        **of_blocks("layers", {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}),
        **of_blocks("layers", {"attention.wo": RowwiseParallel(), "feed_forward.w2": RowwiseParallel()}),
        **of_blocks("layers", {f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")}),
    }


def own_sequence_styles() -> dict[str, ParallelStyle]:
    """The styles with which norms and sums get a part of the tokens, and the logits stay split."""
    split, whole = Shard(1), Replicate()
    others = (None, None, None)  # cosines, sines, documents
    feed_forward = PrepareModuleInput(input_layouts=split, desired_input_layouts=whole)
    attention = PrepareModuleInput(input_layouts=(split, *others), desired_input_layouts=(whole, *others))
    return {
        **own_styles(),
        "tok_embeddings": RowwiseParallel(input_layouts=whole, output_layouts=split),
        "head.norm": SequenceParallel(),
        "head.output": ColwiseParallel(input_layouts=split, use_local_output=False),
        **of_blocks("layers", {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}),
        **of_blocks("layers", {"attention": attention, "feed_forward": feed_forward}),
        **of_blocks("layers", {"attention.wo": RowwiseParallel(output_layouts=split)}),
        **of_blocks("layers", {"feed_forward.w2": RowwiseParallel(output_layouts=split)}),
    }


def llama_styles(**changes: ParallelStyle | None) -> dict[str, ParallelStyle]:
    """The styles of a model whose modules have the names of transformers' Llama. `changes`: of a block's
    modules, with a double underscore for the dot; None takes one out."""
    attention = {f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    feed_forward = {f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
    styles: dict[str, ParallelStyle | None] = {
        **attention,
        **feed_forward,
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
        **{name.replace("__", "."): style for name, style in changes.items()},
    }
    around = {"model.embed_tokens": split_inputs(), "lm_head": gathered()}
    return {**around, **of_blocks("model.layers", styles)}


def with_head_norms(dim: int, **changes: ParallelStyle | None) -> dict[str, ParallelStyle]:
    """`llama_styles` of a model with a norm of each head, of which a rank has a part along `dim`."""
    norm = SequenceParallel(sequence_dim=dim, use_local_output=True)
    norms = {"self_attn__q_norm": norm, "self_attn__k_norm": norm}
    return llama_styles(**norms, **changes)


def without_feed_forward() -> dict[str, ParallelStyle | None]:
    return dict.fromkeys(("mlp__gate_proj", "mlp__up_proj", "mlp__down_proj"))


def fused_feed_forward() -> dict[str, ParallelStyle | None]:
    fused = {"mlp__gate_up_proj": gathered(), "mlp__down_proj": split_inputs()}
    return {**without_feed_forward(), **fused}


def fused_attention() -> dict[str, ParallelStyle | None]:
    parts = dict.fromkeys(("self_attn__q_proj", "self_attn__k_proj", "self_attn__v_proj"))
    return {**parts, "self_attn__qkv_proj": gathered(), "self_attn__o_proj": split_inputs()}


def whole_attention() -> dict[str, ParallelStyle | None]:
    """Of a model with a norm of all heads together."""
    parts = {f"self_attn__{name}": gathered() for name in ("q_proj", "k_proj", "v_proj")}
    return {**parts, "self_attn__o_proj": split_inputs()}


def neox_styles() -> dict[str, ParallelStyle]:
    styles = {
        "attention.query_key_value": ColwiseParallel(),
        "attention.dense": RowwiseParallel(),
        "mlp.dense_h_to_4h": ColwiseParallel(),
        "mlp.dense_4h_to_h": RowwiseParallel(),
    }
    return {
        "gpt_neox.embed_in": split_inputs(),
        "lm_head": gathered(),
        **of_blocks("gpt_neox.layers", styles),
    }


def gpt2_styles() -> dict[str, ParallelStyle]:
    """Its products are of a class of its own: only embeddings and head are split."""
    return {"transformer.wte": split_inputs(), "lm_head": gathered()}


TIED = {"tie_word_embeddings": True}
MODELS: dict[str, Model] = {
    "own Llama": Model(own_llama, own_styles),
    "Llama": Model(partial(published, "Llama"), llama_styles),
    "Qwen3": Model(partial(published, "Qwen3", **TIED), partial(with_head_norms, 2)),
    "GPT-2": Model(partial(published, "GPT2", **GPT2, **GPT2_DROPOUT), gpt2_styles),
    "Gemma 3": Model(partial(published, "Gemma3Text", **ALTERNATING, **TIED), partial(with_head_norms, 1)),
    "Phi-3": Model(
        partial(published, "Phi3"), partial(llama_styles, **fused_attention(), **fused_feed_forward())
    ),
    "OLMo 2": Model(partial(published, "Olmo2"), partial(llama_styles, **whole_attention())),
    "GPT-NeoX": Model(partial(published, "GPTNeoX"), neox_styles),
    "GLM": Model(partial(published, "Glm"), partial(llama_styles, **fused_feed_forward())),
    "Qwen3-MoE": Model(
        partial(published, "Qwen3Moe", num_experts=4, decoder_sparse_step=1, **EXPERTS),
        partial(with_head_norms, 2, **without_feed_forward()),
    ),
}
