"""Scaled dot-product attention, without the projections around it.

Shapes: B batch, T tokens, t tokens with a query, N query heads, K key-value heads, H head dim.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from meshwright.models.kernels.cpu_attention import causal_attention as cpu_causal_attention

# Operators that attention may run as; selective activation checkpointing keeps their results.
ATTENTION_OPS = (
    "meshwright.cpu_causal_attention",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "higher_order.flex_attention",
)

# Kernel -> the device types it runs on. "cpu" is our own; the others are torch's.
KERNELS = {
    "cpu": ("cpu",),
    "math": ("cpu", "cuda"),
    "flash": ("cpu", "cuda"),
    "efficient": ("cuda",),
    "cudnn": ("cuda",),
    "flex": ("cuda",),
}
DOCUMENT_MASK_KERNELS = ("cpu", "flex")  # kernels that can mask attention across documents
MASK_BLOCK = 128  # tokens in a block of flex attention's document mask: torch's default
# Kernel -> the kernel in its place that aligns fewer queries than keys with the last keys. cuDNN aligns them
# with the first, and torch refuses the lengths for its flash attention, but not for the operator below it.
FEWER_QUERIES = {"cpu": "cpu", "flash": "flash", "cudnn": "flash"}
# kernels that do not support float32 on a GPU (torch, sdp_utils.cpp: check_dtypes_low_precision)
HALF_PRECISION_KERNELS = ("flash", "cudnn")
_TORCH_KERNELS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}

# The document mask in the form that the device's kernel takes; None if every sequence is one document.
Documents = Tensor | BlockMask | None


def document_mask(first_BT: Tensor) -> Documents:
    """Return the document mask for first[B, T], the position in its sequence at which each token's document
    begins. All blocks share it."""
    return first_BT if first_BT.is_cpu else block_mask(first_BT)


class CausalAttention(nn.Module):
    """Causal softmax attention with scale 1/sqrt(H): q[B, t, N, H], k and v[B, T, K, H] -> [B, t, N, H]; K
    divides N. If t < T, which the kernels of FEWER_QUERIES support, the queries are those of the last tokens.

    `kernel`: one of KERNELS, without fallback: RuntimeError if it does not support the inputs. "" is our own
    kernel on a CPU and torch's choice on other devices. A separate module, so that a sharding plan or a
    profile can name it.
    """

    kernel = ""

    def forward(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, documents: Documents = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
        grouped = q.shape[1] != k.shape[1]
        fewer = q.shape[2] < k.shape[2]
        if isinstance(documents, BlockMask):
            return flex_attention(q, k, v, block_mask=documents, enable_gqa=grouped).transpose(1, 2)
        if fewer and not q.is_cpu:
            return attend_last(q, k, v).transpose(1, 2)
        if self.kernel in _TORCH_KERNELS and not fewer:
            return _attend(q, k, v, self.kernel).transpose(1, 2)
        if q.is_cpu:
            return cpu_causal_attention(q, k, v, documents)[0].transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def attend_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q[B, N, t, H], k and v[B, K, T, H] -> [B, N, t, H], by flash attention of the last t tokens. The
    operator takes only multiples of 8 as H, to which zeros pad."""
    dim = q.shape[-1]
    if dim % 8:
        q, k, v = (F.pad(x, (0, -dim % 8)) for x in (q, k, v))
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(q, k, v, 0.0, True, scale=dim**-0.5)[0][..., :dim]


def _attend(q: Tensor, k: Tensor, v: Tensor, kernel: str) -> Tensor:
    """q[B, N, T, H], k and v[B, K, T, H] -> [B, N, T, H], by one of torch's kernels, without fallback."""
    grouped = q.shape[1] != k.shape[1]
    if grouped and kernel == "efficient":  # it does not support grouped-query attention
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        grouped = False
    with sdpa_kernel(_TORCH_KERNELS[kernel]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def block_mask(first_BT: Tensor) -> BlockMask:
    """Return FlexAttention's document mask (arXiv 2412.05496) for first[B, T], as in `document_mask`, which
    never decreases along a row. n: T/128 blocks of queries or keys, rounded up.

    `create_block_mask` evaluates all T x T pairs. Here the first and the last query of a block determine
    which blocks of keys are visible to any of its queries, and which are fully visible to all: n x n pairs.
    """
    T = first_BT.shape[1]
    blocks = torch.arange(-(-T // MASK_BLOCK), device=first_BT.device)
    q, k = blocks[:, None], blocks[None, :]
    earliest_Bn = first_BT[:, blocks * MASK_BLOCK]
    latest_Bn = first_BT[:, (blocks * MASK_BLOCK + MASK_BLOCK - 1).clamp(max=T - 1)]
    visible_Bnn = (k <= q) & ((k + 1) * MASK_BLOCK > earliest_Bn[..., None])
    full_Bnn = (k < q) & (k * MASK_BLOCK >= latest_Bn[..., None])

    # 32-bit comparisons take 4 to 8% fewer instructions in the loops over partly masked blocks (H100, forward
    # and backward, counted).
    first_BT = first_BT.int()

    def same_document(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first_BT[b, query])

    return BlockMask.from_kv_blocks(
        *_listed(visible_Bnn & ~full_Bnn), *_listed(full_Bnn), MASK_BLOCK, same_document, (T, T)
    )


def _listed(blocks_Bnn: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks listed for each query block, int32 [B, 1, n], and the indices of all
    key blocks, the listed ones first, int32 [B, 1, n, n]."""
    blocks = blocks_Bnn[:, None].int()
    return blocks.sum(-1, dtype=torch.int32), blocks.argsort(dim=-1, descending=True, stable=True).int()
