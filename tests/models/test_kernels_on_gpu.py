"""The Triton cross entropy and the attention kernels on a GPU, compared with float64 references."""

import pytest
import torch
import torch.nn.functional as F

from meshwright.models.attention import KERNELS, CausalAttention
from meshwright.models.kernels.cross_entropy import read_rows, write_losses
from tests.models.test_loss import ROW_CASES, check_rows, make_rows, run_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.values]
LLAMA_3 = [(7, 128_256, torch.bfloat16), (3, 128_256, torch.float32)]  # rows of the full vocabulary
ON_GPU = [name for name, devices in KERNELS.items() if "cuda" in devices and name != "flex"]


@pytest.mark.parametrize("case", [*ROW_CASES, *LLAMA_3], ids=str)
def test_the_cross_entropy_reads_rows_and_writes_losses_and_gradient(
    case: tuple[int, int, torch.dtype],
) -> None:
    results = run_kernels(read_rows, write_losses, *(tensor.cuda() for tensor in make_rows(*case)))
    check_rows(case, *(tensor.cpu() for tensor in results))


def check_attention(kernel: str, tokens: tuple[int, int], heads: tuple[int, int], head_dim: int) -> None:
    """Compare output and gradients of a kernel with float64. `tokens`: with queries, the last ones, and with
    keys; `heads`: of queries, and of keys."""
    torch.manual_seed(0)
    (queries, keys), (of_queries, of_keys) = tokens, heads
    q, k, v = (
        torch.randn(2, *size, head_dim, device="cuda").bfloat16().requires_grad_()
        for size in ((queries, of_queries), (keys, of_keys), (keys, of_keys))
    )
    attention = CausalAttention()
    attention.kernel = kernel
    out = attention(q, k, v)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    seen = torch.ones(queries, keys, device="cuda", dtype=torch.bool).tril(keys - queries)
    transposed = (x.transpose(1, 2) for x in exact)
    reference = F.scaled_dot_product_attention(*transposed, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), grad)
    wanted = torch.autograd.grad(reference, exact, grad.double())
    for actual, expected in zip((out, *got), (reference, *wanted), strict=True):
        assert (actual.double() - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.parametrize("tokens", [(64, 256), (128, 896), (512, 4096)])
def test_flash_aligns_fewer_queries_than_keys_with_the_last_keys(tokens: tuple[int, int]) -> None:
    check_attention("flash", tokens, (32, 8), 128)


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("kernel", ON_GPU)
def test_attention_is_exact_with_every_kernel(kernel: str, kv_heads: int) -> None:
    check_attention(kernel, (256, 256), (8, kv_heads), 64)
