"""The planner's memory predictions compared with the real code on fake tensors: a few small plans of the
benchmark's kind, within its targets."""

import pytest

from benchmarks.memory import EXACT_ERROR, MEAN_ERROR, PlanCase, compare_case, compare_dry_run, read_cases
from meshwright.tools.dryrun.install import FakeGpuError
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.resolve import plan_run
from tests.fake_gpu.commands import install_for_tests

pytestmark = [pytest.mark.slow, pytest.mark.sampled(10, together="bench-memory")]
SMALL = "model.n_layers=2 train.seq_len=1024"
CASES = [
    PlanCase("llama_8b", ranks, f"{SMALL} {keys}")
    for ranks, keys in (
        (8, ""),
        (
            16,
            "parallel.dp_replicate=2 parallel.activation_checkpoint=full train.global_batch_size=64 "
            "train.micro_batch_size=2 model.vocab_size=1024",
        ),
        (8, "parallel.tp=4 parallel.activation_checkpoint=selective parallel.reduce_dtype=bfloat16"),
        (
            2048,
            "parallel.forward_prefetch=0 parallel.backward_prefetch=2 "
            "parallel.activation_checkpoint=selective parallel.selective_policy=every:2",
        ),
        (8, "parallel.strategy=ddp model.vocab_size=1024"),
        (8, "parallel.cpu_offload=true train.freeze=[tok_embeddings.*,layers.0.*]"),
    )
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.ranks} ranks, {case.name}")
def test_a_plan_is_predicted_as_it_is_simulated(case: PlanCase) -> None:
    row = compare_case(case)
    assert abs(row.exact_error) <= EXACT_ERROR
    assert abs(row.peak_error) <= MEAN_ERROR, row


def test_the_benchmark_compares_plans_of_all_sizes_that_can_be_made() -> None:
    cases = read_cases()
    assert len(set(cases)) == len(cases) >= 30
    for case in cases:
        plan = plan_run(parse_config(case.arguments).job, case.ranks, 8)
        assert not plan.compile.enabled, "simulations run without compilation"
    assert {case.config for case in cases} == {"llama_8b", "llama_70b", "llama_405b"}


def test_a_model_of_transformers_is_predicted_as_it_runs_on_the_fake_gpu() -> None:
    try:
        cache = str(install_for_tests().site.parent)
    except FakeGpuError as error:
        pytest.skip(str(error))
    row = compare_dry_run("qwen3_8b", ["--cache", cache])
    assert row.within, row
    assert row.host_waits == 0
