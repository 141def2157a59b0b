"""Calibration of collectives: the fit of the planner's formula, and times of real groups."""

import dataclasses

import pytest

from meshwright.parallel.planner.cost_model import Group, collective_s
from meshwright.parallel.planner.hardware import COLLECTIVES, Curve, Link, load_hardware, seconds_at
from meshwright.train.calibration.collectives import Seconds, fit_link, group_sizes

SHARES = {
    "all_gather": ((2, 1.0), (4, 0.5)),
    "reduce_scatter": ((2, 0.4), (4, 0.3)),
    "all_reduce": ((2, 0.9), (4, 0.6)),
}
LINK = Link(2.0, 1e-4, SHARES)
SIZES = [2.0**power for power in range(14, 26, 2)]


def timings_over(link: Link) -> Seconds:
    """Return the planner's times of collectives over this link: the fit inverts its formula."""
    hardware = dataclasses.replace(load_hardware()["cpu"], node=link, collectives_s={})

    def curve(op: str, n: int) -> Curve:
        return tuple((size, collective_s(op, size, Group(n, n, 1), hardware)) for size in SIZES)

    return {op: {n: curve(op, n) for n in (2, 4)} for op in COLLECTIVES}


def test_the_fit_finds_the_link_that_the_planner_timed() -> None:
    link, error = fit_link(timings_over(LINK))
    assert error < 1e-6
    assert link.latency_s == pytest.approx(LINK.latency_s)
    assert link.gb_s == pytest.approx(2.0)  # the fastest of all
    for op, curve in LINK.efficiency.items():
        assert [share for _, share in link.efficiency[op]] == pytest.approx([share for _, share in curve])


def test_a_latency_below_nothing_becomes_nothing() -> None:
    # small tensors are far too fast
    link, _ = fit_link({"all_gather": {2: tuple((size, size**1.5) for size in (1e3, 1e4, 1e5))}})
    assert link.latency_s == 0
    assert link.gb_s > 0


def test_measured_seconds_are_used_as_they_are() -> None:
    curve = tuple((size, 3e-9 * size) for size in (1e3, 1e5))
    hardware = dataclasses.replace(load_hardware()["cpu"], collectives_s={"all_gather": {2: curve}})
    pair, four = Group(2, 2, 1), Group(4, 4, 1)
    assert collective_s("all_gather", 100_000, pair, hardware) == pytest.approx(3e-4)
    assert collective_s("all_gather", 10_000, pair, hardware) == pytest.approx(3e-5)  # between the two
    assert collective_s("all_gather", 1_000_000, pair, hardware) == pytest.approx(3e-3)  # beyond the last
    assert seconds_at(((1000.0, 2e-4), (10_000.0, 5e-4)), 4) == 2e-4, "of tiny tensors the latency stays"
    formula = dataclasses.replace(hardware, collectives_s={})
    for op, group in (("all_reduce", pair), ("all_gather", four), ("all_gather", Group(2, 1, 1))):
        assert collective_s(op, 100_000, group, hardware) == collective_s(op, 100_000, group, formula)


def test_groups_are_those_that_a_mesh_can_have() -> None:
    assert [group_sizes(n) for n in (1, 2, 4, 6, 8)] == [[], [2], [2, 4], [2, 3, 6], [2, 4, 8]]
