"""Copies of activations to and from host memory in a simulated step, compared with manually derived times."""

import dataclasses

import pytest

from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.step_time import simulate_step, step_load
from meshwright.parallel.planner.timeline import Timeline
from tests.support.plans import BLOCK, plan_of
from tests.support.streams import bars, times_of

PLAN = plan_of(1, activation_checkpoint="offload")  # embedding, four blocks, head


def step(copy_s: float, plan: Plan = PLAN, *, overlaps: bool = True, slowdown: float = 0.0) -> Timeline:
    """Simulate a step with forwards of 2 s, backwards of 4 s, and copies of `copy_s` for all blocks but the
    last."""
    offload_s = {f"layers.{i}": copy_s for i in range(3)} | {"layers.3": 0.0}
    times = times_of(plan, forward=2, backward=4, overlaps=overlaps, slowdown=slowdown)
    return simulate_step(plan, dataclasses.replace(times, offload_s=offload_s))


def test_copies_that_are_shorter_than_a_block_are_hidden() -> None:
    """A block's activations are sent after its forward, and fetched from the start of the next block's
    backward."""
    timeline = step(1.5, slowdown=0.5)
    assert timeline.step_s == 6 * (2 + 4), "nothing waits, and copies do not slow compute down"
    assert bars(timeline, "offload", "forward") == [("0", 4, 5.5), ("1", 6, 7.5), ("2", 8, 9.5)]
    # Backwards start at 12 (head), 16 (block 3), 20 (block 2), 24 (block 1).
    assert bars(timeline, "offload", "backward") == [("2", 16, 17.5), ("1", 20, 21.5), ("0", 24, 25.5)]
    assert timeline.exposed_s == 0


def test_a_forward_waits_for_what_the_block_before_has_sent_and_a_backward_for_what_was_fetched() -> None:
    """With copies of 5 s block 0 is sent from 4 to 9; block 1 computes until 6, and block 2 waits until 9.
    The head waits until 19 for block 2's copy. Block 2 is fetched from the start of block 3's backward."""
    timeline = step(5)
    assert bars(timeline, "offload", "forward") == [("0", 4, 9), ("1", 9, 14), ("2", 14, 19)]
    forward = [("e", 0, 2), ("0", 2, 4), ("1", 4, 6), ("2", 9, 11), ("3", 14, 16), ("h", 19, 21)]
    assert bars(timeline, "compute", "forward") == forward
    backward = [("h", 21, 25), ("3", 25, 29), ("2", 30, 34), ("1", 35, 39)]
    assert bars(timeline, "compute", "backward")[:4] == backward
    assert bars(timeline, "offload", "backward") == [("2", 25, 30), ("1", 30, 35), ("0", 35, 40)]
    assert timeline.exposed_by_lane == pytest.approx({"offload": 3 + 3 + 3 + 1 + 1 + 1})
    assert timeline.step_s == timeline.compute_s + timeline.exposed_s == 48


def test_the_bound_is_never_above_the_step_and_near_it_where_copies_decide() -> None:
    for copy_s in (0.5, 2, 5, 50):
        offload_s = {f"layers.{i}": copy_s for i in range(3)} | {"layers.3": 0.0}
        times = dataclasses.replace(times_of(PLAN, forward=2, backward=4), offload_s=offload_s)
        bound, step_s = step_load(PLAN, times, {}).seconds, simulate_step(PLAN, times).step_s
        assert bound <= step_s
        assert bound == pytest.approx(36 + 3 * max(0, copy_s - 2) + 3 * max(0, copy_s - 4))
        assert bound > 0.98 * step_s
        joined = plan_of(1, activation_checkpoint="offload", unit_min_params=2 * BLOCK)
        of_joined = times_of(joined, forward=2, backward=4)
        of_joined = dataclasses.replace(of_joined, offload_s=offload_s)
        assert step_load(joined, of_joined, {}).seconds <= simulate_step(joined, of_joined).step_s


def test_without_streams_every_copy_takes_its_time() -> None:
    assert step(1.5, overlaps=False).step_s == 6 * (2 + 4) + 6 * 1.5
