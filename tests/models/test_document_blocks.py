"""Block masks for FlexAttention compared with torch's `create_block_mask`, and attention with them."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from meshwright.models.attention import block_mask


def random_first(B: int, T: int, documents: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    first = torch.zeros(B, T, dtype=torch.int64)
    if T == 1:
        return first
    for row in first:
        starts = torch.randint(1, T, (documents,), generator=generator)
        row[starts] = starts
    return first.cummax(1).values


@pytest.mark.parametrize("documents", [0, 1, 3, 40])
@pytest.mark.parametrize("T", [1, 100, 128, 129, 640, 1000])
def test_the_blocks_are_those_that_torch_finds_by_looking_at_all_pairs(T: int, documents: int) -> None:
    first = random_first(3, T, documents, T + documents)

    def same(b, h, q, k):
        return (k <= q) & (k >= first[b, q])

    ours, theirs = block_mask(first), create_block_mask(same, 3, None, T, T, device="cpu")
    assert ours.seq_lengths == theirs.seq_lengths == (T, T)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    if T % 128 == 0:  # for other lengths torch never counts the last block as full
        assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_with_them_is_plain_attention_with_the_mask_of_all_pairs() -> None:
    T, first = 300, random_first(2, 300, 5, 0)
    q, k, v = torch.randn(3, 2, 4, T, 8, generator=torch.Generator().manual_seed(1)).unbind()
    place = torch.arange(T)
    mask = (place <= place[:, None]) & (place >= first[..., None])
    expected = F.scaled_dot_product_attention(q, k, v, mask[:, None])
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=block_mask(first)), expected)
