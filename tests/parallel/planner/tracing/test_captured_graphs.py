"""All ways of activation checkpointing share one captured graph, and get what torch makes of each."""

import functools

import pytest
import torch
from torch import Tensor, nn

from meshwright.parallel.activation_checkpoint import recompute
from meshwright.parallel.planner.tracing.eager import TracedModule
from meshwright.parallel.planner.tracing.trace import JointGraph, capture_joint, compiled_workload

TOKENS, DIM = 16, 8


class Gated(nn.Module):
    """x[B, T, D] -> x + down · (silu(gate · x) * up · x) -> [B, T, D], with a norm before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.gate, self.up, self.down = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        first, second = torch.split(self.down(nn.functional.silu(self.gate(y)) * self.up(y)), DIM // 2, -1)
        z: Tensor = x + torch.cat((first.tanh(), second), -1)
        return z


def build(sequences: int, saved_ops: tuple[str, ...] | None = None) -> TracedModule:
    module = Gated()
    if saved_ops is not None:
        recompute(module, saved_ops)
    return TracedModule(module, (torch.empty(sequences, TOKENS, DIM, requires_grad=True).clone(),))


@functools.cache
def captured() -> JointGraph:
    return capture_joint(build)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "saved_ops",
    [(), ("aten.mm/2",), ("aten.split", "aten.tanh"), ("aten.mm/3", "aten.tanh")],
    ids=str,
)
def test_a_shared_graph_is_recomputed_as_torch_does(saved_ops: tuple[str, ...]) -> None:
    plain = captured()
    by_torch = compiled_workload(capture_joint(lambda sequences: build(sequences, saved_ops)))
    assert compiled_workload(plain, saved_ops) == by_torch != compiled_workload(plain)


def test_an_operator_that_the_compiler_decomposes_is_reported() -> None:
    plain = captured()
    assert plain.decomposes(("aten.silu",))
    assert not plain.decomposes(("aten.mm/2", "aten.split", "aten.tanh", "aten.gelu"))
