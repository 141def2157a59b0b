"""The simulated step compared with schedules derived manually. Units: e is the embedding, 0, 1, 2 are the
blocks, h is the head, which stays gathered after its forward."""

import dataclasses
import itertools
from typing import Any

import pytest

from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.cost_model import StepTimes
from meshwright.parallel.planner.step_time import simulate_step, step_load
from tests.support.plans import BLOCK, change, make_model, plan_of
from tests.support.streams import bars, exposed_by_unit, times_of

ONE_BLOCK, THREE_BLOCKS = make_model(1), make_model(3)


def three_units(ahead: int = 1, global_batch: int = -1, **keys: Any) -> Plan:
    """A plan whose backward gathers the embedding like any other unit."""
    keys |= {"forward_prefetch": ahead, "backward_prefetch": ahead}
    plan = plan_of(global_batch=global_batch, model=ONE_BLOCK, **keys)
    return change(plan, 0, unshard_in_backward=True)


def simple(plan: Plan, **keys: Any) -> StepTimes:
    return times_of(plan, gather_s=2, scatter_s=2, forward=3, backward=5, **keys)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("gather_s", [2, 9])
@pytest.mark.parametrize("slowdown", [0, 0.2])
def test_a_step_takes_at_least_its_load_and_no_more_if_all_is_hidden(
    gather_s: int, ahead: int, slowdown: float
):
    """The first gather and the last reduction are part of the load, and what the others slow down."""
    plan = plan_of(model=make_model(40), forward_prefetch=ahead, backward_prefetch=ahead)
    seconds = {"gather_s": gather_s, "scatter_s": 2, "forward": 3, "backward": 5, "optimizer": 4}
    times = times_of(plan, slowdown=slowdown, **seconds)
    least_s, step_s = step_load(plan, times, {}).seconds, simulate_step(plan, times).step_s
    assert least_s <= step_s * (1 + 1e-9)
    if gather_s < 3 and ahead:
        assert least_s > 0.99 * step_s


def test_without_collectives_a_step_is_computing_alone():
    plan = three_units()
    step = simulate_step(plan, times_of(plan, copy_out_s=1, forward=3, backward=5, optimizer=4))
    # Copies: three in the forward, two in the backward, because the head is still gathered.
    assert (step.step_s, step.compute_s, step.exposed_s) == (3 * 3 + 3 * 5 + 5 + 4, step.step_s, 0)
    assert {event.lane for event in step.events} == {"compute"}
    assert step.exposed_by_lane == {}
    assert step.events[-1].work == step.events[-1].phase == "optimizer"


def test_one_unit_ahead_hides_all_but_the_first_gather_and_the_last_reduction():
    plan = three_units()
    step = simulate_step(plan, simple(plan))
    assert bars(step, "compute", "forward") == [("e", 2, 5), ("0", 5, 8), ("h", 8, 11)]
    assert bars(step, "compute", "backward") == [("h", 11, 16), ("0", 16, 21), ("e", 21, 26)]
    # h's forward starts the all-gather of 0 for the backward. 0 starts the all-gather of e, which is queued
    # after h's reduce-scatter.
    assert bars(step, "all_gather") == [("e", 0, 2), ("0", 2, 4), ("h", 4, 6), ("0", 8, 10), ("e", 18, 20)]
    assert bars(step, "reduce_scatter") == [("h", 16, 18), ("0", 21, 23), ("e", 26, 28)]
    assert bars(step, "exposed") == [("e", 0, 2), ("e", 26, 28)]
    assert (step.step_s, step.compute_s, step.exposed_s) == (28, 24, 4)
    assert step.exposed_by_lane == {"all_gather": 2, "reduce_scatter": 2}
    assert exposed_by_unit(step) == {"embed": 4}


def test_a_backward_without_prefetching_gathers_only_after_the_reduction_before():
    plan = three_units(0)
    step = simulate_step(plan, simple(plan))
    assert bars(step, "compute", "backward") == [("h", 11, 16), ("0", 20, 25), ("e", 29, 34)]
    assert bars(step, "reduce_scatter") == [("h", 16, 18), ("0", 25, 27), ("e", 34, 36)]
    assert bars(step, "all_gather", "backward") == [("0", 18, 20), ("e", 27, 29)]
    # The wait for 0's all-gather counts as h's reduce-scatter while that one is in flight.
    assert step.exposed_by_lane == {"all_gather": 6, "reduce_scatter": 6}
    assert exposed_by_unit(step) == {"embed": 6, "layers.0": 4, "head": 2}
    assert step.step_s == 36


def test_a_forward_gathers_the_next_unit_ahead_even_if_not_told():
    """The host launches ahead of the device, and the all-gather stream does not wait for compute."""
    for ahead in (1, 0):
        step = simulate_step(plan := three_units(ahead), simple(plan))
        assert bars(step, "all_gather", "forward") == [("e", 0, 2), ("0", 2, 4), ("h", 4, 6)]


