"""Context parallelism: who holds which tokens, the exchanges around attention, and the rules of a plan."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.models.attention import CausalAttention
from meshwright.parallel.context_parallel import ContextAxis, apply_exchange, token_positions
from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.schema import ContextPlan, Plan
from meshwright.parallel.plan.serialize import load_plan, plan_to_yaml
from meshwright.parallel.plan.validate import validate
from meshwright.parallel.simulate.simulator import eager_plan
from meshwright.tools.simulate import simulate_run
from meshwright.train.config_parser import parse_config
from meshwright.train.model.choose import source_of
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


def planned(world_size: int, *keys: str) -> Plan:
    return plan_run(parse_config([*RUN, *keys]).job, world_size, 8)


def test_auto_exchanges_heads_where_they_divide_and_gathers_elsewhere() -> None:
    """llama_debug has 4 key-value heads, of which a tp rank has 4 / tp."""
    found = {
        (cp, tp): planned(8, f"--parallel.cp={cp}", f"--parallel.tp={tp}").context.exchange
        for cp, tp in ((2, 1), (4, 1), (8, 1), (2, 2), (4, 2))
    }
    assert found == {(2, 1): "heads", (4, 1): "heads", (8, 1): "gather", (2, 2): "heads", (4, 2): "gather"}


def test_auto_takes_the_kernel_that_can_gather() -> None:
    """cuDNN aligns fewer queries with the first keys; flex, for documents on a GPU, has no such mask yet."""
    job = parse_config([*RUN, "--parallel.cp=8"]).job
    assert plan_run(job, 8, 8, "cudnn", "bfloat16").attention == "flash"
    with pytest.raises(
        PlanError, match=r"attention=flex does not align .*: use cpu or flash, or cp_exchange"
    ):
        plan_run(job, 8, 8, "flex", "bfloat16")


def test_the_ranks_of_cp_shard_the_parameters_and_read_the_same_data() -> None:
    mesh = planned(8, "--parallel.cp=2", "--parallel.tp=2").mesh
    assert (mesh.dp_shard, mesh.cp, mesh.shards, mesh.data_parallel, mesh.world_size) == (2, 2, 4, 2, 8)


def test_a_wrong_degree_is_one_line_with_those_that_would_do() -> None:
    for keys, message in (
        (
            ["--parallel.cp=4", "--parallel.tp=2", "--parallel.cp_exchange=heads"],
            "parallel.cp=4 must divide model.n_kv_heads=4 / tp=2 with cp_exchange=heads: use 1 or 2, or "
            "cp_exchange=gather",
        ),
        (
            ["--parallel.cp=8", "--train.seq_len=248"],
            "parallel.cp=8: 2 x cp = 16 must divide train.seq_len=248: use a length such as 240, or another "
            "degree",
        ),
        (
            ["--parallel.cp=8", "--parallel.attention=math"],
            "parallel.attention=math does not align fewer queries than keys with the last keys, which "
            "cp_exchange=gather needs: use cpu or flash, or cp_exchange=heads",
        ),
        (["--parallel.cp=0"], "parallel.cp=0 must be at least 1"),
        (
            ["--parallel.cp=3"],
            "parallel: dp_replicate=1 x dp_shard=2 x cp=3 x tp=1 is 6 processes, but this run has 8: use 6 "
            "processes, or other degrees",
        ),
    ):
        with pytest.raises(PlanError) as error:
            planned(8, *keys)
        assert message in str(error.value).splitlines()


def test_a_plan_file_says_the_exchange(tmp_path) -> None:
    plan, path = planned(4, "--parallel.cp=2", "--parallel.cp_exchange=gather"), tmp_path / "plan.yaml"
    path.write_text(plan_to_yaml(plan))
    assert load_plan(path) == plan


def test_a_plan_without_the_cores_of_its_model_is_refused() -> None:
    model = source_of(parse_config(RUN).model)
    plan = planned(4, "--parallel.cp=2")
    wrong = dataclasses.replace(plan, context=dataclasses.replace(plan.context, cores=()))
    assert [mistake.field for mistake in validate(wrong, model.units, 4, 256)] == ["context.cores"]


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
