"""Kernels of small traced functions: fusion, memory traffic and live memory, compared with manual
derivations."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from meshwright.parallel.planner.tracing.fx_graph import GraphInputs, KernelGraph
from meshwright.parallel.planner.workload import Linear

SEQUENCES = 2  # traced: amounts per sequence are half of the traced ones
TOKENS, DIM = 3, 4
X = TOKENS * DIM * 4  # bytes of a sequence of x[B * TOKENS, DIM] in float32
W = DIM * DIM * 4
x = torch.ones(SEQUENCES * TOKENS, DIM)
w = torch.ones(DIM, DIM)


def per_sequence(size: float, fixed: float = 0) -> Linear:
    return Linear(fixed, size)


def trace(function: Callable[..., list[Tensor]], *inputs: Tensor) -> tuple[Graph, list[Node]]:
    """Return a function's graph and its placeholders."""
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return graph, [node for node in graph.nodes if node.op == "placeholder"]


def read(
    function: Callable[..., list[Tensor]], *inputs: Tensor, weights: int = 0, held: bool = False
) -> KernelGraph:
    """Return the kernels of a function whose last `weights` inputs are weights."""
    graph, placeholders = trace(function, *inputs)
    uncounted = placeholders[len(placeholders) - weights :]
    return KernelGraph(graph, GraphInputs(uncounted, {}, held), SEQUENCES)


def names(graph: KernelGraph) -> list[tuple[str, str]]:
    return [(operation.kind, operation.name) for operation in graph.phase().operations]


# Fusion: bytes that each kernel reads and writes


def recomputed(x: Tensor, w: Tensor) -> list[Tensor]:
    cheap = x.relu()
    return [torch.mm(torch.mm(cheap + 1, w) + cheap, w)]


def stored(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, w: Tensor) -> list[Tensor]:
    costly = (a + b + c + d + e).relu()
    return [torch.mm(torch.mm(costly + 1, w) + costly, w)]


@pytest.mark.parametrize(
    ("function", "inputs", "moved"),
    [
        (lambda x: [(x.relu() + 1) * 2], 1, [X + X]),
        # what lies on both sides of a product is not fused
        (lambda x, w: [torch.mm(x.relu(), w).sigmoid()], 1, [X + X, X + X, X + X]),
        # a reduction is fused with what it reduces and with what is made of it
        (lambda x: [x * torch.rsqrt((x * x).mean(-1, keepdim=True))], 1, [X + X]),
        # branches of one input
        (lambda x: [x.relu(), x.sigmoid()], 1, [X + X + X]),
        # what is cheap to compute again is neither written nor read: both products' neighbors compute relu(x)
        (recomputed, 1, [X + X, X + X, X + X + X, X + X]),
        # what reads many tensors is stored for its users: the first kernel writes it
        (stored, 5, [5 * X + 2 * X, X + X, X + X + X, X + X]),
        # the gradients of two weights: sums over the same rows share a kernel
        (lambda x: [x.relu().sum(0), (x + 1).sum(0)], 1, [X]),
    ],
)
def test_kernels_read_and_write_once(function, inputs: int, moved: list[int]) -> None:
    with_weight = "w" in function.__code__.co_varnames[: function.__code__.co_argcount]
    given = [*(x.clone() for _ in range(inputs)), *[w] * with_weight]
    operations = read(function, *given, weights=int(with_weight)).phase().operations
    assert [operation.bytes.per_sequence for operation in operations] == moved


def test_a_product_has_its_weight_and_its_operations() -> None:
    graph = read(lambda x, w: [torch.mm(x.relu(), w).sigmoid()], x, w, weights=1)
    assert names(graph) == [("memory", "fused_relu"), ("matmul", "mm"), ("memory", "fused_sigmoid")]
    product = graph.phase().operations[1]
    assert product.flops == per_sequence(2 * TOKENS * DIM * DIM)
    assert product.bytes == per_sequence(X + X, fixed=W)


def norm_gradients(rows: int, columns: int) -> KernelGraph:
    """Return the kernels of the gradients of a norm's input and weight, in bfloat16."""

    def function(grad: Tensor, x: Tensor, rstd: Tensor, w: Tensor) -> list[Tensor]:
        normed = x.float() * rstd
        of_normed = grad.float() * w
        mean = (of_normed * normed).mean(1, keepdim=True)
        dx = (rstd * (of_normed - normed * mean)).bfloat16()
        return [dx, (grad.float() * normed).sum(0)]

    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
    rstd, w = torch.empty(rows, 1, device="meta"), torch.empty(columns, device="meta")
    return read(function, torch.empty_like(x), x, rstd, w, weights=1)


@pytest.mark.parametrize(
    ("rows", "columns", "kernels"),
    [(8192, 4096, 1), (8192, 8192, 2), (2048, 1024, 2), (4096, 1024, 2), (8192, 1024, 1)],
    ids=["wide", "too wide", "few rows", "small", "narrow"],
)
def test_sums_over_rows_and_columns_share_a_kernel_within_inductors_limits(
    rows: int, columns: int, kernels: int
) -> None:
    """tests/fake_gpu/test_planned_kernels.py compares the rule with inductor's kernels: Llama 8B's head has
    one kernel, 70B's has two."""
    graph = norm_gradients(rows, columns)
    assert len(graph.kernels) == kernels
    moved = sum(operation.bytes.at(SEQUENCES) for operation in graph.phase().operations)
    assert moved == pytest.approx((3 if kernels == 1 else 5) * rows * columns * 2, rel=0.01)