def test_two_units_ahead_hide_a_long_gather_in_the_forward():
    plans = [plan_of(model=make_model(2), forward_prefetch=ahead) for ahead in (1, 2)]
    long: dict[str, Any] = {"other_units": {"head": {"gather_s": 9}}}
    long |= {"other_forwards": {"embed": {"compute_s": 10}}}
    depth_1, depth_2 = (simulate_step(plan, times_of(plan, gather_s=2, forward=3, **long)) for plan in plans)
    # One unit ahead: 1 starts h's all-gather. There are two buffers, so it waits for the copy-out of 0.
    assert bars(depth_1, "all_gather", "forward")[2:] == [("1", 4, 6), ("h", 12, 21)]
    assert bars(depth_2, "all_gather", "forward")[2:] == [("1", 4, 6), ("h", 6, 15)]
    assert bars(depth_1, "exposed", "forward") == [("e", 0, 2), ("h", 18, 21)]
    assert bars(depth_2, "exposed", "forward") == [("e", 0, 2)]


def test_two_units_ahead_gather_before_a_long_reduction_in_the_backward():
    plans = [plan_of(model=THREE_BLOCKS, backward_prefetch=ahead) for ahead in (1, 2)]
    long: dict[str, Any] = {"other_units": {"head": {"scatter_s": 20}}}
    depth_1, depth_2 = (
        simulate_step(plan, times_of(plan, gather_s=2, scatter_s=2, forward=3, backward=5, **long))
        for plan in plans
    )
    for depth in (depth_1, depth_2):
        assert bars(depth, "compute", "backward")[:2] == [("h", 17, 22), ("2", 22, 27)]
    # 2's gradients are copied into the buffer only after h's reduce-scatter has released it.
    assert bars(depth_1, "all_gather", "backward")[:2] == [("2", 14, 16), ("1", 42, 44)]
    assert bars(depth_2, "all_gather", "backward")[:2] == [("2", 14, 16), ("1", 16, 18)]
    assert bars(depth_1, "exposed", "backward")[:2] == [("h", 27, 42), ("1", 42, 44)]
    assert bars(depth_2, "exposed", "backward")[:1] == [("h", 27, 42)]


def test_a_smaller_group_gathers_on_a_communicator_of_its_own_and_shares_the_link():
    plan = three_units(1, reshard_after_forward=4)
    times = simple(plan, regather_s=1)
    step = simulate_step(plan, times)
    # e's all-gather and h's reduce-scatter start together at half speed; then the reduce-scatter's second
    # half runs alone.
    assert bars(step, "all_gather", "backward") == [("0", 8, 9), ("e", 16, 18)]
    assert bars(step, "reduce_scatter")[0] == ("h", 16, 19)


def test_a_reduction_waits_for_the_one_before():
    plan = three_units()
    step = simulate_step(plan, times_of(plan, forward=1, backward=5, scatter_s=8, copy_in_s=1))
    computing = [("h", 3, 8), ("h", 8, 9), ("0", 9, 14), ("0", 17, 18), ("e", 18, 23), ("e", 26, 27)]
    assert bars(step, "compute", "backward") == computing
    assert bars(step, "reduce_scatter") == [("h", 9, 17), ("0", 18, 26), ("e", 27, 35)]
    assert exposed_by_unit(step) == {"head": 3, "layers.0": 3, "embed": 8}


def test_hsdp_all_reduces_in_the_last_micro_batch_only_beside_the_other_collectives():
    plan = plan_of(8, 1, 16, model=ONE_BLOCK, dp_replicate=2, reshard_after_forward=False)
    assert plan.accumulation == 2
    step = simulate_step(plan, times_of(plan, forward=1, backward=4, scatter_s=2, all_reduce_s=3))
    assert bars(step, "reduce_scatter")[:3] == [("h", 7, 9), ("0", 11, 13), ("e", 15, 17)]
    second = 17
    # h: reduce-scatter 7-9, all-reduce from 9; from 11 on it overlaps with 0's reduce-scatter, both at half
    # speed: the all-reduce's last second takes until 13, then the reduce-scatter's last second until 14. 0:
    # all-reduce from 14; at 15, with 2 seconds left, e's reduce-scatter starts: both take until 19.
    assert bars(step, "all_reduce") == [
        (unit, second + a, second + b) for unit, a, b in [("h", 9, 13), ("0", 14, 19), ("e", 19, 22)]
    ]
    assert bars(step, "reduce_scatter")[3:] == [
        (unit, second + a, second + b) for unit, a, b in [("h", 7, 9), ("0", 11, 14), ("e", 15, 19)]
    ]
    assert step.step_s == second + 22
    assert step.exposed_by_lane == {"reduce_scatter": 2 + 4, "all_reduce": 3}
    assert sorted({event.micro_batch for event in step.events if event.lane == "all_reduce"}) == [1]


