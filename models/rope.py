"""Rotary position embedding in real arithmetic.

Shapes: T positions, H head dim. The two halves of a head rotate together (the layout of the Hugging Face weights),
so channel i pairs with channel i + H/2.

Sources: RoFormer (arXiv 2104.09864); position interpolation (arXiv 2306.15595) for linear scaling; Llama 3.1's scaling is as
in Hugging Face's `_compute_llama3_parameters` and Meta's `apply_scaling`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROPE_KINDS = ("llama3", "linear")


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of rotary wavelengths, so that a longer context stays in the trained range.

    Args:
        kind: llama3 stretches the slow channels only, as Llama 3.1 does; linear stretches all alike
        factor: how many times longer the wavelengths become
        low_freq_factor: llama3 only: wavelengths above original_max_seq_len / low_freq_factor are stretched in full
        high_freq_factor: llama3 only: wavelengths below original_max_seq_len / high_freq_factor are left alone
        original_max_seq_len: llama3 only: context length of the first training stage, in tokens
    """

    kind: str = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


def check_scaling(scaling: RopeScaling) -> None:
    """ValueError that names the key of the config whose value cannot be used."""
    if scaling.kind not in ROPE_KINDS:
        raise ValueError(f"model.rope_scaling.kind={scaling.kind} must be {' or '.join(ROPE_KINDS)}")
    names = ("factor",) if scaling.kind == "linear" else ("factor", "low_freq_factor", "original_max_seq_len")
    for name in names:
        if not getattr(scaling, name) > 0:
            raise ValueError(f"model.rope_scaling.{name}={getattr(scaling, name)} must be greater than 0")
    if scaling.kind == "llama3" and not scaling.high_freq_factor > scaling.low_freq_factor:
        raise ValueError(f"model.rope_scaling.high_freq_factor={scaling.high_freq_factor} must be greater than "
                         f"low_freq_factor={scaling.low_freq_factor}")  # fmt: skip


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Angular frequency of each channel pair, in radians per position: float32 [H/2]."""
    frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    turns = scaling.original_max_seq_len * frequency / (2 * math.pi)  # full turns within the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)  # 1: fast channel, left alone; 0: slow channel, stretched in full
    return frequency * (keep + (1.0 - keep) / scaling.factor)


def rope_tables(head_dim: int, max_seq_len: int, theta: float, scaling: RopeScaling | None) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, each float32 [T, H] on the CPU, whatever the default device is."""
    positions = torch.arange(max_seq_len, dtype=torch.float32, device="cpu")
    angles_TH = torch.outer(positions, rope_frequencies(head_dim, theta, scaling)).repeat(1, 2)
    return angles_TH.cos(), angles_TH.sin()


def apply_rope(x_BTNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head of x[B, T, N, H] by its position's angles, in float32; the result has x's dtype.

    cos and sin are [T, H], or [B, T, H] where each sequence has positions of its own.
    """
    low, high = x_BTNH.float().chunk(2, dim=-1)
    rotated = torch.cat((-high, low), dim=-1)
    return (x_BTNH.float() * cos[..., None, :] + rotated * sin[..., None, :]).to(x_BTNH.dtype)
