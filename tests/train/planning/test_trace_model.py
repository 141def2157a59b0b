"""The traced workload of a Llama, compared with known sizes of the 8B; tracing has no side effects."""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.parallel.compile.stats import count_compiled_graphs
from meshwright.parallel.planner.tracing.trace import capture_joint
from meshwright.parallel.planner.workload import ModelWorkload, ModuleWorkload
from meshwright.train.config_parser import parse_config
from meshwright.train.model.trained_model import model_of
from meshwright.train.planning import trace_model
from meshwright.train.planning.predict import run_workload
from meshwright.train.planning.resolve import plan_run
from meshwright.train.planning.trace_model import model_workload
from tests.support.simulated import TINY

MIB = 2**20
SEQ_LEN = 8192
SMALL = (*TINY, "--model.max_seq_len=64", "--train.seq_len=64")
EAGER = "--parallel.compile.enabled=false"


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def work_of(*keys: str, ranks: int = 1) -> ModelWorkload:
    """The workload, traced or read from the cache that the tests share."""
    config = parse_config(keys)
    return run_workload(config.job, plan_run(config.job, ranks, 8))


def block_8b(*keys: str, ranks: int = 8) -> ModuleWorkload:
    return work_of("--config=llama_8b.yaml", "--model.n_layers=1", *keys, ranks=ranks).modules["layers.0"]


def kept_mib(*keys: str) -> float:
    keeps = block_8b(*keys).saved_bytes
    assert keeps.fixed == 0
    return keeps.per_sequence / MIB


def test_a_compiled_8b_block_keeps_1089_mib_of_8192_tokens() -> None:
    """In bfloat16. 64 MiB of them are the input, which is all that full recompute keeps."""
    assert kept_mib() == pytest.approx(1089, abs=0.5)
    assert kept_mib("--parallel.activation_checkpoint=full") == 64
    assert 64 < kept_mib("--parallel.activation_checkpoint=selective") < 1089


def test_a_smaller_budget_keeps_less() -> None:
    budget = "--parallel.activation_checkpoint=budget"
    kept = [kept_mib(budget, f"--parallel.activation_budget={share}") for share in (0, 0.5, 1)]
    assert (kept[0], kept[-1]) == (64, kept_mib())
    assert all(less < more for less, more in itertools.pairwise(kept)), kept


def test_an_eager_block_keeps_what_autograd_saves() -> None:
    """More than the compiler keeps, which recomputes cheap operations."""
    assert kept_mib(EAGER) > kept_mib()
    assert kept_mib(EAGER, "--parallel.activation_checkpoint=full") == 64


@pytest.mark.sampled(3)
@pytest.mark.parametrize("keys", [(), (EAGER,)], ids=["compiled", "eager"])
def test_flops_are_those_of_the_formulas(keys: tuple[str, ...]) -> None:
    """Matrix products: 6 per parameter and token. Attention: 12 L D S, of which causal kernels compute half;
    the backward repeats one of five products, which the formula does not count: 7 products instead of 6."""
    config = parse_config([*SMALL, *keys])
    work = work_of(*SMALL, *keys)
    flops = {"matmul": 0.0, "attention": 0.0}
    for module in work.modules.values():
        for operation in (*module.forward.operations, *module.backward.operations):
            assert operation.flops.fixed == 0
            if operation.kind in flops:
                flops[operation.kind] += operation.flops.per_sequence
    assert flops["matmul"] == 64 * 3 * model_of(config.model).forward_flops(64)[0]
    assert flops["attention"] == 64 * 12 * config.model.n_layers * config.model.dim * 64 / 2 * 7 / 6


def test_recomputing_does_a_forward_more() -> None:
    def backward_flops(*keys: str) -> float:
        operations = block_8b(*keys).backward.operations
        return sum(operation.flops.per_sequence for operation in operations)

    forward = sum(operation.flops.per_sequence for operation in block_8b().forward.operations)
    none, full = backward_flops(), backward_flops("--parallel.activation_checkpoint=full")
    selective = backward_flops("--parallel.activation_checkpoint=selective")
    last_product = 2 * SEQ_LEN * 14336 * 4096  # the backward does not need its result
    assert full - none == forward - last_product
    assert none <= selective < full


