"""Document masks for FlexAttention (arXiv 2412.05496), without the blocks of scores that are fully masked.

Shapes: B batch, T tokens, n = T/128 blocks of queries or keys, rounded up.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # tokens: torch's default


def block_mask(first_BT: Tensor) -> BlockMask:
    """Return the mask for first[B, T], the position in its sequence at which each token's document begins;
    first never decreases along a row.

    `create_block_mask` evaluates all T x T pairs. Here the first and the last query of a block determine
    which blocks of keys are visible to any of its queries, and which are fully visible to all: n x n pairs.
    """
    T = first_BT.shape[1]
    blocks = torch.arange(-(-T // BLOCK), device=first_BT.device)
    q, k = blocks[:, None], blocks[None, :]
    earliest_Bn = first_BT[:, blocks * BLOCK]
    latest_Bn = first_BT[:, (blocks * BLOCK + BLOCK - 1).clamp(max=T - 1)]
    visible_Bnn = (k <= q) & ((k + 1) * BLOCK > earliest_Bn[..., None])
    full_Bnn = (k < q) & (k * BLOCK >= latest_Bn[..., None])

    # 32-bit comparisons take 4 to 8% fewer instructions in the loops over partly masked blocks (H100, forward
    # and backward, counted).
    first_BT = first_BT.int()

    def same_document(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first_BT[b, query])

    return BlockMask.from_kv_blocks(
        *_listed(visible_Bnn & ~full_Bnn), *_listed(full_Bnn), BLOCK, same_document, (T, T)
    )


def _listed(blocks_Bnn: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks listed for each query block, int32 [B, 1, n], and the indices of all
    key blocks, the listed ones first, int32 [B, 1, n, n]."""
    blocks = blocks_Bnn[:, None].int()
    return blocks.sum(-1, dtype=torch.int32), blocks.argsort(dim=-1, descending=True, stable=True).int()