def test_replication_alone_all_reduces_without_reduce_scatter():
    plan = plan_of(model=ONE_BLOCK, strategy="ddp")
    step = simulate_step(plan, times_of(plan, forward=1, backward=4, all_reduce_s=3))
    assert bars(step, "all_reduce") == [("h", 7, 10), ("0", 11, 14), ("e", 15, 18)]
    assert {event.lane for event in step.events} == {"compute", "all_reduce", "exposed"}


def test_tensor_parallel_collectives_stop_computing_and_hide_others():
    plan = three_units(1, tp=2)
    step = simulate_step(plan, times_of(plan, gather_s=4, forward=3, backward=5, tp=(1, 2)))
    assert bars(step, "compute", "forward") == [("e", 4, 7), ("0", 8, 11), ("h", 12, 15)]
    assert bars(step, "tp", "forward") == [("e", 7, 8), ("0", 11, 12), ("h", 15, 16)]
    assert step.exposed_by_lane == {"all_gather": 4, "tp": 9}
    assert step.exposed_s == 13
    assert step.compute_s == 24
    assert exposed_by_unit(step) == {"embed": 7, "layers.0": 3, "head": 3}


def test_computing_beside_a_collective_is_slower_and_counts_as_computing():
    plan = three_units(1, reshard_after_forward=False)
    step = simulate_step(plan, times_of(plan, gather_s=2, forward=3, backward=5, slowdown=0.5))
    # 0's and h's all-gathers are in flight from 2 to 6; e computes 2 of its 3 seconds meanwhile.
    assert bars(step, "compute", "forward") == [("e", 2, 7), ("0", 7, 10), ("h", 10, 13)]
    assert (step.compute_s, step.exposed_s) == (26, 2)


def test_without_streams_everything_runs_one_after_the_other():
    plan = three_units(1)
    step = simulate_step(plan, simple(plan, overlaps=False, slowdown=0.5, optimizer=1, copy_out_s=1))
    gathers, scatters, copies = 5 * 2, 3 * 2, 5
    assert step.step_s == gathers + scatters + copies + 3 * 8 + 1
    assert step.exposed_s == gathers + scatters
    assert step.exposed_by_lane == {"all_gather": gathers, "reduce_scatter": scatters}
    ends = [(event.start_s, event.end_s) for event in step.events if event.lane != "exposed"]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))
    assert bars(step, "all_gather")[:2] == [("e", 0, 2), ("0", 3, 5)], (
        "in launch order: 0's all-gather is before e's compute"
    )


def test_joined_blocks_are_gathered_as_one():
    plan = plan_of(model=make_model(2), unit_min_params=2 * BLOCK)
    step = simulate_step(plan, simple(plan))
    assert bars(step, "all_gather", "forward") == [("e", 0, 2), ("0+1", 2, 4), ("h", 4, 6)]
    assert bars(step, "compute", "forward") == [("e", 2, 5), ("0", 5, 8), ("1", 8, 11), ("h", 11, 14)]
    assert bars(step, "compute", "backward") == [("h", 14, 19), ("1", 19, 24), ("0", 24, 29), ("e", 29, 34)]
    assert bars(step, "reduce_scatter") == [("h", 19, 21), ("0+1", 29, 31), ("e", 34, 36)]


@pytest.mark.parametrize("accumulation", [1, 2, 5])
def test_every_micro_batch_gathers_and_reduces_again(accumulation):
    plan = three_units(global_batch=8 * accumulation)
    step = simulate_step(plan, simple(plan))
    assert step.step_s == 28 * accumulation
    assert step.exposed_by_lane == {"all_gather": 2 * accumulation, "reduce_scatter": 2 * accumulation}
    assert len(bars(step, "all_gather")) == 5 * accumulation


def test_units_before_the_first_trained_module_have_no_backward():
    """The unit after them starts the all-gather that its prefetch says, as torch's hooks do."""
    plan = three_units()
    times = dataclasses.replace(simple(plan), hook_s=0.01)
    frozen = {name: dataclasses.replace(times.modules[name], backward=None) for name in ("embed", "layers.0")}
    step = simulate_step(plan, dataclasses.replace(times, modules={**times.modules, **frozen}))
    assert bars(step, "host", "backward") == [("h", 0.03, 0.04), ("h", 0.04, 0.05)]
    assert [unit for unit, _, _ in bars(step, "compute", "backward")] == ["h"]
    assert [unit for unit, _, _ in bars(step, "all_gather", "backward")] == ["0"]
    assert step.step_s == pytest.approx(18, abs=0.1)
