"""The planner's predictions of published runs, and the code that compares them."""

import dataclasses
import re
from functools import cache

import pytest

from meshwright.parallel.planner.hardware import HARDWARE_FOLDER, load_hardware
from meshwright.tools.bench.planner.fit import (
    CONSTANTS,
    KEMPNERFORGE,
    RESERVED,
    TORCHTITAN,
    Errors,
    fit,
    fit_reserved,
    fitted_keys,
    with_values,
)
from meshwright.tools.bench.planner.published import (
    FLOAT8,
    KINDS,
    ComparedRun,
    PublishedComparison,
    compare_published,
    mean_error,
    plan_published,
    predict_tokens_per_s,
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


@cache
def comparison() -> PublishedComparison:
    return compare_published(RUNS)


def test_every_published_run_is_read() -> None:
    assert len(RUNS) == 18
    last = RUNS[-1]
    assert (last.framework, last.n_gpus, last.dp_shard, last.tp, last.tokens_per_s_per_gpu) == (
        "torchtitan",
        128,
        16,
        8,
        177.0,
    )
    assert [run.async_tp for run in RUNS].count(True) == 1
    assert [run.compile for run in RUNS].count(False) == 2
    assert [run.peak_memory_gib for run in RUNS].count(0.0) == 4
    assert len({run.name for run in RUNS}) == 18


def test_each_run_becomes_the_plan_it_was() -> None:
    for run in RUNS:
        _, plan = plan_published(run)
        assert (plan.mesh.dp_replicate, plan.mesh.dp_shard, plan.mesh.tp) == (
            run.dp_replicate,
            run.dp_shard,
            run.tp,
        )
        assert (plan.micro_batch_size, plan.accumulation) == (run.micro_batch, run.grad_accum)
        blocks = [unit for unit in plan.units if unit.modules[0].startswith("layers.")]
        assert {unit.activation_checkpoint for unit in blocks} == {run.activation_checkpoint}
        assert {unit.compiled for unit in blocks} == {run.compile}
        assert not (plan.units[-1].compiled and run.framework == "torchtitan")
        assert (plan.units[0].modules == ("tok_embeddings", "head")) == (run.framework == "KempnerForge")
        assert run.matmul_dtype in FLOAT8


def test_fewer_constants_are_fitted_than_a_third_of_the_rows() -> None:
    assert len(CONSTANTS) + len(RESERVED) < len(RUNS) / 3
    kinds = load_hardware()
    of_files = {(kind, key) for kind in KINDS.values() for key in kinds[kind].fitted}
    assert of_files == fitted_keys()
    for kind, key in fitted_keys():
        text = (HARDWARE_FOLDER / f"{kind}.yaml").read_text()
        section = re.search(rf"^{key.split('.')[0]}:.*?(?=^[a-z])", text, re.MULTILINE | re.DOTALL)
        assert section, key
        assert "fitted to" in section[0], "the comment next to the value names the fit"


def test_the_files_have_the_fitted_values() -> None:
    given = load_hardware()
    fitted = with_values(given, fit(RUNS, given))
    for kind in (TORCHTITAN, KEMPNERFORGE):
        assert given[kind].network_slowdown == pytest.approx(fitted[kind].network_slowdown, rel=0.02)
    shares = [kinds[KEMPNERFORGE].network.efficiency["all_gather"] for kinds in (given, fitted)]
    assert shares[0] == pytest.approx(shares[1], rel=0.02)
    assert given[TORCHTITAN].reserved_share == pytest.approx(fit_reserved(RUNS, given), rel=0.02)


def test_a_fit_finds_the_constants_that_made_the_rows() -> None:
    true = [0.6, 0.05]
    kinds = with_values(load_hardware(), true)
    made = [
        dataclasses.replace(run, tokens_per_s_per_gpu=predict_tokens_per_s(run, kinds[run.kind]))
        for run in RUNS
    ]
    assert fit(made, load_hardware()) == pytest.approx(true, rel=0.1)


def test_errors_have_a_mean_a_worst_and_an_interval() -> None:
    errors = Errors((0.02, -0.04, 0.02))
    assert (errors.mean, errors.worst) == pytest.approx((0.08 / 3, 0.04))
    low, high = errors.interval
    assert (low + high) / 2 == pytest.approx(0.0)
    assert high == pytest.approx(1.645 * 0.0346410, rel=1e-4)


def test_speed_is_predicted() -> None:
    rows = comparison().speed
    assert len(rows) == 18
    assert mean_error(rows) <= 0.04
    assert worst_error(rows) <= 0.10


def test_reserved_memory_is_predicted() -> None:
    rows = comparison().memory
    assert len(rows) == 7
    assert mean_error(rows) <= 0.05
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


def test_the_report_shows_every_row_once() -> None:
    text, figures = published_text(comparison()), published_figures(comparison())
    assert len(figures["tokens_per_s_per_gpu"]) == 18
    assert figures["wrong_order"] == []
    for run in RUNS:
        lines = [line for line in text.splitlines() if line.startswith(f"{run.name} ")]
        assert len(lines) == 1 + (run.framework == "torchtitan" and run.peak_memory_gib > 0)


def test_a_report_names_a_pair_in_the_wrong_order() -> None:
    wrong = dataclasses.replace(comparison(), wrong_order=((RUNS[1], RUNS[0]),))
    assert f"wrong order: 1\n  {RUNS[1].name} is faster than {RUNS[0].name}" in published_text(wrong)
