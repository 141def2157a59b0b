"""The chunked loss compared with float64, and the Triton kernels in Triton's interpreter."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.head import Head, linear_cross_entropy
from meshwright.models.kernels.cross_entropy import plain_losses, plain_rows, write_losses
from meshwright.models.loss import IGNORE_INDEX, cross_entropy_sum
from meshwright.parallel.compile.stats import count_compiled_graphs
from tests.support.interpreted import INTERPRETED, forget_triton, guarded
from tests.support.worlds import run_ranks

# dynamo itself instantiates a function that it compiles
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

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
Z_LOSS, DIVISOR, FIRST_ID = 0.01, torch.tensor(77.0), 5


def make_rows(n: int, v: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return logits[n, v] of the ids from FIRST_ID on, with padding between rows, and targets: with more than
    two rows, the first two are of other ranks and the third is ignored."""
    generator = torch.Generator().manual_seed(n * v)
    logits = (torch.randn(n, v + 3, generator=generator) * 5).to(dtype)[:, :v]
    targets = torch.randint(FIRST_ID, FIRST_ID + v, (n,), generator=generator)
    if n > 2:
        targets[:3] = torch.tensor([FIRST_ID - 1, FIRST_ID + v, IGNORE_INDEX])
    return logits, targets


def run_kernels(
    read: Callable[..., Tensor], write: Callable[..., None], logits: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows, the losses and the gradient by these two functions, which overwrites the logits."""
    rows, losses = read(logits, targets, FIRST_ID), torch.empty(len(logits), device=logits.device)
    for with_gradient in (False, True):
        divisor = DIVISOR.to(logits.device)
        write(logits, targets, FIRST_ID, rows, Z_LOSS, divisor, losses, with_gradient)
    return rows, losses, logits


def check_rows(case: tuple[int, int, torch.dtype], rows: Tensor, losses: Tensor, gradient: Tensor) -> None:
    """Compare with the textbook formulas in float64."""
    logits, targets = make_rows(*case)
    values, ids, counted = logits.double(), targets - FIRST_ID, targets != IGNORE_INDEX
    is_local = (ids >= 0) & (ids < values.shape[1])
    target = values.gather(1, ids.where(is_local, 0)[:, None])[:, 0].where(is_local, 0.0)
    largest, log_sum = values.amax(1), values.logsumexp(1)
    exact = torch.stack((largest, (values - largest[:, None]).exp().sum(1), target))
    one_hot = (torch.arange(values.shape[1]) == ids[:, None]).double()
    p = values.softmax(1) * (1 + 2 * Z_LOSS * log_sum)[:, None]
    tolerance = 1e-6 if case[2] is torch.float32 else 2**-8
    assert rows.dtype is losses.dtype is torch.float32
    torch.testing.assert_close(rows.double(), exact, rtol=1e-5, atol=1e-5)
    expected = (log_sum - target + Z_LOSS * log_sum.square()).where(counted, 0.0)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    expected = ((p - one_hot) * counted[:, None]) / DIVISOR
    torch.testing.assert_close(gradient.double(), expected, rtol=tolerance, atol=tolerance / DIVISOR)


@pytest.mark.parametrize("case", ROW_CASES, ids=str)
def test_plain_torch_reads_rows_and_writes_losses_and_gradient(case: tuple[int, int, torch.dtype]) -> None:
    check_rows(case, *run_kernels(plain_rows, plain_losses, *make_rows(*case)))


def run_triton_kernels() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Interpret the kernels: the results of the cases. Nothing outside the tensors may be accessed; the
    product of a gradient with 1 accesses nothing, which a tensor of one element instead of many shows."""
    forget_triton()
    from meshwright.models.kernels import cross_entropy_triton as kernels

    assert kernels.BLOCK == BLOCK
    kernels.PROGRAMS = 2  # so that each has several blocks
    for dtype, tolerance in ((torch.float32, 0.0), (torch.bfloat16, 2**-7)):  # the interpreter truncates
        gradient, factor = torch.randn(5 * BLOCK + 7).to(dtype), torch.tensor(0.3)
        multiplied = guarded(gradient)
        kernels.multiply_unless_one(multiplied, factor)
        torch.testing.assert_close(multiplied, (gradient * factor).to(dtype), rtol=tolerance, atol=0)
        kernels._multiply[(2,)](guarded(gradient[:1]), torch.ones(()), len(gradient), 2, BLOCK=BLOCK)
    results = []
    for case in ROW_CASES:
        logits, targets = map(guarded, make_rows(*case))
        padded = logits.as_strided((len(logits) - 1, logits.stride(0)), logits.stride())
        between = padded[:, logits.shape[1] :].clone()
        results.append(run_kernels(kernels.read_rows, kernels.write_losses, logits, targets))
        assert torch.equal(padded[:, logits.shape[1] :], between)
    return results


def test_triton_kernels_do_the_same_and_stay_within_their_tensors() -> None:
    pytest.importorskip("triton")
    (results,) = run_ranks(1, run_triton_kernels, **INTERPRETED)
    for case, result in zip(ROW_CASES, results, strict=True):
        check_rows(case, *result)


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


@pytest.mark.parametrize(
    ("chunk", "dtype", "z_loss", "divisor", "compiled"),
    [
        *itertools.product(CHUNKS, (torch.float32,), (0.0, Z_LOSS), (1.0, 77.0), (False,)),
        *itertools.product(CHUNKS, (torch.bfloat16,), (0.0, Z_LOSS), (38.5,), (False,)),
        *((chunk, torch.bfloat16, Z_LOSS, 77.0, True) for chunk in CHUNKS[:2]),
    ],
)
def test_loss_and_gradients_are_exact_however_the_tokens_are_cut(
    chunk, dtype, z_loss, divisor, compiled
) -> None:
    """And wherever the loss is divided by 77: by the head, by the caller, or by both."""
    tolerance = 2e-6 if dtype is torch.float32 else 2e-2
    loss, gradients = exact(dtype, z_loss)
    head, (x, targets) = build_head(chunk, z_loss, dtype), make_batch(dtype)
    if compiled:
        torch._dynamo.reset()
        head.compile(fullgraph=True, backend="aot_eager")
    got = head(x, targets, torch.tensor(divisor) if divisor > 1 else None)
    assert got.dtype is torch.float32
    assert got.item() * divisor == pytest.approx(loss.item(), rel=tolerance)
    (got * divisor / 77).backward()
    for actual, expected in zip([x.grad, *(p.grad for p in head.parameters())], gradients, strict=True):
        assert actual.dtype is dtype
        assert (actual.double() - expected).norm() <= tolerance * expected.norm()
    assert not x.grad[2].any(), "ignored tokens have no gradient"


@pytest.mark.parametrize("chunk", CHUNKS)
def test_no_gradients_are_made_that_nobody_wants(chunk) -> None:
    """With a frozen head, a frozen model below it, and in an evaluation, which adds no z-loss either."""
    head, (x, targets) = build_head(chunk, z_loss=0.1), make_batch()
    with torch.no_grad():
        assert head(x, targets).item() == pytest.approx(cross_entropy_sum(head(x), targets).item(), rel=1e-6)
    both = torch.autograd.grad(head(x, targets), [x, head.output.weight])
    head.output.weight.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(head(x, targets), x)[0], both[0])
    head.output.weight.requires_grad_(True)
    head.norm.weight.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(head(x.detach(), targets), head.output.weight)[0], both[1])


