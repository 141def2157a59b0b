"""Inner attention, without weights: what happens between the projections.

Shapes: B batch, T tokens, N query heads, K key-value heads, H head dim.
"""

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from models.kernels.cpu_attention import causal_attention as cpu_causal_attention

# Operators that this may run as, for whoever decides what to keep for the backward.
ATTENTION_OPS = (
    "meshwright.cpu_causal_attention",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
)


class CausalAttention(nn.Module):
    """Causal softmax attention, q[B, T, N, H], k and v[B, T, K, H] -> [B, T, N, H]; K divides N.

    Scale 1/sqrt(H). On a CPU by a kernel of ours, elsewhere by torch's. A module of its own, so that a sharding or
    a profile can name it.
    """

    def forward(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
        if q.is_cpu:
            return cpu_causal_attention(q, k, v)[0].transpose(1, 2)
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)
