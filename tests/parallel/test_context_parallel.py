"""Context parallelism: who holds which tokens, and the exchanges around attention."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.models.attention import CausalAttention
from meshwright.parallel.context_parallel import ContextAxis, apply_exchange
from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.schema import ContextPlan
from meshwright.parallel.sharded_model import token_positions
from meshwright.parallel.simulate.simulator import eager_plan
from meshwright.tools.simulate import simulate_run
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.resolve import plan_run
from tests.support.worlds import run_ranks

RANKS, TOKENS = 4, 48
EXCHANGES = ("heads", "gather")
RUN = ["--config=llama_debug", "--train.global_batch_size=-1"]
LONG = [
    "--model.n_layers=2",
    "--train.seq_len=8192",
    "--model.max_seq_len=8192",
    "--train.micro_batch_size=1",
    "--parallel.activation_checkpoint=full",
]


def test_every_token_is_on_one_rank() -> None:
    for exchange in EXCHANGES:
        held = [token_positions(exchange, RANKS, rank, TOKENS) for rank in range(RANKS)]
        assert {len(positions) for positions in held} == {TOKENS // RANKS}
        assert sorted(torch.cat(held).tolist()) == list(range(TOKENS))
    scores = [int((positions + 1).sum()) for positions in held]
    assert len(set(scores)) == 1, "a gathering rank has as many causal scores as the others"


def inputs() -> list[Tensor]:
    """q[B, T, N, H], k and v[B, T, K, H] of whole sequences, and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, TOKENS, heads, 8, generator=generator) for heads in (8, 4, 4, 8)]


def first() -> Tensor:
    """Two sequences with documents of 20 and of 7 tokens."""
    return torch.stack([torch.arange(TOKENS) // size * size for size in (20, 7)])


def attend(positions: Tensor, exchange: str, documents: Tensor | None) -> list[Tensor]:
    """This rank's output and gradients of q, k and v at these positions."""
    *qkv, grad = (x[:, positions] for x in inputs())
    leaves = [x.clone().requires_grad_() for x in qkv]
    core = CausalAttention()
    if exchange:
        group = dist.group.WORLD
        assert group is not None
        axis = ContextAxis(group.group_name, RANKS, dist.get_rank())
        apply_exchange(core, ContextPlan(exchange, ("",)), axis)  # the core alone, which has no name
    out = core(*leaves, documents)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def attend_on_ranks() -> dict[tuple[str, bool], list[Tensor]]:
    return {
        (exchange, with_documents): attend(
            token_positions(exchange, RANKS, dist.get_rank(), TOKENS),
            exchange,
            first() if with_documents else None,
        )
        for exchange in EXCHANGES
        for with_documents in (False, True)
    }


def test_attention_of_divided_sequences_is_that_of_whole_ones() -> None:
    """On gloo: output and all gradients, with and without documents."""
    results = run_ranks(RANKS, attend_on_ranks)
    for with_documents in (False, True):
        whole = attend(torch.arange(TOKENS), "", first() if with_documents else None)
        for exchange in EXCHANGES:
            for rank, result in enumerate(results):
                own = token_positions(exchange, RANKS, rank, TOKENS)
                for got, expected in zip(result[exchange, with_documents], whole, strict=True):
                    torch.testing.assert_close(got, expected[:, own], rtol=1e-5, atol=1e-5)


def test_auto_takes_the_kernel_that_can_gather() -> None:
    """cuDNN aligns fewer queries with the first keys; flex, for documents on a GPU, has no such mask yet."""
    job = parse_config([*RUN, "--parallel.cp=8"]).job
    assert plan_run(job, 8, 8, "cudnn", "bfloat16").attention == "flash"
    with pytest.raises(
        PlanError, match=r"attention=flex does not align .*: use cpu or flash, or cp_exchange"
    ):
        plan_run(job, 8, 8, "flex", "bfloat16")


def activations(*keys: str) -> int:
    """Bytes of a rank's activations in a simulated step of one sequence."""
    job = parse_config([*RUN, *LONG, *keys]).job
    return simulate_run(job, eager_plan(plan_run(job, 4, 8))).memory.activations


@pytest.mark.sampled(3, day=0)
def test_activations_fall_as_one_over_cp() -> None:
    """Within a tenth, because an exchange holds its tensors twice for a moment. A rank that gathers holds the
    keys and values of all tokens in one block at a time."""
    whole = activations()
    assert activations("--parallel.cp=4") == pytest.approx(whole / 4, rel=0.1)
    assert activations("--parallel.cp=4", "--parallel.cp_exchange=gather") < 1.3 * whole / 4
