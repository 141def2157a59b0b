"""tools.bench overlap: each lever against a schedule worked out by hand, and the whole command at a tiny
size."""

import json
from typing import Any

import pytest

from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.fsdp_schedule import simulate_step
from meshwright.tools.bench.__main__ import main
from meshwright.tools.bench.planner.overlap import (
    VARIATIONS,
    Variation,
    in_line,
    no_last_gather,
    own_communicator,
    play,
    two_buffers,
)
from tests.support.launch import TINY
from tests.support.plans import make_model, plan_of
from tests.support.streams import times_of

Output = pytest.CaptureFixture[str]


def three_units(ahead: int = 1, **keys: Any) -> Plan:
    """Embedding, one block, head."""
    return plan_of(model=make_model(1), forward_prefetch=ahead, backward_prefetch=ahead, **keys)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_as_planned_is_the_planners_step(accumulation: int) -> None:
    plan = plan_of(8, 1, 8 * accumulation, dp_replicate=2, tp=2)
    times = times_of(
        plan,
        gather_s=2,
        scatter_s=3,
        all_reduce_s=4,
        forward=3,
        backward=5,
        tp=(0.5, 0.7),
        slowdown=0.2,
        optimizer=6,
    )
    step_s, exposed_s = play(plan, times, VARIATIONS["as planned"])
    expected = simulate_step(plan, times)
    assert step_s == pytest.approx(expected.step_s)
    assert {lane: s for lane, s in exposed_s.items() if s} == pytest.approx(expected.exposed_by_lane)


def test_with_a_communicator_of_their_own_reductions_hold_up_no_gather() -> None:
    plan = three_units(0)
    times = times_of(plan, gather_s=2, scatter_s=2, forward=3, backward=5)
    assert play(plan, times, Variation())[0] == 36
    # The block is gathered under the forward, the embedding under the block's backward, and only e's two are
    # exposed.
    step_s, exposed_s = play(plan, times, Variation(tasks=own_communicator))
    assert (step_s, exposed_s["all_gather"], exposed_s["reduce_scatter"]) == (28, 2, 2)


def test_on_one_link_what_is_sent_at_once_is_sent_more_slowly() -> None:
    plan = three_units()
    times = times_of(plan, backward=5, other_units={"head": {"scatter_s": 9}, "embed": {"regather_s": 9}})
    # The embedding is gathered behind the head's reduction (5 to 14) until 23, then computes.
    assert play(plan, times, Variation())[0] == 28
    # It is gathered from 0 on, until 13, as both share the link; the block's gradient waits for the head's
    # reduction, until 18.
    assert play(plan, times, Variation(tasks=own_communicator))[0] == 23
    assert play(plan, times, Variation(tasks=own_communicator, one_link=False))[0] == 19


def test_with_two_buffers_a_long_reduction_holds_up_computing_one_unit_later() -> None:
    plan = three_units()
    times = times_of(plan, scatter_s=1, backward=5, other_units={"head": {"scatter_s": 7}})
    assert (
        play(plan, times, Variation())[0] == 18
    )  # the block's gradient waits for the head's reduction, 5 to 12
    assert play(plan, times, Variation(tasks=two_buffers))[0] == 16
    longer = times_of(plan, scatter_s=1, backward=5, other_units={"head": {"scatter_s": 12}})
    # the embedding's waits until 17, then two reductions
    assert play(plan, longer, Variation(tasks=two_buffers))[0] == 19


def test_the_embedding_is_not_gathered_for_its_backward() -> None:
    plan = three_units()
    times = times_of(
        plan, gather_s=2, scatter_s=2, forward=3, backward=5, other_units={"embed": {"regather_s": 9}}
    )
    assert (
        play(plan, times, Variation())[0] == 34
    )  # it is gathered from 18 to 27, behind the head's reduction
    assert play(plan, times, Variation(tasks=no_last_gather))[0] == 28


def test_all_reduces_in_line_hold_up_the_reduce_scatters() -> None:
    plan = three_units(dp_replicate=2)
    times = times_of(plan, scatter_s=2, all_reduce_s=10, backward=5)
    # On streams of their own all-reduces follow one another from 7 on; in line each reduction waits for the
    # one before.
    assert play(plan, times, Variation(one_link=False))[0] == 37
    assert play(plan, times, Variation(tasks=in_line, one_link=False))[0] == 41


def test_every_lever_that_makes_a_difference_is_pulled(capsys: Output) -> None:
    keys = [
        *TINY[:5],
        "--model.n_layers=3",
        "--parallel.compile.enabled=false",
        "--train.micro_batch_size=1",
        "--train.seq_len=64",
    ]
    mesh = ["--parallel.tp=2", "--parallel.dp_replicate=2", "--parallel.reshard_after_forward=true"]
    main(["overlap", "--config=llama_debug", "--gpus=16", "--gpu=h100-sxm", *keys, *mesh, "--json"])
    (run,) = json.loads(capsys.readouterr().out)["figures"]["runs"]
    assert run["mesh"] == {"dp_replicate": 2, "dp_shard": 4, "tp": 2}
    levers = run["levers"]
    assert set(levers) == set(VARIATIONS)
    base = levers["as planned"]
    assert levers["reduce_dtype bfloat16"]["step_s"] < base["step_s"]
    assert levers["async_tp"]["exposed_by_lane_s"]["tp"] < base["exposed_by_lane_s"]["tp"]
    assert levers["units of two blocks"]["step_s"] != base["step_s"]
    main(
        [
            "overlap",
            "--config=llama_debug",
            "--gpus=4",
            *keys,
            "--parallel.tp=1",
            "--parallel.dp_replicate=1",
            "--parallel.reshard_after_forward=false",
        ]
    )
    table = capsys.readouterr().out
    assert "as planned" in table
    for name in ("async_tp", "FSDP in place of HSDP", "all-reduce in line", "embedding gathered once"):
        assert name not in table
