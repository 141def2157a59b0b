"""The chunked loss compared with float64, and the Triton kernels in Triton's interpreter."""

import multiprocessing

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models import chunked_loss
from meshwright.models.chunked_loss import linear_cross_entropy
from meshwright.models.head import Head
from meshwright.models.kernels.cross_entropy import plain_gradient, plain_rows, write_gradient
from meshwright.models.loss import IGNORE_INDEX, cross_entropy_sum
from meshwright.parallel.compile.stats import count_compiled_graphs

BLOCK = 4096  # of models.kernels.cross_entropy_triton
DIM, VOCABULARY = 32, 301
B, T = 3, 50
CHUNKS = [0, 64, 150, 1000]  # one chunk; a rest of 22 tokens; exactly all tokens; more than all tokens
# rows, logits per row, dtype: about one block, several blocks, one row
ROW_CASES = [
    (5, 17, torch.float32),
    (4, BLOCK, torch.float32),
    (3, BLOCK + 1, torch.bfloat16),
    (1, 2 * BLOCK + 7, torch.float32),
]


def make_rows(n: int, v: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return logits[n, v] with padding between rows, ids, of which the first two belong to another rank (with
    more than two rows), and the inputs of the gradient."""
    generator = torch.Generator().manual_seed(n * v)
    logits = (torch.randn(n, v + 3, generator=generator) * 5).to(dtype)[:, :v]
    ids = torch.randint(0, v, (n,), generator=generator)
    ids[: min(2, n - 1)] = torch.tensor([-7, v])[: min(2, n - 1)]
    log_sum = logits.float().logsumexp(1) + 0.5
    scale, weight = torch.rand(2, n, generator=generator)
    return logits, ids, log_sum, scale, weight


def exact_rows(logits: Tensor, ids: Tensor) -> Tensor:
    values = logits.double()
    largest = values.amax(1)
    is_local = (ids >= 0) & (ids < logits.shape[1])
    target = values.gather(1, ids.where(is_local, 0)[:, None])[:, 0].where(is_local, 0.0)
    return torch.stack((largest, (values - largest[:, None]).exp().sum(1), target))


def exact_gradient(logits: Tensor, ids: Tensor, log_sum: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    p = (logits.double() - log_sum[:, None].double()).exp() * scale[:, None]
    one_hot = torch.arange(logits.shape[1]) == ids[:, None]
    return (p - one_hot.double()) * weight[:, None]


def check_rows(case: tuple[int, int, torch.dtype], rows: Tensor, gradient: Tensor) -> None:
    logits, *others = make_rows(*case)
    tolerance = 1e-6 if case[2] is torch.float32 else 2**-8
    assert rows.dtype is torch.float32
    torch.testing.assert_close(rows.double(), exact_rows(logits, others[0]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        gradient.double(), exact_gradient(logits, *others), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("case", ROW_CASES, ids=str)
def test_plain_torch_reads_rows_and_writes_their_gradient(case: tuple[int, int, torch.dtype]) -> None:
    logits, *others = make_rows(*case)
    rows = plain_rows(logits, others[0])
    plain_gradient(logits, *others)
    check_rows(case, rows, logits)


def run_triton_kernels() -> list[tuple[Tensor, Tensor]]:
    """Return rows and gradients of the cases, by Triton's interpreter (enabled by an environment
    variable)."""
    from meshwright.models.kernels.cross_entropy_triton import BLOCK as BLOCK_OF_KERNEL
    from meshwright.models.kernels.cross_entropy_triton import read_rows, write_gradient

    assert BLOCK_OF_KERNEL == BLOCK
    results = []
    for case in ROW_CASES:
        logits, ids, log_sum, scale, weight = make_rows(*case)
        rows = read_rows(logits, ids)
        write_gradient(logits, ids, log_sum, scale, weight)
        results.append((rows, logits))
    return results


def test_triton_kernels_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when triton is imported, so in a new process
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # ends its process even if that hangs
        results = pool.apply_async(run_triton_kernels).get(timeout=240)
    for case, (rows, gradient) in zip(ROW_CASES, results, strict=True):
        check_rows(case, rows, gradient)


def build_head(chunk: int, z_loss: float = 0.0, dtype: torch.dtype = torch.float32) -> Head:
    torch.manual_seed(0)
    head = Head(DIM, VOCABULARY, 1e-5)
    nn.init.normal_(head.output.weight, std=0.5)
    head.loss.chunk_tokens, head.loss.z_loss = chunk, z_loss
    return head.to(dtype)


def make_batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, T, DIM, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (B, T), generator=generator)
    targets[0, :9] = targets[2] = IGNORE_INDEX
    return x, targets


def exact(dtype: torch.dtype, z_loss: float) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and its gradients by the textbook formula in float64."""
    head, (x, targets) = build_head(0, dtype=dtype).double(), make_batch(dtype)
    x = x.detach().double().requires_grad_()
    logits = head(x).flatten(0, 1)
    counted = targets.flatten() != IGNORE_INDEX
    loss = F.cross_entropy(logits[counted], targets.flatten()[counted], reduction="sum")
    loss = loss + z_loss * logits[counted].logsumexp(1).square().sum()
    return loss, list(torch.autograd.grad(loss / 77, [x, *head.parameters()]))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("z_loss", [0.0, 0.01], ids=["plain", "z-loss"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_loss_and_gradients_are_exact_however_the_tokens_are_cut(
    chunk, dtype, tolerance, z_loss, compiled
) -> None:
    loss, gradients = exact(dtype, z_loss)
    head, (x, targets) = build_head(chunk, z_loss, dtype), make_batch(dtype)
    if compiled:
        torch._dynamo.reset()
        head.compile(fullgraph=True, backend="aot_eager")
    got = head(x, targets)
    assert got.dtype is torch.float32
    assert got.item() == pytest.approx(loss.item(), rel=tolerance)
    (got / 77).backward()
    for actual, expected in zip([x.grad, *(p.grad for p in head.parameters())], gradients, strict=True):
        assert actual.dtype is dtype
        assert (actual.double() - expected).norm() <= tolerance * expected.norm()
    assert not x.grad[2].any(), "ignored tokens have no gradient"


@pytest.mark.parametrize("chunk", CHUNKS)
def test_no_gradients_are_made_that_nobody_wants(chunk) -> None:
    """With a frozen head, a frozen model below the head, and in an evaluation, which adds no z-loss
    either."""
    head, (x, targets) = build_head(chunk, z_loss=0.1), make_batch()
    with torch.no_grad():
        assert head(x, targets).item() == pytest.approx(cross_entropy_sum(head(x), targets).item(), rel=1e-6)
    both = torch.autograd.grad(head(x, targets), [x, head.output.weight])
    head.output.weight.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(head(x, targets), x)[0], both[0])
    head.output.weight.requires_grad_(True)
    head.norm.weight.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(head(x.detach(), targets), head.output.weight)[0], both[1])


