"""Poor plans get advice, good plans get none."""

from typing import Any

from meshwright.parallel.config import CompileConfig, ParallelConfig
from meshwright.parallel.plan.lint import GRAPH_MODES, advise, unused_keys
from tests.support.plans import check_facts, plan_of
from tests.support.tables import try_each

GOOD: list[tuple[int, dict[str, Any]]] = [
    (8, {}),
    (32, {"strategy": "hybrid_shard"}),
    (32, {"tp": 2, "strategy": "hybrid_shard"}),
    (64, {"dp_replicate": 32, "dp_shard": 2}),
    (8, {"tp": 2, "dp_shard": 4}),
    (8, {"cpu_offload": True}),
    (8, {"compile": CompileConfig(mode="max-autotune-no-cudagraphs")}),
    (8, {"compile": CompileConfig(mode="max-autotune", enabled=False)}),
]


def test_a_good_plan_gets_no_advice() -> None:
    def check(world_size: int, keys: dict[str, Any]) -> None:
        assert advise(plan_of(world_size, **keys), 8) == []

    try_each(GOOD, check)


POOR: list[tuple[int, dict[str, Any], str]] = [
    (1, {}, "one process ... nothing is sharded"),
    (8, {"dp_replicate": 2}, "dp_replicate=2 ... single node ... use dp_shard=8"),
    (24, {"dp_replicate": 2}, "dp_shard x tp = 12 ... 8 processes of a node"),
    (8, {"strategy": "ddp"}, "dp_shard=1 ... all parameters ... dp_shard=8"),
    (1, {"cpu_offload": True}, "cpu_offload ... one process"),
    (8, {"tp": 2, "tp_modules": ()}, "tp=2 splits no part ... use tp=1"),
    (8, {"compile": CompileConfig(mode="reduce-overhead")}, "compile.mode=reduce-overhead ... CUDA graphs"),
    (8, {"compile": CompileConfig(mode="max-autotune")}, "max-autotune ... use max-autotune-no-cudagraphs"),
]


def test_a_poor_plan_is_told_why_and_what_is_better() -> None:
    def check(world_size: int, keys: dict[str, Any], facts: str) -> None:
        sentences = advise(plan_of(world_size, **keys), 8)
        assert not any("\n" in sentence for sentence in sentences)
        check_facts(" ".join(sentences), facts)

    try_each(POOR, check)


def test_degrees_are_compared_with_the_size_of_a_node() -> None:
    plan = plan_of(16, tp=8)
    assert advise(plan, 8) == []
    check_facts(advise(plan, 4)[0], "tp=8 ... 4 processes of a node ... use a degree within one")
    assert advise(plan_of(8, dp_replicate=2), 4) == [], "two nodes of four"


UNUSED: list[tuple[dict[str, Any], str]] = [
    ({"activation_budget": 0.3}, "parallel.activation_budget=0.3 ... parallel.activation_checkpoint=auto"),
    (
        {"selective_policy": "attention", "activation_checkpoint": "full"},
        "parallel.selective_policy=attention ... parallel.activation_checkpoint=full",
    ),
    ({"sequence_parallel": False}, "parallel.sequence_parallel=false ... parallel.tp=auto ... 2 or more"),
    ({"tp_modules": ("head",), "tp": 1}, "parallel.tp_modules=('head',) ... parallel.tp=1"),
    (
        {"compile": CompileConfig(False, mode="max-autotune", float32_matmul_precision="high")},
        "parallel.compile.mode ... parallel.compile.enabled=false",
    ),
]


def test_a_key_without_effect_is_told() -> None:
    def check(keys: dict[str, Any], facts: str) -> None:
        (sentence,) = unused_keys(ParallelConfig(**keys))
        check_facts(sentence, facts)

    try_each(UNUSED, check)
    for used in (
        {},
        {"activation_checkpoint": "budget", "activation_budget": 0.3},
        {"tp": 2, "sequence_parallel": False},
        {"plan": "a.yaml", "sequence_parallel": False},
    ):
        assert unused_keys(ParallelConfig(**used)) == []


def test_the_modes_that_capture_cuda_graphs_are_those_of_this_torch() -> None:
    from torch._inductor import list_mode_options

    modes = {mode for mode, options in list_mode_options().items() if options.get("triton.cudagraphs")}
    assert modes == set(GRAPH_MODES)
