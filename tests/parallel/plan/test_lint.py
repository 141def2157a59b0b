"""Poor plans get advice, good plans get none."""

from typing import Any

import pytest

from meshwright.parallel.config import CompileConfig, ParallelConfig
from meshwright.parallel.plan.lint import GRAPH_MODES, advise, unused_keys
from tests.support.plans import plan_of

GOOD: list[tuple[int, dict[str, Any]]] = [
    (8, {}),
    (32, {}),
    (32, {"strategy": "hybrid_shard"}),
    (32, {"tp": 8}),
    (32, {"tp": 2, "strategy": "hybrid_shard"}),
    (64, {"dp_replicate": 32, "dp_shard": 2}),
    (32, {"dp_replicate": 2}),
    (8, {"tp": 8}),
    (8, {"tp": 2, "dp_shard": 4}),
    (8, {"cpu_offload": True}),
    (8, {"compile": CompileConfig(mode="max-autotune-no-cudagraphs")}),
    (8, {"compile": CompileConfig(mode="max-autotune", enabled=False)}),
]


@pytest.mark.parametrize(("world_size", "keys"), GOOD, ids=str)
def test_a_good_plan_gets_no_advice(world_size: int, keys: dict[str, Any]) -> None:
    assert advise(plan_of(world_size, **keys), 8) == []


POOR: list[tuple[int, dict[str, Any], str]] = [
    (1, {}, "one process: nothing is sharded"),
    (8, {"dp_replicate": 2}, "dp_replicate=2 within a single node"),
    (
        24,
        {"dp_replicate": 2},
        "dp_shard x tp = 12 is neither a part nor a multiple of the 8 processes",
    ),
    (8, {"strategy": "ddp"}, "dp_shard=1: every process holds all parameters"),
    (1, {"cpu_offload": True}, "cpu_offload with one process"),
    (8, {"tp": 2, "tp_modules": ()}, "tp=2 splits no part of the model"),
    (
        8,
        {"compile": CompileConfig(mode="reduce-overhead")},
        "compile.mode=reduce-overhead captures CUDA graphs",
    ),
    (8, {"compile": CompileConfig(mode="max-autotune")}, "compile.mode=max-autotune captures CUDA graphs"),
]


@pytest.mark.parametrize(("world_size", "keys", "words"), POOR, ids=str)
def test_a_poor_plan_is_told_why(world_size: int, keys: dict[str, Any], words: str) -> None:
    assert any(sentence.startswith(words) for sentence in advise(plan_of(world_size, **keys), 8))


def test_tp_across_nodes_is_told_and_how_to_avoid_it() -> None:
    plan = plan_of(16, tp=8)
    assert advise(plan, 8) == []
    sentence, *_ = advise(plan, 4)
    assert sentence.startswith("tp=8 does not divide the 4 processes of a node")
    assert sentence.endswith("use a degree within one")


def test_sentences_are_sentences_of_one_line() -> None:
    for world_size, keys, _ in POOR:
        for sentence in advise(plan_of(world_size, **keys), 8):
            assert "\n" not in sentence
            assert len(sentence) > 20


def test_hsdp_within_a_node_says_the_better_degree() -> None:
    (sentence,) = advise(plan_of(8, dp_replicate=2), 8)
    assert sentence.endswith("use dp_shard=8")
    assert advise(plan_of(8, dp_replicate=2), 4) == [], "two nodes of four"


UNUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"activation_budget": 0.3},
        "parallel.activation_budget=0.3 has no effect with parallel.activation_checkpoint=auto",
    ),
    (
        {"selective_policy": "attention", "activation_checkpoint": "full"},
        "parallel.selective_policy=attention has no effect",
    ),
    (
        {"sequence_parallel": False},
        "parallel.sequence_parallel=false has no effect with parallel.tp=auto: it needs 2 or more",
    ),
    ({"tp_modules": ("head",), "tp": 1}, "parallel.tp_modules=('head',) has no effect with parallel.tp=1"),
]


@pytest.mark.parametrize(("keys", "words"), UNUSED, ids=str)
def test_a_key_without_effect_is_told(keys: dict[str, Any], words: str) -> None:
    (sentence,) = unused_keys(ParallelConfig(**keys))
    assert sentence.startswith(words)


def test_settings_of_a_compiler_that_is_off_are_told() -> None:
    off = CompileConfig(enabled=False, mode="max-autotune", float32_matmul_precision="high")
    assert unused_keys(ParallelConfig(compile=off)) == [
        "parallel.compile.mode has no effect with parallel.compile.enabled=false"
    ]


USED: list[dict[str, Any]] = [
    {},
    {"activation_checkpoint": "budget", "activation_budget": 0.3},
    {"tp": 2, "sequence_parallel": False},
    {"plan": "a.yaml", "sequence_parallel": False},
]


@pytest.mark.parametrize("keys", USED, ids=str)
def test_a_key_with_an_effect_is_not(keys: dict[str, Any]) -> None:
    assert unused_keys(ParallelConfig(**keys)) == []


def test_the_modes_that_capture_cuda_graphs_are_those_of_this_torch() -> None:
    from torch._inductor import list_mode_options

    assert {mode for mode, options in list_mode_options().items() if options.get("triton.cudagraphs")} == set(
        GRAPH_MODES
    )
