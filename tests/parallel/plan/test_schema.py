"""The order in which phases need units, and the prefetch schedule."""

import pytest

from meshwright.parallel.plan.schema import Plan, prefetch_schedule, regathered
from tests.support.plans import BLOCK, TIED, change, plan_of


def names_ahead(plan: Plan, phase: str) -> dict[str, list[str]]:
    """The prefetch schedule with short names: e the embedding (with the head if tied), h the head, 0 to 3 the
    blocks."""
    schedule = prefetch_schedule(plan, phase)
    return {_short(unit.name): [_short(u.name) for u in schedule[unit.name]] for unit in plan.units}


def _short(name: str) -> str:
    return name.removeprefix("layers.") if name.startswith("layers.") else name[0]


def test_the_forward_first_needs_tied_embeddings_and_is_done_with_them_last() -> None:
    assert [_short(unit.name) for unit in plan_of().forward_order] == ["e", "0", "1", "2", "3", "h"]
    tied = plan_of(model=TIED)
    assert [_short(unit.name) for unit in tied.forward_order] == ["e", "0", "1", "2", "3"]
    assert [_short(unit.name) for unit in tied.units] == ["0", "1", "2", "3", "e"]


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        (0, {"e": "", "0": "", "1": "", "2": "", "3": "", "h": ""}),
        (1, {"e": "0", "0": "1", "1": "2", "2": "3", "3": "h", "h": ""}),
        (2, {"e": "01", "0": "12", "1": "23", "2": "3h", "3": "h", "h": ""}),
        (9, {"e": "0123h", "0": "123h", "1": "23h", "2": "3h", "3": "h", "h": ""}),
    ],
)
def test_forward_takes_the_next_units(ahead: int, expected: dict[str, str]) -> None:
    assert names_ahead(plan_of(forward_prefetch=ahead), "forward") == {
        name: list(units) for name, units in expected.items()
    }


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        (0, {"h": "", "3": "", "2": "", "1": "", "0": "", "e": ""}),
        (1, {"h": "3", "3": "2", "2": "1", "1": "0", "0": "", "e": ""}),
        (2, {"h": "32", "3": "21", "2": "10", "1": "0", "0": "", "e": ""}),
    ],
)
def test_backward_takes_the_units_before(ahead: int, expected: dict[str, str]) -> None:
    assert names_ahead(plan_of(backward_prefetch=ahead), "backward") == {
        name: list(units) for name, units in expected.items()
    }


def test_tied_embeddings_start_both_phases_and_are_started_by_none() -> None:
    plan = plan_of(model=TIED, forward_prefetch=2, backward_prefetch=1)
    assert names_ahead(plan, "forward") == {
        "e": ["0", "1"],
        "0": ["1", "2"],
        "1": ["2", "3"],
        "2": ["3"],
        "3": [],
    }
    assert names_ahead(plan, "backward") == {"e": ["3"], "3": ["2"], "2": ["1"], "1": ["0"], "0": []}


def test_backward_starts_nothing_that_stays_gathered() -> None:
    plan = plan_of(reshard_after_forward=False, backward_prefetch=3)
    assert set(map(tuple, names_ahead(plan, "backward").values())) == {()}
    plan = change(plan_of(backward_prefetch=2), 3, reshard_after_forward=False)
    expected = {"h": "31", "3": "10", "2": "10", "1": "0", "0": "", "e": ""}
    assert names_ahead(plan, "backward") == {name: list(units) for name, units in expected.items()}
    assert names_ahead(plan, "forward")["1"] == ["2"], "the forward gathers it like any other unit"


@pytest.mark.parametrize(("reshard", "again"), [(True, True), (False, False), (1, True), (2, True)])
def test_a_smaller_group_is_gathered_again(reshard: bool | int, again: bool) -> None:
    assert regathered(change(plan_of(), 1, reshard_after_forward=reshard).units[1]) is again


def test_only_an_embedding_with_its_own_weight_is_not_gathered_again() -> None:
    assert [unit.name for unit in plan_of().units if not regathered(unit)] == ["embed", "head"]
    assert not plan_of().units[0].unshard_in_backward
    assert all(unit.unshard_in_backward for unit in plan_of(model=TIED).units)


def test_a_list_is_taken_as_it_is() -> None:
    plan = change(plan_of(), 1, forward_prefetch=("layers.2", "head"), backward_prefetch=())
    assert names_ahead(plan, "forward")["0"] == ["2", "h"]
    assert names_ahead(plan, "backward")["0"] == []
    assert names_ahead(plan, "forward")["1"] == ["2"], "the list is for one unit only"


def test_joined_units_are_started_as_one() -> None:
    plan = plan_of(unit_min_params=2 * BLOCK)
    assert names_ahead(plan, "forward") == {
        "e": ["0+layers.1"],
        "0+layers.1": ["2+layers.3"],
        "2+layers.3": ["h"],
        "h": [],
    }
