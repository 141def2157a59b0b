"""The order in which phases need units, and the prefetch schedule."""

import pytest

from meshwright.parallel.plan.schema import Plan, prefetch_schedule, regathered
from tests.support.plans import BLOCK, TIED, change, plan_of


def ahead(plan: Plan, phase: str) -> str:
    """Each unit of the plan, and after its colon the units that it prefetches, with short names: e the
    embedding (with the head if tied), h the head, 0 to 3 the blocks."""
    schedule = prefetch_schedule(plan, phase)
    return " ".join(f"{short(u.name)}:{''.join(short(v.name) for v in schedule[u.name])}" for u in plan.units)


def short(name: str) -> str:
    return "+".join(part.removeprefix("layers.")[0] for part in name.removesuffix("+head").split("+"))


KEPT = change(plan_of(backward_prefetch=2), 3, reshard_after_forward=False)
LISTED = change(plan_of(), 1, forward_prefetch=("layers.2", "head"), backward_prefetch=())
SCHEDULES = [
    (plan_of(forward_prefetch=0), "forward", "e: 0: 1: 2: 3: h:"),
    (plan_of(forward_prefetch=1), "forward", "e:0 0:1 1:2 2:3 3:h h:"),
    (plan_of(forward_prefetch=2), "forward", "e:01 0:12 1:23 2:3h 3:h h:"),
    (plan_of(forward_prefetch=9), "forward", "e:0123h 0:123h 1:23h 2:3h 3:h h:"),
    (plan_of(backward_prefetch=0), "backward", "e: 0: 1: 2: 3: h:"),
    (plan_of(backward_prefetch=2), "backward", "e: 0: 1:0 2:10 3:21 h:32"),
    # tied embeddings start both phases and are started by none
    (plan_of(model=TIED, forward_prefetch=2), "forward", "0:12 1:23 2:3 3: e:01"),
    (plan_of(model=TIED), "backward", "0: 1:0 2:1 3:2 e:3"),
    # the backward starts nothing that stays gathered; the forward gathers it like any other unit
    (plan_of(reshard_after_forward=False, backward_prefetch=3), "backward", "e: 0: 1: 2: 3: h:"),
    (KEPT, "backward", "e: 0: 1:0 2:10 3:10 h:31"),
    (KEPT, "forward", "e:0 0:1 1:2 2:3 3:h h:"),
    # a list is taken as it is, for its unit only; joined units are started as one
    (LISTED, "forward", "e:0 0:2h 1:2 2:3 3:h h:"),
    (LISTED, "backward", "e: 0: 1:0 2:1 3:2 h:3"),
    (plan_of(unit_min_params=2 * BLOCK), "forward", "e:0+1 0+1:2+3 2+3:h h:"),
]


@pytest.mark.parametrize(("plan", "phase", "expected"), SCHEDULES)
def test_each_unit_prefetches_those_that_the_phase_needs_next(plan: Plan, phase: str, expected: str) -> None:
    assert ahead(plan, phase) == expected


def test_the_forward_first_needs_tied_embeddings_and_is_done_with_them_last() -> None:
    tied = plan_of(model=TIED)
    assert [short(unit.name) for unit in tied.forward_order] == ["e", "0", "1", "2", "3"]
    assert [short(unit.name) for unit in tied.units] == ["0", "1", "2", "3", "e"]


def test_what_the_forward_reshards_is_gathered_again_unless_only_looked_up() -> None:
    assert [unit.name for unit in plan_of().units if not regathered(unit)] == ["embed", "head"]
    found = {r: regathered(change(plan_of(), 1, reshard_after_forward=r).units[1]) for r in (True, False, 2)}
    assert found == {True: True, False: False, 2: True}
