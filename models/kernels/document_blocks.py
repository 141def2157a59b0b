"""Attention within documents for FlexAttention (arXiv 2412.05496): which blocks of scores it has to compute.

Shapes: B batch, T tokens, n = T/128 blocks of queries or keys, rounded up.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # tokens: torch's own default


def block_mask(first_BT: Tensor) -> BlockMask:
    """The mask of first[B, T], the place in its sequence where each token's document begins, which never
    falls within a row.

    `create_block_mask` would look at all T x T pairs; here the first and the last query of a block tell which
    blocks of keys any of its queries sees, and which all of them see whole: n x n pairs.
    """
    T = first_BT.shape[1]
    blocks = torch.arange(-(-T // BLOCK), device=first_BT.device)
    q, k = blocks[:, None], blocks[None, :]
    earliest_Bn = first_BT[:, blocks * BLOCK]
    latest_Bn = first_BT[:, (blocks * BLOCK + BLOCK - 1).clamp(max=T - 1)]
    seen_Bnn = (k <= q) & ((k + 1) * BLOCK > earliest_Bn[..., None])
    whole_Bnn = (k < q) & (k * BLOCK >= latest_Bn[..., None])

    def same_document(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first_BT[b, query])

    return BlockMask.from_kv_blocks(
        *_listed(seen_Bnn & ~whole_Bnn), *_listed(whole_Bnn), BLOCK, same_document, (T, T)
    )


def _listed(blocks_Bnn: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, int32 [B, 1, n], and which, these first, int32 [B,
    1, n, n]."""
    blocks = blocks_Bnn[:, None].int()
    return blocks.sum(-1, dtype=torch.int32), blocks.argsort(dim=-1, descending=True, stable=True).int()
