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


# Fusion


def test_operations_on_elements_are_one_kernel_that_reads_and_writes_once() -> None:
    (kernel,) = read(lambda x: [(x.relu() + 1) * 2], x).phase().operations
    assert (kernel.kind, kernel.bytes) == ("memory", per_sequence(X + X))


def test_what_lies_on_both_sides_of_a_product_is_not_fused() -> None:
    graph = read(lambda x, w: [torch.mm(x.relu(), w).sigmoid()], x, w, weights=1)
    assert names(graph) == [("memory", "fused_relu"), ("matmul", "mm"), ("memory", "fused_sigmoid")]
    product = graph.phase().operations[1]
    assert product.flops == per_sequence(2 * TOKENS * DIM * DIM)
    assert product.bytes == per_sequence(X + X, fixed=W)


def test_a_reduction_is_fused_with_what_it_reduces_and_what_is_made_of_it() -> None:
    (kernel,) = read(lambda x: [x * torch.rsqrt((x * x).mean(-1, keepdim=True))], x).phase().operations
    assert kernel.bytes == per_sequence(X + X)


def test_branches_of_one_input_are_one_kernel() -> None:
    (kernel,) = read(lambda x: [x.relu(), x.sigmoid()], x).phase().operations
    assert kernel.bytes == per_sequence(X + X + X)
    assert len(read(lambda x: [x.relu() * x.sigmoid()], x).kernels) == 1


def test_what_is_cheap_to_compute_again_is_not_stored() -> None:
    """Both matmuls' neighbors compute relu(x) themselves: it is neither written nor read."""

    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        cheap = x.relu()
        return [torch.mm(torch.mm(cheap + 1, w) + cheap, w)]

    graph = read(function, x, w, weights=1)
    first, _, second, _ = graph.phase().operations
    assert [first.bytes, second.bytes] == [per_sequence(X + X), per_sequence(X + X + X)]


def test_what_reads_many_tensors_is_stored_for_its_users() -> None:
    """relu(a + b + c + d + e) is read by two kernels: the first one writes it."""

    def function(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, w: Tensor) -> list[Tensor]:
        costly = (a + b + c + d + e).relu()
        return [torch.mm(torch.mm(costly + 1, w) + costly, w)]

    graph = read(function, *(x.clone() for _ in range(5)), w, weights=1)
    first, _, second, _ = graph.phase().operations
    assert [first.bytes, second.bytes] == [per_sequence(5 * X + 2 * X), per_sequence(X + X + X)]


def test_kernels_are_not_joined_around_another() -> None:
    """x.neg() is read before the product and x.relu() after it; both read x, but not at the same time."""

    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        return [torch.mm(x.neg(), w) + x.relu(), x.sigmoid()]

    assert names(read(function, x, w, weights=1)) == [
        ("memory", "fused_neg_sigmoid"),
        ("matmul", "mm"),
        ("memory", "fused_add"),
    ]


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
    """`tools.bench kernels` compares the rule with inductor's kernels: Llama 8B's head has one kernel, 70B's
    has two."""
    graph = norm_gradients(rows, columns)
    assert len(graph.kernels) == kernels
    moved = sum(operation.bytes.at(SEQUENCES) for operation in graph.phase().operations)
    assert moved == pytest.approx((3 if kernels == 1 else 5) * rows * columns * 2, rel=0.01)


def test_sums_over_the_same_rows_share_a_kernel() -> None:
    """The gradients of two weights."""
    (kernel,) = read(lambda x: [x.relu().sum(0), (x + 1).sum(0)], x).phase().operations
    assert kernel.bytes == Linear(2 * 4 * DIM, X)


def test_kernels_come_after_all_that_they_read() -> None:
    """relu and sigmoid are one kernel; in the graph relu comes before the matmul that sigmoid depends on."""
    graph = read(lambda x, w: [torch.mm(x.neg(), w).sigmoid() + x.relu()], x, w, weights=1)
    computed: set[Node] = set()
    for kernel in graph.kernels:
        assert all(node in computed for node in kernel.reads if node.op == "call_function")
        computed |= set(kernel.nodes)


# Aliases


def test_views_are_the_storage_they_look_at() -> None:
    graph = read(lambda x: [x.view(-1).unsqueeze(0).t() + 1], x)
    assert names(graph) == [("memory", "fused_add")]
    (returned,) = graph.returned()
    assert returned is not None
    assert graph.size(returned) == per_sequence(X)


def test_a_part_that_is_returned_keeps_the_whole() -> None:
    """One column is returned, but the full storage of x + 1 stays alive."""
    graph = read(lambda x: [(x + 1)[:, :1]], x)
    (returned,) = graph.returned()
    assert returned is not None
    assert graph.size(returned) == per_sequence(X)


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


def test_what_is_not_counted_is_not_returned_either() -> None:
    graph = read(lambda x, w: [x + 1, w, x], x, w, weights=1)
    result, weight, passed_input = graph.returned()
    assert weight is None
    assert result is not None
    assert passed_input is not None


# Liveness


def chain(x: Tensor, w: Tensor) -> list[Tensor]:
    """Four matmuls, each of the previous result."""
    for _ in range(4):
        x = torch.mm(x, w)
    return [x]


@pytest.mark.parametrize(("held", "most"), [(False, 2), (True, 3)], ids=["inputs let go", "inputs held"])
def test_of_a_chain_two_are_alive_and_what_the_caller_holds(held: bool, most: int) -> None:
    assert read(chain, x, w, weights=1, held=held).phase().live_bytes == (per_sequence(most * X),)


def test_what_is_returned_lives_to_the_end() -> None:
    def kept(x: Tensor, w: Tensor) -> list[Tensor]:
        first = torch.mm(x, w)
        return [torch.mm(torch.mm(first, w), w), first]

    assert read(kept, x, w, weights=1).phase().live_bytes == (per_sequence(3 * X),)


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


def test_a_result_of_another_type_needs_memory_of_its_own() -> None:
    alone = read(lambda x, w: [torch.mm(x, w).double()], x[:, :2].contiguous(), w[:2], weights=1)
    assert alone.phase().live_bytes == (per_sequence(X + 2 * X),)


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


def test_of_several_results_none_is_counted_on_to_be_written_into_an_input() -> None:
    graph, placeholders = trace(lambda x: [y := x.relu(), y + 1], x)
    assert KernelGraph(graph, GraphInputs((), {}, False, placeholders), SEQUENCES).phase().live_bytes == (
        per_sequence(3 * X),
    )


# Attention


def test_attention_is_a_kernel_of_its_own_and_counts_the_causal_half() -> None:
    def attend(q: Tensor) -> list[Tensor]:
        return [torch.nn.functional.scaled_dot_product_attention(q + 1, q, q, is_causal=True) * 2]

    graph = read(attend, torch.ones(SEQUENCES, 1, TOKENS, DIM))
    kinds = [operation.kind for operation in graph.phase().operations]
    assert kinds == ["memory", "attention", "memory"]
    assert graph.phase().operations[1].flops == per_sequence(2 * 2 * TOKENS * TOKENS * DIM / 2)