# Aliases


def test_placeholders_of_one_storage_are_counted_once() -> None:
    graph, (first, second) = trace(lambda a, b: [a + b], x, x.clone())
    both = KernelGraph(graph, GraphInputs((), {}, held=True), SEQUENCES)
    once = KernelGraph(graph, GraphInputs((), {second: first}, held=True), SEQUENCES)
    assert both.phase().live_bytes == (per_sequence(3 * X),)
    assert once.phase().live_bytes == (per_sequence(2 * X),)


# What grows with the micro batch


@pytest.mark.parametrize(
    ("function", "size"),
    [
        (lambda x, w: [torch.mm(x.t(), x + 1)], Linear(W, 0)),  # the gradient of a weight
        (lambda x, w: [(x + 1).sum(0)], Linear(4 * DIM, 0)),  # over the tokens, as a norm's gradient
        (lambda x, w: [(x + 1).sum(1)], Linear(0, 4 * TOKENS)),
        (lambda x, w: [(x + 1).argmax(1)], Linear(0, 8 * TOKENS)),
        (lambda x, w: [torch.mm(x, w)], Linear(0, X)),
        (lambda x, w: [w + 1], Linear(W, 0)),
    ],
    ids=["weight gradient", "sum over tokens", "sum over dim", "argmax over dim", "product", "of a weight"],
)
def test_sizes_are_fixed_or_grow_with_the_sequences(
    function: Callable[..., list[Tensor]], size: Linear
) -> None:
    graph = read(function, x, w, weights=1)
    (returned,) = graph.returned()
    assert returned is not None
    assert graph.size(returned) == size


# Liveness


def chain(x: Tensor, w: Tensor) -> list[Tensor]:
    """Four matmuls, each of the previous result."""
    for _ in range(4):
        x = torch.mm(x, w)
    return [x]


@pytest.mark.parametrize(("held", "most"), [(False, 2), (True, 3)], ids=["inputs let go", "inputs held"])
def test_of_a_chain_two_are_alive_and_what_the_caller_holds(held: bool, most: int) -> None:
    assert read(chain, x, w, weights=1, held=held).phase().live_bytes == (per_sequence(most * X),)


def test_gradients_of_weights_add_up_as_a_fixed_part() -> None:
    """Live are x, a gradient of its size, one weight gradient, and then both weight gradients."""

    def backward(x: Tensor, gradient: Tensor) -> list[Tensor]:
        return [torch.mm(x.t(), gradient), torch.mm(gradient.t(), x)]

    assert read(backward, x, x.clone()).phase().live_bytes == (per_sequence(2 * X, fixed=2 * W),)


# Results written into inputs


def middle(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """Put a function between two matmuls, neither of which can write into its input."""
    return lambda x, w: [torch.mm(function(torch.mm(x, w)), w)]


def test_an_only_result_is_written_into_an_input_that_dies() -> None:
    """Two matmuls never have more than two live tensors; relu between them does not change that."""
    assert read(middle(torch.relu), x, w, weights=1).phase().live_bytes == (per_sequence(2 * X),)
    alone = read(lambda x, w: [torch.mm(x, w).relu()], x[:, :2].contiguous(), w[:2], weights=1)
    assert alone.phase().live_bytes == (per_sequence(X + X / 2),), (
        "the matmul's result and its narrow input; then relu in place"
    )


def test_of_several_results_each_takes_the_place_of_an_input_that_only_it_uses() -> None:
    """As in the backward of a gated product: of three inputs, both results use one."""

    def gates(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> list[Tensor]:
        a, b, c = (torch.mm(each, w) for each in (a, b, c))
        return [torch.mm(a * c, w), torch.mm(b * c, w)]

    assert read(gates, x, x.clone(), x.clone(), w, weights=1).phase().live_bytes == (per_sequence(4 * X),)


def test_an_input_that_is_needed_again_is_not_written_into() -> None:
    """The matmul's result is returned as well."""
    both = read(
        lambda x, w: [(y := torch.mm(x, w)), y.relu()], x[:, :2].contiguous(), w[:2].contiguous(), weights=1
    )
    assert both.phase().live_bytes == (per_sequence(2 * X),), "the narrow input is freed when relu runs"


@pytest.mark.parametrize(("donated", "most"), [(False, 2), (True, 1)], ids=["another's", "donated"])
def test_a_placeholder_is_written_into_only_where_it_is_the_graphs_own(donated: bool, most: int) -> None:
    graph, placeholders = trace(lambda x: [x.relu()], x)
    kernels = KernelGraph(graph, GraphInputs((), {}, False, placeholders if donated else ()), SEQUENCES)
    assert kernels.phase().live_bytes == (per_sequence(most * X),)


# Attention


def test_attention_is_a_kernel_of_its_own_and_counts_the_causal_half() -> None:
    def attend(q: Tensor) -> list[Tensor]:
        return [torch.nn.functional.scaled_dot_product_attention(q + 1, q, q, is_causal=True) * 2]

    graph = read(attend, torch.ones(SEQUENCES, 1, TOKENS, DIM))
    kinds = [operation.kind for operation in graph.phase().operations]
    assert kinds == ["memory", "attention", "memory"]
    assert graph.phase().operations[1].flops == per_sequence(2 * 2 * TOKENS * TOKENS * DIM / 2)
