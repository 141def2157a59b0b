"""Rotary position embedding in real arithmetic.

Shapes: B batch, T positions, N heads, H head dim. The two halves of a head rotate together (the layout of the
Hugging Face weights), so channel i pairs with channel i + H/2.

Sources: RoFormer (arXiv 2104.09864); position interpolation (arXiv 2306.15595) for linear scaling; Llama
3.1's scaling is as in Hugging Face's `_compute_llama3_parameters` and Meta's `apply_scaling`.
"""

import math

import torch
from torch import Tensor

from meshwright.models.config import RopeScaling


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return the angular frequency of each channel pair, in radians per position: float32 [H/2]."""
    frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    turns = scaling.original_max_seq_len * frequency / (2 * math.pi)  # full turns within the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)  # 1: fast channel, unchanged; 0: slow channel, stretched by `factor`
    return frequency * (keep + (1.0 - keep) / scaling.factor)


def rope_tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles of positions[T] or [B, T], each float32 [..., H/2]. The tables have
    the positions of one call only: one rank's tokens."""
    angles = positions.float()[..., None] * frequencies
    return angles.cos(), angles.sin()


def apply_rope(x_BTNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head of x[B, T, N, H] by its position's angles, in float32; the result has x's dtype.

    cos and sin are [T, H/2], or [B, T, H/2] if each sequence has its own positions.
    """
    low, high = x_BTNH.float().chunk(2, dim=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x_BTNH.dtype)
