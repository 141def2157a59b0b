"""Laws that hold for the simulated streams of any plan and any times."""

import dataclasses
import itertools
import random

import pytest

from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.cost_model import ModuleTimes, PhaseTimes, StepTimes, UnitTimes
from meshwright.parallel.planner.step_time import find_waits, run_tasks, simulate_step
from meshwright.parallel.planner.timeline import LANES, Timeline
from tests.support.plans import change, make_model, plan_of
from tests.support.simulated import launch_tasks


@pytest.mark.parametrize("seed", range(25))
def test_laws_of_any_step(seed):
    rng = random.Random(seed)
    plan, times = random_step(rng)
    times = with_random_host(times, rng)
    step = simulate_step(plan, times)
    assert step.compute_s + step.exposed_s + step.host_s == pytest.approx(step.step_s, abs=1e-9)
    assert sum(step.exposed_by_lane.values()) == pytest.approx(step.exposed_s, abs=1e-9)
    assert max(event.end_s for event in step.events) == pytest.approx(step.step_s, abs=1e-9)
    for lane in LANES:
        _check_no_overlap(step, {lane})
    _check_no_overlap(step, busy := {"compute", "exposed", "host_bound"})
    assert sum(e.seconds for e in step.events if e.lane in busy) == pytest.approx(step.step_s, abs=1e-9)
    if not any(type(unit.reshard_after_forward) is int for unit in plan.units):
        _check_no_overlap(step, {"all_gather", "reduce_scatter"})  # one communicator
    if not times.overlaps:
        _check_no_overlap(step, set(LANES) - {"exposed", "host_bound"})
    without = simulate_step(plan, random_step(random.Random(seed))[1])
    launched_s = sum(event.seconds for event in step.events if event.lane == "host")
    if not times.overlaps:
        assert step.step_s == pytest.approx(without.step_s + launched_s)
    assert step.step_s >= launched_s - 1e-9


def _check_no_overlap(step: Timeline, lanes: set[str]) -> None:
    events = sorted(
        (e for e in step.events if e.lane in lanes), key=lambda event: (event.start_s, event.end_s)
    )
    for before, after in itertools.pairwise(events):
        assert after.start_s >= before.end_s - 1e-9, (before, after)


@pytest.mark.parametrize("seed", range(25))
def test_one_micro_batch_at_a_time_is_exactly_all_of_them_in_one_run(seed):
    plan, times = random_step(random.Random(1000 + seed))
    step = simulate_step(plan, times)
    tasks = launch_tasks(plan, times)
    spans = run_tasks(tasks, times.slowdown)
    all_at_once = sorted(
        (task.lane, span.start_s, span.end_s)
        for task, span in zip(tasks, spans, strict=True)
        if span.end_s > span.start_s
    )
    one_by_one = sorted(
        (e.lane, e.start_s, e.end_s) for e in step.events if e.lane != "exposed" and e.phase != "optimizer"
    )
    assert [lane for lane, _, _ in all_at_once] == [lane for lane, _, _ in one_by_one]
    assert [t for _, *ends in all_at_once for t in ends] == pytest.approx(
        [t for _, *ends in one_by_one for t in ends], abs=1e-9
    )
    waited_s = sum(end_s - start_s for _, start_s, end_s in find_waits(tasks, spans))
    exposed_s = waited_s + step.exposed_by_lane.get("tp", 0.0)
    assert exposed_s == pytest.approx(step.exposed_s, abs=1e-9)


@pytest.mark.parametrize("seed", range(15))
def test_a_step_is_bounded_by_what_it_must_do(seed):
    plan, times = random_step(random.Random(2000 + seed))
    tasks = launch_tasks(plan, times)
    alone: dict[str, float] = {}
    for task in tasks:
        stream = "compute" if task.lane in ("compute", "tp") else task.lane
        alone[stream] = alone.get(stream, 0.0) + task.alone_s
    step = simulate_step(plan, times)
    slow = max(1 / (1 - max(times.slowdown.values())), 3)
    assert max(alone.values()) <= step.step_s + 1e-9
    assert step.step_s <= slow * sum(alone.values()) + times.optimizer_s + 1e-9
    serial = simulate_step(plan, dataclasses.replace(times, overlaps=False))
    assert serial.step_s == pytest.approx(sum(alone.values()) + times.optimizer_s)


def random_step(rng: random.Random) -> tuple[Plan, StepTimes]:
    """Return a plan with random degrees, prefetching and resharding, also per unit, and random times, some
    0."""
    replicate, tp = rng.choice([1, 1, 2]), rng.choice([1, 1, 2])
    model = make_model(rng.randint(1, 6), tied=rng.random() < 0.2)
    plan = plan_of(
        8,
        1,
        8 // tp * rng.randint(1, 4),
        model=model,
        dp_replicate=replicate,
        tp=tp,
        forward_prefetch=rng.randint(0, 3),
        backward_prefetch=rng.randint(0, 3),
        unit_min_params=rng.choice([0, 0, 800]),
        reshard_after_forward=rng.choice([True, True, False, 2 if tp == 1 else True]),
    )
    for index in range(len(plan.units) - 1):
        if rng.random() < 0.3:
            plan = change(
                plan, index, reshard_after_forward=rng.random() < 0.5, backward_prefetch=rng.randint(0, 3)
            )
    for index in range(len(plan.units)):
        if rng.random() < 0.3:
            reduce_gradients = rng.choice(["every_micro_batch", "last_micro_batch"])
            plan = change(
                plan, index, reduce_gradients=reduce_gradients, reshard_after_backward=rng.random() < 0.5
            )
    of_units = {
        unit.name: UnitTimes(
            _random_s(rng),
            _random_s(rng),
            rng.random() / 9,
            rng.random() / 9,
            _random_s(rng),
            _random_s(rng) * (replicate > 1),
            *(rng.random() / 9 for _ in range(3)),
        )
        for unit in plan.units
    }
    frozen = rng.choice([0, 0, 0, 1, 2])  # modules before the first trained one
    of_modules = {
        name: ModuleTimes(
            PhaseTimes(_random_s(rng), tp_s := _random_s(rng) * (tp > 1)),
            PhaseTimes(2 * _random_s(rng), tp_s) if number >= frozen else None,
        )
        for number, name in enumerate(plan.modules)
    }
    return plan, StepTimes(
        of_units,
        of_modules,
        _random_s(rng),
        rng.random() < 0.8,
        dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), rng.choice([0.0, 0.1, 0.5])),
    )


def with_random_host(times: StepTimes, rng: random.Random) -> StepTimes:
    """Return the times with a host that needs random times to launch, shorter or longer than the compute."""
    slow = rng.choice([0.01, 1.0])

    def with_host(phase: PhaseTimes) -> PhaseTimes:
        return dataclasses.replace(phase, host_s=slow * _random_s(rng))

    modules = {
        name: ModuleTimes(with_host(module.forward), module.backward and with_host(module.backward))
        for name, module in times.modules.items()
    }
    return dataclasses.replace(times, modules=modules, hook_s=slow * rng.random())


def _random_s(rng: random.Random) -> float:
    return 0.0 if rng.random() < 0.1 else rng.random() * rng.choice([0.2, 1.0, 5.0])