@pytest.mark.parametrize("chunk", CHUNKS)
def test_an_evaluation_makes_no_gradients_and_counts_no_z_loss_by_the_graph_of_training(
    chunk, monkeypatch
) -> None:
    torch._dynamo.reset()
    head, (x, targets) = build_head(chunk, z_loss=0.1), make_batch()
    plain = build_head(chunk)(x, targets).item()
    made = []
    monkeypatch.setattr(chunked_loss, "write_gradient", lambda *args: made.append(write_gradient(*args)))
    head.compile(fullgraph=True, backend="aot_eager")
    trained = head(x, targets).item()
    assert (trained > 1.1 * plain, bool(made)) == (True, bool(chunk))
    made.clear()
    graphs = count_compiled_graphs()
    head.loss.learning.zero_()
    assert head(x, targets).item() == pytest.approx(plain, rel=1e-6)
    head.loss.learning.fill_(1)
    assert (made, count_compiled_graphs()) == ([], graphs)
    assert head(x, targets).item() == trained


def test_a_batch_that_counts_for_nothing_has_no_loss() -> None:
    head, (x, targets) = build_head(64), make_batch()
    loss = head(x, torch.full_like(targets, IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0
    assert not x.grad.any()


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_the_operator_keeps_torchs_contract(wanted) -> None:
    """torch's own checks of schema, fake tensors, autograd and dispatch under compilation."""
    generator = torch.Generator().manual_seed(0)
    h, weight = (torch.randn(n, DIM, generator=generator) for n in (70, 41))
    h.requires_grad_(wanted[0])
    weight.requires_grad_(wanted[1])
    targets = torch.randint(0, 41, (70,), generator=generator)
    torch.library.opcheck(linear_cross_entropy, (h, weight, targets, 0, "", 64, 0.0, torch.ones(()), *wanted))
