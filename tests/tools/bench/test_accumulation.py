"""The comparison of the ways to accumulate gradients."""

import dataclasses

import pytest

from meshwright.parallel.errors import PlanError
from meshwright.parallel.planner.hardware import load_hardware
from meshwright.tools.bench.planner import accumulation
from meshwright.tools.bench.planner.accumulation import (
    DEFAULT,
    MICRO_BATCHES,
    PlannedCell,
    choose,
    planned_text,
    way_cases,
    way_rows,
    ways_text,
)
from meshwright.tools.bench.planner.predictions import Predicted
from meshwright.tools.bench.train_run import RunFigures
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.resolve import plan_run

BEST = ("false", "false", "last_micro_batch")
PLANNED = (
    *("--parallel.plan=auto", "--train.micro_batch_size=1", "--train.global_batch_size=64"),
    *("--parallel.tp=1", "--parallel.dp_replicate=1", "--parallel.activation_checkpoint=none"),
)


def figures(step_s: float, gib: float) -> RunFigures:
    return RunFigures("CPU", 1.0, 1.0, 1.0, gib, 0, 0.0, [9.0] * 4 + [step_s] * 3)


def test_every_way_is_another_plan_with_four_micro_batches() -> None:
    plans = {way: plan_run(parse_config(case.keys).job, case.processes) for way, case in way_cases(2).items()}
    assert len(plans) == 8
    assert next(iter(plans)) == DEFAULT
    assert {plan.accumulation for plan in plans.values()} == {MICRO_BATCHES}
    for way, plan in plans.items():
        unit = plan.units[1]
        settings = unit.reshard_after_forward, unit.reshard_after_backward, unit.reduce_gradients
        assert tuple(str(value).lower() for value in settings) == way


def test_ways_are_compared_with_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {way: case for way, case in way_cases(2).items() if way in (DEFAULT, BEST)}
    jobs = {way: parse_config(case.keys).job for way, case in cases.items()}
    predicted = {id(jobs[DEFAULT]): Predicted(4.0, 1.0), id(jobs[BEST]): Predicted(2.0, 1.5)}
    monkeypatch.setattr(accumulation, "predict_run", lambda job, *_: predicted[id(job)])
    runs = {DEFAULT: [figures(3.0, 1.0)], BEST: [figures(2.0, 1.25)]}
    default, best = way_rows(2, jobs, runs, load_hardware()["cpu"])
    assert (default.measured_speed, default.measured_more_mib) == (1, 0)
    assert (best.predicted_speed, best.measured_speed) == (2, 1.5)
    assert (best.predicted_more_mib, best.measured_more_mib) == (512, 256)
    assert best.tokens_per_s == 32 * MICRO_BATCHES * 2 / 2.0
    assert "false / false / last" in ways_text([default, best])


@pytest.mark.filterwarnings("ignore")  # the compiler traces in this process
def test_a_plan_that_does_not_fit_is_told_from_one_that_is_illegal() -> None:
    hardware = load_hardware()["h100-sxm"]
    assert choose(PLANNED, 16, dataclasses.replace(hardware, memory_gib=0.01)) is None
    with pytest.raises(PlanError, match="tp=3"):
        choose([*PLANNED, "--parallel.tp=3"], 16, hardware)


@pytest.mark.filterwarnings("ignore")
def test_a_prediction_names_the_ways_and_that_nothing_was_measured() -> None:
    hardware = load_hardware()["h100-sxm"]
    slow = dataclasses.replace(hardware, network=dataclasses.replace(hardware.network, gb_s=5.0))
    chosen, today = (choose([*PLANNED, *way], 16, slow) for way in ((), accumulation.TODAY))
    assert chosen is not None
    assert today is not None
    assert chosen.rate() > today.rate()
    cells = [PlannedCell("debug", 16, "40 Gb/s", chosen, today), PlannedCell("x", 8, "none", None, None)]
    text = planned_text(cells)
    assert "| last | " in text
    assert f" | 4 | {chosen.rate() / today.rate():.2f} |" in text
    assert "| x | 8 | none | does not fit |" in text
    assert "nothing is measured" in text
