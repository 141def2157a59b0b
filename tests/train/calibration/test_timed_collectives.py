"""Calibration of collectives: what the planner makes of measured times, and the groups that are measured."""

import dataclasses

import pytest

from meshwright.parallel.planner.cost_model import Group, collective_s
from meshwright.parallel.planner.hardware import load_hardware, seconds_at
from meshwright.train.calibration.collectives import group_sizes


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
