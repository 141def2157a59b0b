"""The planner's memory predictions compared with the real code on fake tensors: a few small plans of the
benchmark's kind, within its targets."""

import argparse
import dataclasses
from pathlib import Path

import pytest

from meshwright.parallel.memory_breakdown import MemoryBreakdown, StepMemory
from meshwright.tools.bench.planner import memory
from meshwright.tools.bench.planner.memory import (
    EXACT_ERROR,
    MEAN_ERROR,
    WORST_ERROR,
    MemoryRow,
    PlanCase,
    compare_case,
    compare_memory,
    memory_text,
    read_cases,
    relative_error,
    summarize,
)
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.resolve import plan_run

SMALL = "model.n_layers=2 train.seq_len=1024"
FAST = [
    PlanCase("llama_8b", 8, SMALL),
    PlanCase(
        "llama_8b",
        16,
        f"{SMALL} parallel.dp_replicate=2 parallel.activation_checkpoint=full train.global_batch_size=64 "
        "train.micro_batch_size=2 model.vocab_size=1024",
    ),
    PlanCase(
        "llama_8b",
        8,
        f"{SMALL} parallel.tp=4 parallel.activation_checkpoint=selective parallel.reduce_dtype=bfloat16",
    ),
    PlanCase(
        "llama_8b",
        2048,
        f"{SMALL} parallel.forward_prefetch=0 parallel.backward_prefetch=2 "
        "parallel.activation_checkpoint=selective parallel.selective_policy=every:2",
    ),
    PlanCase("llama_8b", 8, f"{SMALL} parallel.strategy=ddp model.vocab_size=1024"),
    PlanCase("llama_8b", 8, f"{SMALL} parallel.cpu_offload=true train.freeze=[tok_embeddings.*,layers.0.*]"),
]


@pytest.mark.parametrize("case", FAST, ids=lambda case: f"{case.ranks} ranks, {case.name}")
def test_a_plan_is_predicted_as_it_is_simulated(case: PlanCase) -> None:
    row = compare_case(case)
    assert abs(row.exact_error) <= EXACT_ERROR
    assert abs(row.peak_error) <= MEAN_ERROR, row.predicted.at_peak.gib() | {
        "simulated": row.simulated.at_peak.gib()
    }


def test_the_benchmark_compares_at_least_30_plans_that_can_be_made() -> None:
    cases = read_cases()
    assert len(set(cases)) == len(cases) >= 30
    for case in cases:
        config = parse_config(case.arguments)
        plan = plan_run(config.job, case.ranks, 8)
        assert not plan.compile.enabled, "simulations run without compilation"
    assert {case.config for case in cases} == {"llama_8b", "llama_70b", "llama_405b"}
    assert max(case.ranks for case in cases) == 4096


def row_of(predicted: int, simulated: int, exact: tuple[int, int] = (1000, 1000)) -> MemoryRow:
    pairs = zip(exact, (predicted, simulated), strict=True)
    figures = [
        StepMemory(MemoryBreakdown(params=params), MemoryBreakdown(activations=peak))
        for params, peak in pairs
    ]
    return MemoryRow(FAST[0], *figures)


def test_errors_are_relative_to_the_simulation() -> None:
    row = row_of(103, 100, exact=(990, 1000))
    assert row.peak_error == pytest.approx(0.03)
    assert row.exact_error == pytest.approx(-0.01)
    assert (relative_error(0, 0), relative_error(1, 0)) == (0.0, float("inf"))


@pytest.mark.parametrize(
    ("rows", "within"),
    [
        ([row_of(1029, 1000), row_of(971, 1000)], True),
        ([row_of(1079, 1000), row_of(1000, 1000), row_of(1000, 1000)], True),
        ([row_of(104, 100), row_of(97, 100)], False),
        ([row_of(91, 100), *[row_of(100, 100)] * 9], False),
        ([row_of(100, 100, exact=(1011, 1000))], False),
    ],
    ids=["all within", "one far off", "mean", "worst missed", "exact missed"],
)
def test_what_is_asked_is_a_mean_a_worst_and_an_exact_error(rows: list[MemoryRow], within: bool) -> None:
    figures = summarize(rows)
    assert figures["within"] is within
    assert ("NOT within" in memory_text(rows)) is not within
    assert figures["worst_error"] <= WORST_ERROR or not within


def test_the_benchmark_gives_every_row_and_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = tmp_path / "plans.csv"
    plans.write_text(f"# one plan\nconfig,ranks,keys\n{FAST[4].config},{FAST[4].ranks},{FAST[4].keys}\n")
    monkeypatch.setattr(memory, "PLANS", plans)
    result = compare_memory(argparse.Namespace(), ["--model.n_layers=1"])
    figures = result.figures
    (row,) = figures["rows"]
    assert row["keys"] == FAST[4].keys
    assert row["predicted_peak_gib"] == pytest.approx(row["simulated_peak_gib"], rel=MEAN_ERROR)
    assert sum(row["predicted"]["at_peak"].values()) == pytest.approx(row["predicted_peak_gib"])
    assert figures["mean_error"] == abs(row["peak_error"])
    assert "1 plans; peak: mean error" in result.text
    assert dataclasses.asdict(FAST[4]).items() <= row.items()
    assert "llama_8b 8" in capsys.readouterr().err
