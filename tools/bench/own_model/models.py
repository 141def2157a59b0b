"""The models, tiny, with an example of their arguments, and the plans of the matrix."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, TOKENS, ROWS = 96, 12, 4
MADE = tuple[nn.Module, dict[str, Any]]


def ids(rows: int = ROWS) -> Tensor:
    return torch.randint(VOCABULARY, (rows, TOKENS), generator=torch.Generator().manual_seed(0))


def _transformers(kind: str, config_kind: str = "", **changes: Any) -> MADE:
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
    config = getattr(transformers, f"{config_kind or kind}Config")(**{**sizes, **changes})
    return getattr(transformers, f"{kind}ForCausalLM")(config), {"input_ids": ids()}


def hf_llama(**changes: Any) -> MADE:
    return _transformers("Llama", **changes)


def qwen3(**changes: Any) -> MADE:
    return _transformers("Qwen3", **changes)


def gemma(**changes: Any) -> MADE:
    model, example = _transformers("Gemma", **changes)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
    mask[1, 5:] = 0  # padding: a mask made outside of the blocks
    return model, example | {"attention_mask": mask}


def gemma3(**changes: Any) -> MADE:
    """Attention of two kinds in turn, and norms of queries and keys."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    sizes = {"num_hidden_layers": 4, "layer_types": kinds, "sliding_window": 4}
    return _transformers("Gemma3", "Gemma3Text", **{**sizes, **changes})


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
    "transformers' Qwen3": qwen3,
    "transformers' Gemma": gemma,
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


def plans_of(name: str, processes: int) -> dict[str, dict[str, Any]]:
    """Return the keys of the plans of a model on some processes, by their names."""
    return {
        plan: keys
        for plan, (count, keys) in PLANS.items()
        if count == processes and ("tp" not in keys or name.startswith("transformers'"))
    }
