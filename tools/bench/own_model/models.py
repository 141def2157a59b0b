"""The models, tiny, with an example of their arguments, and the plans of the matrix."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, TOKENS, ROWS = 96, 12, 4
MADE = tuple[nn.Module, dict[str, Any]]


def ids(rows: int = ROWS) -> Tensor:
    return torch.randint(VOCABULARY, (rows, TOKENS), generator=torch.Generator().manual_seed(0))


def _transformers(kind: str, **changes: Any) -> MADE:
    import transformers

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **changes})
    made = transformers.AutoModelForCausalLM.from_config(config)
    return made, {"input_ids": ids()}


def hf_llama(**changes: Any) -> MADE:
    return _transformers("Llama", **changes)


def qwen3(**changes: Any) -> MADE:
    return _transformers("Qwen3", **changes)


def qwen2(**changes: Any) -> MADE:
    """Biases of queries, keys and values."""
    return _transformers("Qwen2", **changes)


def mistral(**changes: Any) -> MADE:
    """A window of attention."""
    return _transformers("Mistral", **{"sliding_window": 4, **changes})


def olmo2(**changes: Any) -> MADE:
    """Norms after the blocks, and of all heads' queries and keys together."""
    return _transformers("Olmo2", **changes)


def phi(**changes: Any) -> MADE:
    """Attention and feed-forward of one norm, in parallel, with biases; half of each head is rotated."""
    return _transformers("Phi", **{"partial_rotary_factor": 0.5, **changes})


def phi3(**changes: Any) -> MADE:
    """Queries, keys and values in one product."""
    return _transformers("Phi3", **changes)


def gpt2(**changes: Any) -> MADE:
    """Conv1D in place of nn.Linear, learned positions, a tied head, dropout."""
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
    return _transformers("GPT2", **{**sizes, **changes})


def vit(**changes: Any) -> MADE:
    """An encoder of images: a convolution, a class token, no ids."""
    import transformers

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "image_size": 16,
        "patch_size": 4,
        "num_labels": 5,
    }
    pixels = torch.randn(ROWS, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    config = transformers.ViTConfig(**{**sizes, **changes})
    return transformers.ViTForImageClassification(config), {"pixel_values": pixels}


def gemma(**changes: Any) -> MADE:
    model, example = _transformers("Gemma", **changes)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
    mask[1, 5:] = 0  # padding: a mask made outside of the blocks
    return model, example | {"attention_mask": mask}


ALTERNATING = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4,
}


def gemma2(**changes: Any) -> MADE:
    """Attention of two kinds in turn, four norms in a block, and soft caps."""
    return _transformers("Gemma2", **{**ALTERNATING, **changes})


def gemma3(**changes: Any) -> MADE:
    """Attention of two kinds in turn, and norms of queries and keys."""
    return _transformers("Gemma3Text", **{**ALTERNATING, **changes})


class Encoder(nn.Module):
    """nn.TransformerEncoder between an embedding and a head; post-norm, with biases and dropout."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embedding(input_ids)))
        return logits


def encoder() -> MADE:
    return Encoder(), {"input_ids": ids()}


def linears() -> MADE:
    stack = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Dropout(0.2)) for _ in range(4)))
    return stack, {"input": torch.randn(ROWS, 24, generator=torch.Generator().manual_seed(0))}


MODELS: dict[str, Callable[..., MADE]] = {
    "transformers' Llama": hf_llama,
    "transformers' Qwen2": qwen2,
    "transformers' Qwen3": qwen3,
    "transformers' Mistral": mistral,
    "transformers' OLMo 2": olmo2,
    "transformers' Phi": phi,
    "transformers' Phi 3": phi3,
    "transformers' GPT-2": gpt2,
    "transformers' ViT": vit,
    "transformers' Gemma": gemma,
    "transformers' Gemma 2": gemma2,
    "transformers' Gemma 3": gemma3,
    "torch's TransformerEncoder": encoder,
    "linears with dropout": linears,
}


def on_meta(make: Callable[..., MADE], **changes: Any) -> MADE:
    """The model without values."""
    with torch.device("meta"):
        model, _ = make(**changes)
    return model, make(**changes)[1]


# name -> processes and keys of ParallelConfig; tp only for models that publish how to split them
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {"activation_checkpoint": "none"}),
    "fsdp, full recomputation": (2, {"activation_checkpoint": "full"}),
    "fsdp, selective recomputation": (2, {"activation_checkpoint": "selective"}),
    "hsdp": (2, {"dp_replicate": 2, "activation_checkpoint": "full"}),
    "tp": (2, {"tp": 2, "activation_checkpoint": "full"}),
    "hsdp x tp": (4, {"dp_replicate": 2, "tp": 2, "activation_checkpoint": "full"}),
}


# models that do not publish how to split them
WITHOUT_STYLES = (
    "transformers' GPT-2",
    "transformers' ViT",
    "torch's TransformerEncoder",
    "linears with dropout",
)


def plans_of(name: str, processes: int) -> dict[str, dict[str, Any]]:
    """Return the keys of the plans of a model on some processes, by their names."""
    return {
        plan: keys
        for plan, (count, keys) in PLANS.items()
        if count == processes and ("tp" not in keys or name not in WITHOUT_STYLES)
    }
