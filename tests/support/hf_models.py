"""Small random Llamas of transformers, in memory and in folders saved by transformers."""

from pathlib import Path
from typing import Any

import torch

MAX_SEQ_LEN = 96
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 20000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def make_hf(
    seed: int = 0,
    tied: bool = False,
    ratio: int = 2,
    rope: str = "default",
    head_dim: int = 8,
    **changes: Any,
) -> Any:
    """A Llama with 4 query heads, `ratio` per key-value head, and weights large enough to show
    differences."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{
            "hidden_size": 4 * head_dim,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4 // ratio,
            "intermediate_size": 56,
            "vocab_size": 263,
            "max_position_embeddings": MAX_SEQ_LEN,
            "rms_norm_eps": 1e-5,
            "rope_parameters": dict(ROPES[rope]),
            "tie_word_embeddings": tied,
            "bos_token_id": None,
            "eos_token_id": None,
            **changes,
        }
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.15 * noise)
    return model.eval()


def save_hf(folder: Path, model: Any, dtype: torch.dtype = torch.float32, shard_size: str = "5GB") -> Path:
    """Save a model with `save_pretrained`, in files of at most `shard_size`."""
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def make_tokens(vocab_size: int = 263, batch: int = 4, seq_len: int = 64) -> torch.Tensor:
    """Learnable token ids [batch, seq_len]: each is a function of the id before, with some noise."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab_size, (batch, seq_len), generator=generator)
    for position in range(1, seq_len):
        keep = torch.rand(batch, generator=generator) < 0.2
        tokens[:, position] = torch.where(
            keep, tokens[:, position], (tokens[:, position - 1] * 5 + 3) % vocab_size
        )
    return tokens