@pytest.mark.parametrize("chunk", CHUNKS[:2])
def test_an_evaluation_makes_no_gradients_and_counts_no_z_loss_by_the_graph_of_training(
    chunk, monkeypatch
) -> None:
    torch._dynamo.reset()
    head, (x, targets) = build_head(chunk, z_loss=0.1), make_batch()
    plain = build_head(chunk)(x, targets).item()
    made: list[bool] = []  # an entry for each chunk with a gradient

    def watched(*args: Any) -> None:
        made.extend([args[-1]] * args[-1])
        write_losses(*args)

    monkeypatch.setattr("meshwright.models.head.write_losses", watched)
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


def test_gradients_that_were_scaled_in_place_are_not_used_again() -> None:
    head, (x, targets) = build_head(64), make_batch()
    loss = head(x, targets)
    (2 * loss).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_the_operator_keeps_torchs_contract(wanted) -> None:
    """torch's own checks of schema, fake tensors and dispatch under compilation."""
    generator = torch.Generator().manual_seed(0)
    h, weight = (torch.randn(n, DIM, generator=generator) for n in (70, 41))
    targets, divisor = torch.randint(0, 41, (70,), generator=generator), torch.tensor(3.0)
    torch.library.opcheck(
        linear_cross_entropy, (h, weight, targets, 0, "", 64, 0.0, torch.ones(()), divisor, *wanted)
    )
