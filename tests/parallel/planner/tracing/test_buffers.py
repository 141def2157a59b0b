"""The buffers of compiled modules: lifetimes by hand, and against the live memory of the same trace."""

import pytest
import torch
from torch import Tensor, nn

from meshwright.models.loss import LogitsLoss
from meshwright.parallel.planner.tracing.eager import TracedModule
from meshwright.parallel.planner.tracing.trace import capture_joint, compiled_workload
from meshwright.parallel.planner.workload import Buffer, Linear, ModuleWorkload, total, with_loss
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.predict import run_workload
from meshwright.train.planning.resolve import plan_run

TOKENS, DIM, HIDDEN = 16, 8, 32
X, H, W = TOKENS * DIM * 4, TOKENS * HIDDEN * 4, HIDDEN * DIM * 4  # bytes


class Wide(nn.Module):
    """x[B, T, D] -> tanh(x · up[H, D]) · down[D, H] -> [B, T, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).tanh())
        return y


def build(sequences: int) -> TracedModule:
    return TracedModule(Wide(), (torch.empty(sequences, TOKENS, DIM, requires_grad=True).clone(),))


def per_sequence(size: float) -> Linear:
    return Linear(0.0, size)


def test_the_lifetimes_of_a_small_module_by_hand() -> None:
    """Forward: up, tanh, which overwrites up's result, and down. Backward: the gradients of down, of tanh's
    result, of its input, which overwrites tanh's result, of up, and of the input."""
    buffers = compiled_workload(capture_joint(build)).buffers
    assert [(buffer.role, buffer.size, buffer.begin, buffer.end) for buffer in buffers] == [
        ("input", per_sequence(X), -4, 4),
        ("inner", per_sequence(H), -3, -3),
        ("inner", per_sequence(H), -2, 2),
        ("output", per_sequence(X), -1, -1),
        ("output_grad", per_sequence(X), 0, 2),
        ("weight_grad", Linear(W), 1, 6),
        ("inner", per_sequence(H), 2, 3),
        ("inner", per_sequence(H), 3, 5),
        ("weight_grad", Linear(W), 4, 6),
        ("input_grad", per_sequence(X), 5, 6),
    ]


def test_a_loss_does_not_overwrite_the_logits_of_a_graph_before_it() -> None:
    """Forward: logits, loss. Backward: the gradient of the logits beside them, then those of the head."""

    def loss(sequences: int) -> TracedModule:
        logits = torch.empty(sequences, TOKENS, HIDDEN, requires_grad=True).clone()
        return TracedModule(LogitsLoss(), (logits, torch.zeros(sequences, TOKENS).long(), torch.ones(())))

    def head(sequences: int) -> TracedModule:
        return TracedModule(nn.Linear(DIM, HIDDEN, bias=False), build(sequences).args)

    work = with_loss(*(compiled_workload(capture_joint(part)) for part in (head, loss)))
    large = [b for b in work.buffers if b.size.per_sequence == H]
    assert [(b.role, b.begin, b.end) for b in large] == [("inner", -3, 1), ("inner", 1, 4)]
    assert max(live.per_sequence for live in work.of_loss) == pytest.approx(2 * H + X, rel=0.2)
    assert max(live.per_sequence for live in work.backward.live_bytes) == pytest.approx(H + X, rel=0.2)


FULL = "--parallel.activation_checkpoint=full"
BLOCK_8B = ("--config=llama_8b.yaml", "--model.n_layers=1")


def traced(name: str, *keys: str) -> ModuleWorkload:
    job = parse_config([*BLOCK_8B, *keys]).job
    return run_workload(job, plan_run(job, 8, 8, "cudnn", "bfloat16")).modules[name]


def live_at(buffers: tuple[Buffer, ...], kernel: int) -> Linear:
    return total(buffer.size for buffer in buffers if buffer.begin <= kernel <= buffer.end)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "keys",
    [(), (FULL,), pytest.param(("--parallel.tp=2",), marks=[pytest.mark.slow, pytest.mark.sampled(6)])],
    ids=str,
)
def test_the_buffers_of_a_block_add_up_to_the_live_memory_of_the_same_trace(keys: tuple[str, ...]) -> None:
    work = traced("layers.0", *keys)
    kernels = range(min(b.begin for b in work.buffers), max(b.end for b in work.buffers) + 1)
    for phase, in_phase in ((work.forward, range(kernels.start, 0)), (work.backward, range(1, kernels.stop))):
        most = max(live_at(work.buffers, kernel).at(1) for kernel in in_phase)
        assert most == pytest.approx(max(moment.at(1) for moment in phase.live_bytes), rel=0.02)
    across = (b for b in work.buffers if b.begin < 0 <= b.end)
    assert total(b.size for b in across).at(1) == pytest.approx(work.saved_bytes.at(1))


def test_the_head_has_its_gradient_and_the_logits_of_a_chunk() -> None:
    buffers, gradient = traced("head").buffers, 128256 * 4096 * 2
    saved = [b for b in buffers if b.begin < 0 <= b.end and b.size.fixed == gradient]
    assert len(saved) == 1, "the forward computes the weight's gradient"
    (logits,) = (b for b in buffers if b.begin == b.end == saved[0].begin and b.size.fixed > 4)
    assert logits.size.fixed == pytest.approx(2048 * 128256 * 2, rel=0.01)
    assert [b.size.at(1) for b in buffers if b.role == "weight_grad" and b.size.at(1) > 2**20] == [gradient]


def test_two_traces_have_the_same_buffers_in_the_same_order() -> None:
    assert compiled_workload(capture_joint(build)) == compiled_workload(capture_joint(build))
