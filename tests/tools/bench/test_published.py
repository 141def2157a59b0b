"""The planner's predictions of published runs, and the code that compares them."""

import dataclasses
from functools import cache

import pytest

from meshwright.parallel.planner.hardware import HARDWARE_FOLDER, MOST_FITTED, load_hardware
from meshwright.tools.bench.planner.published import (
    FLOAT8,
    KINDS,
    ComparedRun,
    PublishedComparison,
    compare_published,
    compiled,
    mean_error,
    plan_published,
    published_figures,
    published_rows,
    published_text,
    worst_error,
    wrong_order,
)

# The compiler traces in this process and emits several warnings.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.sampled(10, together="published"),
    pytest.mark.filterwarnings("ignore"),
]
RUNS = published_rows()
# 70B on 32 H200: the network's share was fitted when KempnerForge was predicted to reduce every micro batch,
# which it does not
WORST = 0.20


@cache
def comparison() -> PublishedComparison:
    return compare_published(RUNS)


def test_every_published_run_is_read() -> None:
    assert len(RUNS) == 16
    last = RUNS[-1]
    assert (last.framework, last.n_gpus, last.dp_shard, last.tp, last.tokens_per_s_per_gpu) == (
        "KempnerForge",
        32,
        8,
        4,
        552.0,
    )
    assert [run.async_tp for run in RUNS].count(True) == 1
    assert [run.compile for run in RUNS].count(False) == 2
    assert [run.peak_memory_gib for run in RUNS].count(0.0) == 3
    assert len({run.name for run in RUNS}) == 16


def test_each_run_becomes_the_plan_it_was() -> None:
    for run in RUNS:
        _, plan = plan_published(run)
        assert (plan.mesh.dp_replicate, plan.mesh.dp_shard, plan.mesh.tp) == (
            run.dp_replicate,
            run.dp_shard,
            run.tp,
        )
        assert (plan.micro_batch_size, plan.accumulation) == (run.micro_batch, run.grad_accum)
        assert {unit.activation_checkpoint for unit in plan.units[1:-1]} == {run.activation_checkpoint}
        assert {unit.compiled for unit in plan.units[1:-1]} == {run.compile}
        assert not (plan.units[-1].compiled and run.framework == "torchtitan")
        assert run.matmul_dtype in FLOAT8


def test_some_runs_of_each_source_are_not_fitted_to() -> None:
    for framework, kind in KINDS.items():
        rows = [run for run in RUNS if run.framework == framework and run.compile]
        not_fitted = [run for run in rows if not run.used_to_fit]
        assert 2 <= len(not_fitted) < len(rows)
        assert 0 < len(load_hardware()[kind].fitted) <= MOST_FITTED
        assert "fitted" in (HARDWARE_FOLDER / f"{kind}.yaml").read_text().split("fitted:")[0], (
            "the comments next to the values name the fit"
        )


def test_speed_of_compiled_runs_is_predicted() -> None:
    rows = compiled(comparison().speed)
    assert len(rows) == 14
    assert mean_error(rows) <= 0.08
    assert worst_error(rows) <= WORST


def test_speed_of_runs_not_fitted_to_is_predicted_as_well() -> None:
    rows = [row for row in comparison().speed if not row.run.used_to_fit]
    assert mean_error(rows) <= 0.08
    assert worst_error(rows) <= WORST


def test_reserved_memory_is_predicted() -> None:
    rows = comparison().memory
    assert len(rows) == 6
    assert mean_error(rows) <= 0.08
    assert worst_error(rows) <= 0.12


def test_runs_that_differ_are_predicted_in_the_right_order() -> None:
    assert comparison().wrong_order == ()


def test_a_wrong_order_is_seen() -> None:
    runs = [run for run in RUNS if run.framework == "KempnerForge"][:3]
    other = next(run for run in RUNS if run.framework == "torchtitan")

    def pairs(*predicted: float) -> list[tuple[float, float]]:
        measured = (100.0, 109.5, 120.0)
        rows = [ComparedRun(run, p, m) for run, p, m in zip(runs, predicted, measured, strict=True)]
        return [
            (fast.measured, slow.measured)
            for fast, slow in wrong_order([*rows, ComparedRun(other, 1.0, 1000.0)])
        ]

    assert pairs(1, 2, 3) == []
    assert pairs(3, 2, 4) == []  # 9% apart: neither order is wrong
    assert pairs(5, 4, 4.5) == [(120.0, 100.0)]
    assert pairs(4, 6, 5) == []  # 120 is less than 10% above 109.5
    assert pairs(5, 4, 5) == [(120.0, 100.0)]  # equal predictions have no order


def test_errors_are_relative_to_what_was_measured() -> None:
    rows = [ComparedRun(RUNS[0], 110.0, 100.0), ComparedRun(RUNS[1], 80.0, 100.0)]
    assert [row.error for row in rows] == pytest.approx([0.1, -0.2])
    assert mean_error(rows) == pytest.approx(0.15)
    assert worst_error(rows) == pytest.approx(0.2)


def test_the_report_shows_every_row_once_and_says_which_were_fitted_to() -> None:
    text, figures = published_text(comparison()), published_figures(comparison())
    assert len(figures["tokens_per_s_per_gpu"]) == 16
    assert figures["wrong_order"] == []
    for quantity in ("tokens per second per GPU", "reserved GiB"):
        assert all(f"\n{quantity}, {group} " in f"\n{text}" for group in ("fitted to", "not fitted to"))
    for run in RUNS:
        lines = [line for line in text.splitlines() if line.startswith(f"{run.name} ")]
        assert len(lines) == 1 + (run.framework == "torchtitan" and run.peak_memory_gib > 0)


def test_a_report_names_a_pair_in_the_wrong_order() -> None:
    wrong = dataclasses.replace(comparison(), wrong_order=((RUNS[1], RUNS[0]),))
    assert f"wrong order: 1\n  {RUNS[1].name} is faster than {RUNS[0].name}" in published_text(wrong)
