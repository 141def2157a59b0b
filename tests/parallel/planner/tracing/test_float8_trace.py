"""The stand-in for float8 products saves and allocates what torchao's does, traced by the same compiler."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.parallel.planner.tracing.eager import TracedModule
from meshwright.parallel.planner.tracing.float8 import multiply_in_float8
from meshwright.parallel.planner.tracing.trace import capture_joint, compiled_workload
from meshwright.parallel.planner.workload import ModuleWorkload

DIM, HIDDEN, TOKENS = 4096, 14336, 8192


class Gated(nn.Module):
    """w2(silu(w1 x) * w3 x) of a normalized x."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.w1, self.w3 = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y: Tensor = x + self.w2(F.silu(self.w1(h)) * self.w3(h))
        return y


def traced(convert: Callable[[nn.Module], object]) -> ModuleWorkload:
    def build(sequences: int) -> TracedModule:
        module = Gated()
        convert(module)
        x = torch.empty(sequences, TOKENS, DIM, dtype=torch.bfloat16, requires_grad=True).clone()
        return TracedModule(module, (x,))

    torch.set_default_dtype(torch.bfloat16)
    try:
        return compiled_workload(capture_joint(build))
    finally:
        torch.set_default_dtype(torch.float32)


@functools.cache
def stand_in() -> ModuleWorkload:
    return traced(lambda module: multiply_in_float8(module, ("w1", "w2", "w3")))


@pytest.mark.slow
@pytest.mark.sampled(6)
def test_what_feeds_a_float8_product_is_recomputed_instead_of_saved() -> None:
    """Saved: the input, and the two tensors of HIDDEN channels, from which the product's operand is computed
    again. In bfloat16 that operand is saved too."""
    plain, in_float8 = traced(lambda module: None), stand_in()
    hidden, wide = TOKENS * DIM * 2, TOKENS * HIDDEN * 2
    assert in_float8.saved_bytes.at(1) == pytest.approx(hidden + 2 * wide, rel=0.01)
    assert plain.saved_bytes.at(1) > in_float8.saved_bytes.at(1) + 0.9 * wide


@pytest.mark.sampled(3, day=2)
def test_it_saves_and_allocates_what_torchaos_product_does() -> None:
    float8 = pytest.importorskip("torchao.float8")
    config = float8.Float8LinearConfig(pad_inner_dim=True)
    real = traced(lambda module: float8.convert_to_float8_training(module, config=config))
    ours = stand_in()
    assert ours.saved_bytes.per_sequence == real.saved_bytes.per_sequence
    # Of the weights inductor saves nothing, because it knows which inputs are parameters. This trace does
    # not know it and saves torchao's casts of them.
    assert ours.saved_bytes.fixed == 0
    for phase, real_phase in ((ours.forward, real.forward), (ours.backward, real.backward)):
        most, really = (max(m.per_sequence for m in p.live_bytes) for p in (phase, real_phase))
        assert most == pytest.approx(really, rel=0.05)