@pytest.mark.sampled(3)
@pytest.mark.parametrize("keys", [(), (EAGER,)], ids=["compiled", "eager"])
def test_tp_divides_products_and_what_they_keep(keys: tuple[str, ...]) -> None:
    full, split = (block_8b(*keys, f"--parallel.tp={tp}") for tp in (1, 4))
    modules = model_of(parse_config(["--config=llama_8b.yaml"]).model).units.modules
    block, norms = modules["layers.0"], 2 * 4096
    assert (full.parameters, split.parameters) == (block, (block - norms) // 4 + norms)
    for phase in ("forward", "backward"):
        flops = [
            sum(op.flops.per_sequence for op in getattr(work, phase).operations) for work in (full, split)
        ]
        assert flops[0] == 4 * flops[1]
    assert split.output.per_sequence == full.output.per_sequence / 4, (
        "sequence parallel: a quarter of the tokens"
    )
    assert (
        full.saved_bytes.per_sequence / 4
        <= split.saved_bytes.per_sequence
        < full.saved_bytes.per_sequence / 2
    )
    sent = [op.name for op in split.forward.operations if op.kind == "collective"]
    assert sent == ["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"]


@pytest.mark.sampled(3, day=0)
def test_modules_come_in_the_plans_order_and_blocks_share_their_work() -> None:
    config = parse_config(SMALL)
    work = work_of(*SMALL)
    assert tuple(work.modules) == plan_run(config.job, 1, 8).modules
    assert work.modules["layers.0"] is work.modules["layers.2"]
    assert (work.logits, work.seq_len, work.tables) == ("head", 64, 64 * 8 * 4)
    counts = model_of(config.model).units.modules
    assert {name: module.parameters for name, module in work.modules.items()} == counts


@pytest.mark.sampled(3, day=1)
def test_weights_have_their_rows_and_add_up_to_the_parameters() -> None:
    block = block_8b("--parallel.tp=4")
    assert block.weights[1] == (4096 // 4, 4096), "wq: rows are split"
    assert block.weights[4] == (4096, 4096 // 4), "wo: columns are"
    assert sum(rows * values for rows, values in block.weights) == block.parameters


def test_tied_embeddings_count_once() -> None:
    work = work_of(*SMALL, EAGER, "--model.tie_embeddings=true")
    assert (work.modules["tok_embeddings"].parameters, work.modules["tok_embeddings"].weights) == (0, ())
    assert work.modules["head"].parameters == 264 * 32 + 32


@pytest.mark.slow
@pytest.mark.sampled(6)
def test_tracing_leaves_nothing_behind_that_a_run_would_notice() -> None:
    """A shape that no other test has, so that it is not cached."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = parse_config([*SMALL, "--model.ffn_dim=72"])
    model_workload(config.model, plan_run(config.job, 1, 8), config.train.seq_len)
    assert count_compiled_graphs() == 0
    assert torch.get_default_dtype() is torch.float32
    assert not dist.is_initialized()

    module = Doubling()
    module.compile(fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert type(module(torch.ones(2, 4)).detach()) is torch.Tensor
    assert count_compiled_graphs() == 1
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def test_dtypes_are_those_of_the_unit() -> None:
    for dtype, module in (("float32", work_of(*SMALL).modules["layers.1"]), ("bfloat16", block_8b())):
        assert {op.dtype for op in module.forward.operations if op.kind == "matmul"} == {dtype}


def test_a_block_of_another_setting_is_traced_by_itself() -> None:
    """Every other block is recomputed."""
    keys = ("--parallel.activation_checkpoint=selective", "--parallel.selective_policy=every:2")
    work = work_of(*SMALL, EAGER, *keys)
    alone = work_of(*SMALL, EAGER).modules["layers.0"]
    kept = [work.modules[f"layers.{i}"].saved_bytes for i in range(3)]
    assert sorted({k.per_sequence for k in kept}) == sorted({64 * 32 * 4, alone.saved_bytes.per_sequence})
    assert dataclasses.astuple(kept[0]) == dataclasses.astuple(kept[2])


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_activation_checkpointing_shares_one_captured_graph(monkeypatch) -> None:
    """Except where a saved operator is decomposed, so that only torch knows which results are its own."""
    captured = list[object]()

    def count(build, sequences):
        captured.append(build)
        return capture_joint(build, sequences)

    monkeypatch.setattr(trace_model, "capture_joint", count)

    def trace(*keys: str) -> ModuleWorkload:
        job = parse_config(["--config=llama_debug.yaml", "--train.seq_len=48", *keys]).job
        return model_workload(job.model, plan_run(job, 1), 48).modules["layers.0"]

    modes = ("none", "full", "selective", "budget")
    kept = [trace(f"--parallel.activation_checkpoint={mode}").saved_bytes.at(1) for mode in modes]
    assert len(captured) == 2, captured  # a block, and the head
    assert kept[1] < kept[2] < kept[0]
    selective = "--parallel.activation_checkpoint=selective"
    assert trace(selective, "--parallel.selective_policy=aten.silu") != trace(selective)
    assert len(captured) == 3
