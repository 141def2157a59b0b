"""The shape of a Llama, as a config, a checkpoint and the planner have it. Imports no torch."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

ROPE_KINDS = ("llama3", "linear")
OTHER_KINDS = "yarn: transformers' own, --model.factory=meshwright.models.from_transformers:causal_lm"


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of rotary wavelengths, so that a longer context stays in the trained range.

    Args:
        kind: llama3 stretches the slow channels only, as Llama 3.1 does; linear stretches all equally
        factor: how many times longer the wavelengths become
        low_freq_factor: llama3 only: wavelengths above original_max_seq_len / low_freq_factor are stretched
            in full
        high_freq_factor: llama3 only: wavelengths below original_max_seq_len / high_freq_factor are left
            unchanged
        original_max_seq_len: llama3 only: context length of the first training stage, in tokens
    """

    kind: str = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


def check_scaling(scaling: RopeScaling) -> None:
    """Raise ValueError, naming the config key, for a value out of range."""
    if scaling.kind not in ROPE_KINDS:
        raise ValueError(
            f"model.rope_scaling.kind={scaling.kind} must be {' or '.join(ROPE_KINDS)}; {OTHER_KINDS}"
        )
    names = ("factor",) if scaling.kind == "linear" else ("factor", "low_freq_factor", "original_max_seq_len")
    for name in names:
        if not getattr(scaling, name) > 0:
            raise ValueError(f"model.rope_scaling.{name}={getattr(scaling, name)} must be greater than 0")
    if scaling.kind == "llama3" and not scaling.high_freq_factor > scaling.low_freq_factor:
        raise ValueError(
            f"model.rope_scaling.high_freq_factor={scaling.high_freq_factor} must be greater than "
            f"low_freq_factor={scaling.low_freq_factor}"
        )


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of the model.

    Args:
        dim: width of the residual stream
        n_layers: number of transformer blocks
        n_heads: number of query heads; the head dim is dim / n_heads
        n_kv_heads: number of key-value heads, each shared by n_heads / n_kv_heads query heads
        ffn_dim: hidden width of the SwiGLU feed-forward
        vocab_size: number of token ids
        max_seq_len: longest sequence that the model is for, in tokens
        rope_theta: base of the rotary wavelengths
        rope_scaling: stretching of rotary wavelengths, or null; a mapping with the keys kind (llama3 or
            linear), factor (a ratio) and, for llama3, low_freq_factor, high_freq_factor (ratios) and
            original_max_seq_len (tokens)
        norm_eps: epsilon of every RMSNorm
        tie_embeddings: output head and token embedding share one weight
    """

    dim: int = 256
    n_layers: int = 4
    n_heads: int = 8
    n_kv_heads: int = 4
    ffn_dim: int = 768
    vocab_size: int = 264
    max_seq_len: int = 2048
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    # a Llama is built as every model is, by a factory
    factory: ClassVar[str] = "meshwright.models.llama:Llama"
    described: ClassVar[dict[str, Any]] = {}  # it describes itself
    init: ClassVar[Literal["auto"]] = "auto"

    def __post_init__(self) -> None:
        for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 1")
        positive = {"rope_theta": self.rope_theta, "norm_eps": self.norm_eps}
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(f"model.{name}={value} must be greater than 0")
        if self.rope_scaling:
            check_scaling(self.rope_scaling)
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"model.n_kv_heads={self.n_kv_heads} must divide model.n_heads={self.n_heads}")
        if self.dim % (2 * self.n_heads):
            raise ValueError(
                f"model.dim={self.dim} must be an even multiple of model.n_heads={self.n_heads}: "
                "RoPE rotates channels in pairs"
            )

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.dim // self.n_heads

    @property
    def args(self) -> dict[str, Any]:
        """The arguments of the factory."""
        return {"config": self}

    @property
    def of_one_block(self) -> "LlamaConfig":
        """The shape whose modules compute what those of all lengths do: all blocks are alike, position tables
        are arguments of them, and the other values are constants."""
        return replace(self, n_layers=1, max_seq_len=1, rope_theta=1.0, rope_scaling=None, norm_eps=1.0)
