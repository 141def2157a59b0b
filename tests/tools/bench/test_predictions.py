"""tools.bench predictions: errors, order and regret checked by hand, and runs that the planner can plan."""

import dataclasses
import re

import pytest

from meshwright.parallel.planner.hardware import load_hardware
from meshwright.tools.bench.planner.predictions import (
    Predicted,
    PredictionCase,
    PredictionRow,
    cpu_cases,
    kendall_tau,
    predict_run,
    predictions_text,
    regrets,
    step_seconds,
    summarize,
)
from meshwright.tools.bench.train_run import WARM_UP_STEPS, RunFigures
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.resolve import plan_run


def row(name: str, sweep: str, predicted_s: float, measured_s: float, choice: bool = True) -> PredictionRow:
    return PredictionRow(name, sweep, choice, predicted_s, measured_s)


def run_of(*step_times_s: float) -> RunFigures:
    return RunFigures("CPU", 1.0, 1.0, 1.0, 0.5, 0, 0.0, [*([9.0] * WARM_UP_STEPS), *step_times_s])


@pytest.mark.parametrize(
    ("first", "second", "tau"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3, 4], [1, 2, 4, 3], 4 / 6),  # one of six pairs in the opposite order
        ([1, 1, 3], [1, 2, 3], 2 / 3),  # a tie
        ([1], [1], 1.0),
    ],
)
def test_kendall_tau(first: list[float], second: list[float], tau: float) -> None:
    assert kendall_tau(first, second) == pytest.approx(tau)


def test_regret_is_what_the_choice_costs() -> None:
    rows = [
        row("a", "x", 1.0, 1.1),
        row("b", "x", 1.2, 1.0),
        row("c", "x", 0.5, 0.1, choice=False),
        row("a", "y", 1.0, 1.0),
        row("b", "y", 2.0, 3.0),
        row("alone", "z", 1.0, 1.0),
    ]
    assert regrets(rows) == {"x": pytest.approx(0.1), "y": 0.0}


def test_the_warm_up_does_not_count() -> None:
    assert step_seconds([run_of(1.0, 3.0, 2.0), run_of(4.0, 5.0)]) == 3.0
    short = dataclasses.replace(run_of(), step_times_s=[9.0, 2.0])
    assert step_seconds([short]) == 2.0  # only the last step of a run as short as the warm-up


def test_errors_are_relative_to_what_was_measured() -> None:
    rows = [row("a", "m", 1.1, 1.0), row("b", "m", 1.4, 2.0)]
    assert [row.error for row in rows] == pytest.approx([0.1, -0.3])
    figures = summarize(rows)
    assert figures["mean_error"] == pytest.approx(0.2)
    assert figures["worst_error"] == pytest.approx(0.3)


def test_the_text_shows_every_run_and_what_is_asked_for() -> None:
    rows = [row("first", "x", 1.0, 2.0), row("second", "x", 2.0, 1.0)]
    text = predictions_text(rows)
    assert "first   1,000         2,000        -50.0%" in text
    assert re.search(
        r"mean error 75.0% \(.*6%\), worst 100.0% \(.*15%\), on average \+25.0%; Kendall's tau -1.00 \(.*0.8",
        text,
    )
    assert "chosen for x: 100.0% slower" in text


def test_every_run_has_a_legal_plan_of_its_own() -> None:
    cases = cpu_cases()
    assert len({case.name for case in cases}) == len(cases) >= 12
    plans = []
    for case in cases:
        config = parse_config([*case.keys, "--train.steps=3"], "test")
        plan = plan_run(config.job, case.processes)
        plans.append((config.model, plan, config.train.seq_len, config.parallel.compile))
    assert all(plan not in plans[:i] for i, plan in enumerate(plans))


def test_runs_alike_but_for_the_plan_are_one_sweep() -> None:
    sweeps: dict[str, list[PredictionCase]] = {}
    for case in cpu_cases():
        sweeps.setdefault(case.sweep, []).append(case)
    largest = max(sweeps.values(), key=len)
    configs = [parse_config(list(case.keys), "test") for case in largest]
    assert (
        len({(config.model, config.train.global_batch_size, config.train.seq_len) for config in configs}) == 1
    )
    degrees = {(c.parallel.dp_replicate, c.parallel.dp_shard, c.parallel.tp) for c in configs}
    assert degrees == {(2, 1, 1), (1, 2, 1), (1, 1, 2)}  # all combinations on 2 ranks


# torch's compiler reads .grad of every input
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_predictions_follow_the_plan() -> None:
    cases = {case.name: case for case in cpu_cases()}
    hardware = load_hardware()["cpu"]

    def predicted(name: str) -> Predicted:
        job = parse_config(list(cases[name].keys), "test").job
        return predict_run(job, cases[name].processes, threads=1, hardware=hardware)

    plain, full = predicted("small 1x2x1 none"), predicted("small 1x2x1 full")
    assert full.step_s > plain.step_s
    assert full.peak_gib < plain.peak_gib
    assert predicted("small 1x1x1 none").step_s > 1.5 * plain.step_s  # one thread, twice the work
