"""Eager traces of small modules, compared with manually derived operations and memory, on small real
tensors."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.parallel.plan.schema import TensorPlan
from meshwright.parallel.planner.tracing.eager import TracedModule, trace_eager
from meshwright.parallel.planner.tracing.trace import apply_as_single_tp_rank
from meshwright.parallel.planner.workload import Linear, Operation

TOKENS, WIDE, OUT = 4, 4, 8
# bytes in float32: input and output of a sequence, weight
X, Y, WEIGHT = TOKENS * WIDE * 4, TOKENS * OUT * 4, WIDE * OUT * 4


def subject_of(module: nn.Module, *tables: Tensor) -> Callable[[int], TracedModule]:
    """Return a builder that calls the module with x[B, TOKENS, WIDE], to which there is no other
    reference."""

    def build(sequences: int) -> TracedModule:
        module.zero_grad()
        x = torch.ones(sequences, TOKENS, WIDE, requires_grad=True).clone()
        return TracedModule(module, (x, *tables), tables=tables)

    return build


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def test_a_product_by_hand() -> None:
    forward, backward, saved, output = trace_eager(subject_of(nn.Linear(WIDE, OUT, bias=False)))
    flops = Linear(0, 2 * TOKENS * WIDE * OUT)
    assert forward.operations == (Operation("matmul", "mm", flops, Linear(WEIGHT, X + Y), "float32"),)
    assert forward.live_bytes == (Linear(0, X + Y),)
    assert (saved, output) == (Linear(0, X), Linear(0, Y))
    # Two matmuls, for the gradients of the weight and of the input; the input and the output's gradient are
    # live.
    assert [(op.kind, op.flops) for op in backward.operations if op.kind != "memory"] == [
        ("matmul", flops)
    ] * 2
    assert backward.live_bytes == (Linear(WEIGHT, X + Y + X),)


def test_what_the_backward_does_not_need_is_let_go() -> None:
    """x.neg().neg() saves nothing; the input, to which the caller holds a reference, and both results are
    live."""
    forward, backward, saved, _ = trace_eager(subject_of(Calls(lambda x: x.neg().neg())))
    assert saved == Linear()
    assert forward.live_bytes == (Linear(0, 3 * X),)
    assert backward.live_bytes == (Linear(0, 2 * X),), "two gradients: there is no reference to the first"


def test_a_module_of_numbers_without_gradients_has_no_backward() -> None:
    """As one that returns rows of a fixed table of positions."""

    class Table(nn.Module):
        def forward(self, tokens: int) -> Tensor:
            return torch.ones(tokens, WIDE)

    forward, backward, saved, output = trace_eager(lambda sequences: TracedModule(Table(), (TOKENS,)))
    assert [operation.name for operation in forward.operations] == ["ones"]
    assert (backward.operations, backward.live_bytes) == ((), ())
    assert (saved, output) == (Linear(), Linear())


def test_an_operation_moves_what_it_reads_and_writes() -> None:
    forward, *_ = trace_eager(subject_of(Calls(lambda x: (x + x.double()).float())))
    assert [(op.name, op.bytes, op.dtype) for op in forward.operations] == [
        ("_to_copy", Linear(0, X + 2 * X), "float64"),
        ("add", Linear(0, X + 2 * X + 2 * X), "float64"),
        ("_to_copy", Linear(0, 2 * X + X), "float32"),
    ]


def test_rms_norm_is_one_kernel_on_cuda_and_one_for_each_gradient() -> None:
    norm, weight, scale = nn.RMSNorm(WIDE), WIDE * 4, TOKENS * 4
    forward, backward, saved, _ = trace_eager(subject_of(norm), on_cuda=True)
    assert [(op.name, op.bytes) for op in forward.operations] == [("rms_norm", Linear(weight, 2 * X + scale))]
    assert saved == Linear(0, X + scale)
    assert [op.bytes for op in backward.operations] == [
        Linear(weight, 3 * X + scale),
        Linear(2 * weight, 2 * X + scale),
    ]
    assert len(trace_eager(subject_of(norm))[0].operations) > 1


def test_tables_are_not_counted_and_what_does_not_grow_is_fixed() -> None:
    table = torch.ones(TOKENS, WIDE)
    forward, _, saved, _ = trace_eager(subject_of(Calls(lambda x, table: x * torch.exp(table)), table))
    exp, product = forward.operations
    assert (exp.bytes, product.bytes) == (Linear(2 * X, 0), Linear(X, 2 * X))
    assert saved == Linear(X, 0), "the exponential; the gradient of x does not need x"
    assert forward.live_bytes == (Linear(X, 2 * X),)


def test_attention_counts_the_causal_half() -> None:
    attend = nn.functional.scaled_dot_product_attention
    forward, backward, saved, _ = trace_eager(
        subject_of(Calls(lambda x: attend(*[x.unsqueeze(1)] * 3, is_causal=True)))
    )
    (kernel,) = [operation for operation in forward.operations if operation.kind == "attention"]
    assert kernel.flops == Linear(0, 2 * 2 * TOKENS * TOKENS * WIDE / 2)
    (kernel,) = [operation for operation in backward.operations if operation.kind == "attention"]
    assert kernel.flops == Linear(0, 5 * 2 * TOKENS * TOKENS * WIDE / 2)
    assert saved.per_sequence == X + X + TOKENS * 4, "input, output, and the logsumexp of each row"


def test_a_tensor_parallel_collective_counts_its_full_side() -> None:
    """The partial results of a row-wise matmul on two ranks are reduce-scattered over the tokens; the
    backward all-gathers."""

    def build(sequences: int) -> TracedModule:
        model = nn.Sequential(nn.Linear(2 * WIDE, OUT, bias=False))
        apply_as_single_tp_rank(model, TensorPlan(sequence_parallel=True, styles={"0": "rowwise"}), 2)
        return subject_of(model)(sequences)

    with FakeTensorMode(allow_non_fake_inputs=True):
        phases = trace_eager(build)[:2]
    sent = [[(op.name, op.bytes) for op in phase.operations if op.kind == "collective"] for phase in phases]
    assert sent == [[("reduce_scatter", Linear(0, Y))], [("all_gather", Linear(0, Y))]]


def test_keywords_and_several_results() -> None:
    """x + 1 and x + 2, of a dict and a keyword: both results count, and both get a gradient."""

    class Two(nn.Module):
        def forward(self, given: dict[str, Tensor], *, added: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return given["x"] + 1, {"y": given["x"] + added}

    def build(sequences: int) -> TracedModule:
        x, table = torch.ones(sequences, TOKENS, WIDE, requires_grad=True).clone(), torch.ones(())
        return TracedModule(Two(), ({"x": x},), {"added": table}, (table,))

    forward, backward, saved, output = trace_eager(build)
    assert [operation.name for operation in forward.operations] == ["add", "add"]
    assert [operation.name for operation in backward.operations] == ["add"]
    assert (saved, output) == (Linear(), Linear(0, 2 * X))
