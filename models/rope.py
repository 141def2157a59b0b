"""Rotary position embedding in real arithmetic.

Shapes: T positions, H head dim. The two halves of a head rotate together (the layout of the Hugging Face weights),
so channel i pairs with channel i + H/2.

Sources: RoFormer (arXiv 2104.09864); the frequency scaling is Llama 3.1's, as in Hugging Face's
`_compute_llama3_parameters` and Meta's `apply_scaling`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of low rotary frequencies, so that a longer context stays in the trained range.

    Args:
        factor: how many times longer the wavelengths of the slow channels become
        low_freq_factor: wavelengths above original_max_seq_len / low_freq_factor are stretched in full
        high_freq_factor: wavelengths below original_max_seq_len / high_freq_factor are left alone
        original_max_seq_len: context length of the first training stage, in tokens
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Angular frequency of each channel pair, in radians per position: float32 [H/2]."""
    frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    if scaling is None:
        return frequency
    turns = scaling.original_max_seq_len * frequency / (2 * math.pi)  # full turns within the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)  # 1: fast channel, left alone; 0: slow channel, stretched in full
    return frequency * (keep + (1.0 - keep) / scaling.factor)


def rope_tables(head_dim: int, max_seq_len: int, theta: float, scaling: RopeScaling | None) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, each float32 [T, H] on the CPU, whatever the default device is."""
    positions = torch.arange(max_seq_len, dtype=torch.float32, device="cpu")
    angles_TH = torch.outer(positions, rope_frequencies(head_dim, theta, scaling)).repeat(1, 2)
    return angles_TH.cos(), angles_TH.sin()


def apply_rope(x_BTNH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Rotate every head of x[B, T, N, H] by its position's angles, in float32; the result has x's dtype."""
    low, high = x_BTNH.float().chunk(2, dim=-1)
    rotated = torch.cat((-high, low), dim=-1)
    cos_T1H, sin_T1H = cos_TH[:, None, :], sin_TH[:, None, :]
    return (x_BTNH.float() * cos_T1H + rotated * sin_T1H).to(x_BTNH.dtype)
