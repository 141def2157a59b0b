"""tools.bench predictions: errors, order and regret checked by hand, and runs that the planner can plan."""

import pytest

from meshwright.parallel.planner.hardware import load_hardware
from meshwright.tools.bench.planner.predictions import (
    Predicted,
    PredictionRow,
    cpu_cases,
    kendall_tau,
    predict_run,
    regrets,
    summarize,
)
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.resolve import plan_run

pytestmark = [pytest.mark.slow, pytest.mark.sampled(10, together="bench-planner")]


def row(name: str, sweep: str, predicted_s: float, measured_s: float, choice: bool = True) -> PredictionRow:
    return PredictionRow(name, sweep, choice, predicted_s, measured_s)


def test_order_regret_and_errors_by_hand() -> None:
    for first, second, tau in (
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3, 4], [1, 2, 4, 3], 4 / 6),  # one of six pairs in the opposite order
        ([1, 1, 3], [1, 2, 3], 2 / 3),  # a tie
        ([1], [1], 1.0),
    ):
        assert kendall_tau(first, second) == pytest.approx(tau)
    rows = [
        row("a", "x", 1.0, 1.1),
        row("b", "x", 1.2, 1.0),
        row("c", "x", 0.5, 0.1, choice=False),
        row("a", "y", 1.0, 1.0),
        row("b", "y", 2.0, 3.0),
        row("alone", "z", 1.0, 1.0),
    ]
    assert regrets(rows) == {"x": pytest.approx(0.1), "y": 0.0}
    figures = summarize([row("a", "x", 1.1, 1.0), row("b", "x", 0.7, 1.0)])
    assert figures["mean_error"] == pytest.approx(0.2)
    assert figures["worst_error"] == pytest.approx(0.3)


def test_every_run_has_a_legal_plan_of_its_own_and_sweeps_differ_only_in_it() -> None:
    plans, sweeps = list[object](), dict[str, set[object]]()
    for case in cpu_cases():
        config = parse_config([*case.keys, "--train.steps=3"], "test")
        plan = plan_run(config.job, case.processes)
        plans.append((config.model, plan, config.train.seq_len, config.parallel.compile))
        size = (config.model, config.train.global_batch_size, config.train.seq_len)
        sweeps.setdefault(case.sweep, set()).add(size)
    assert len(plans) >= 12
    assert all(plan not in plans[:i] for i, plan in enumerate(plans))
    assert {len(sizes) for sizes in sweeps.values()} == {1}


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
