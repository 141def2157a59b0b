"""The CPU attention kernel compared with its reference, torch's plain attention."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.models.attention import attend_last
from meshwright.models.kernels.cpu_attention import BLOCK, causal_attention


def make_inputs(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> list[Tensor]:
    """q[B, N, T, H], k and v[B, K, T, H] as the model makes them: transposed views of [B, T, heads, H]."""
    batch, heads, kv_heads, seq_len, head_dim = shape
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, seq_len, n, head_dim, generator=generator)
        .to(dtype)
        .transpose(1, 2)
        .requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1, 8),
        (2, 4, 2, BLOCK - 1, 16),
        (2, 4, 1, BLOCK, 16),
        (1, 4, 4, BLOCK + 1, 16),
        (3, 6, 2, 3 * BLOCK + 5, 8),
        (9, 8, 4, 256, 24),  # more sequences than one batch of the backward has
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["float32", "bfloat16"]
)
def test_output_and_gradients_are_those_of_plain_attention(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, tolerance: float
) -> None:
    inputs = make_inputs(shape, dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out = causal_attention(*inputs)[0]
    reference = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    out.backward(grad)
    reference.backward(grad.double())
    for got, wanted in ((out, reference), *((x.grad, y.grad) for x, y in zip(inputs, exact, strict=True))):
        assert got.dtype == dtype
        assert (got - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize(
    ("queries", "shape"),
    [
        (1, (2, 4, 2, 70, 8)),
        (BLOCK, (2, 4, 2, 3 * BLOCK, 16)),
        (BLOCK + 3, (1, 6, 2, 3 * BLOCK + 5, 8)),
        (128, (9, 8, 4, 256, 24)),
    ],
    ids=str,
)
@pytest.mark.parametrize("with_documents", [False, True])
def test_fewer_queries_than_keys_are_those_of_the_last_tokens(
    queries: int, shape: tuple[int, int, int, int, int], with_documents: bool
) -> None:
    """Output and gradients are those of the rows of the whole sequence."""
    batch, seq_len = shape[0], shape[3]
    documents = None
    if with_documents:  # of 20 tokens, the last one shorter
        documents = (torch.arange(seq_len) // 20 * 20).expand(batch, -1).contiguous()
    some, whole = make_inputs(shape, torch.float32), make_inputs(shape, torch.float32)
    q = some[0].detach()[:, :, -queries:].requires_grad_()
    out = causal_attention(q, *some[1:], documents)[0]
    reference = causal_attention(*whole, documents)[0][:, :, -queries:]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(grad)
    reference.backward(grad)
    expected = (reference, whole[0].grad[:, :, -queries:], whole[1].grad, whole[2].grad)
    for got, wanted in zip((out, q.grad, some[1].grad, some[2].grad), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-6)


def test_it_is_an_operator_that_compile_and_autograd_can_trust() -> None:
    inputs = make_inputs((2, 4, 2, 70, 8), torch.float32)
    torch.library.opcheck(causal_attention, tuple(inputs))
    fewer = inputs[0].detach()[:, :, -30:].requires_grad_()
    torch.library.opcheck(causal_attention, (fewer, *inputs[1:]), test_utils="test_faketensor")


@pytest.mark.parametrize("head_dim", [8, 10])
def test_the_operator_for_the_last_tokens_gets_multiples_of_8(
    head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator is CUDA's: here torch's attention stands in for it."""
    sees = torch.ones(3, 5, dtype=torch.bool).tril(2)

    def flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, scale: float) -> tuple[Tensor]:
        assert [x.shape[-1] % 8 for x in (q, k, v)] == [0, 0, 0]
        return (F.scaled_dot_product_attention(q, k, v, sees, scale=scale, enable_gqa=True),)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", flash)
    q, k, v = torch.randn(2, 4, 3, head_dim), torch.randn(2, 2, 5, head_dim), torch.randn(2, 2, 5, head_dim)
    expected = F.scaled_dot_product_attention(q, k, v, sees, enable_gqa=True)
    torch.testing.assert_close(attend_last(q, k, v), expected)
