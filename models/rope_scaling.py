"""Settings of RoPE scaling for contexts longer than the trained one; `models/rope.py` applies them."""

from dataclasses import dataclass

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
