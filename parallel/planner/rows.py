"""Rows of equal blocks: a plan of many of them predicts as one of a few, of which one stands for many."""

from collections.abc import Hashable
from dataclasses import fields, replace
from itertools import groupby
from math import lcm
from operator import attrgetter
from typing import NamedTuple

from meshwright.parallel.plan.schema import Plan, UnitPlan
from meshwright.parallel.planner.workload import ModelWorkload

EDGE = 2  # blocks at each end of a row that stay, besides those that are prefetched
_settings = attrgetter(*(field.name for field in fields(UnitPlan) if field.name != "modules"))


class LeftOut(NamedTuple):
    """Blocks of a row, which are equal to the one before them and to the one after them."""

    before: str
    blocks: tuple[str, ...]
    after: str


def shallow(plan: Plan, work: ModelWorkload) -> tuple[Plan, list[LeftOut]]:
    """Return the plan without the inner blocks of each row of equal blocks, and what is left out.

    All-gathers use their buffers in turn, so the number is a multiple of the number of buffers. A plan with
    lists of prefetched units, which can name any block, stays as it is.
    """
    unit_of = {module: unit for unit in plan.units for module in unit.modules}

    def kind(name: str) -> Hashable:
        unit = unit_of[name]
        alone = "" if unit.modules == (name,) else name
        return alone, id(work.modules[name]), work.trained.get(name, 1.0), _settings(unit)

    rows, names_left_out = list[LeftOut](), set[str]()
    for _, row in groupby(plan.modules, kind):
        names = list(row)
        forward, backward = unit_of[names[0]].forward_prefetch, unit_of[names[0]].backward_prefetch
        if isinstance(forward, tuple) or isinstance(backward, tuple):
            return plan, []
        edge = EDGE + max(forward, backward)
        inner = max(0, len(names) - 2 * edge)
        if count := inner - inner % lcm(forward + 1, max(1, backward)):
            blocks = tuple(names[edge : edge + count])
            rows.append(LeftOut(names[edge - 1], blocks, names[edge + count]))
            names_left_out.update(blocks)
    modules = tuple(name for name in plan.modules if name not in names_left_out)
    units = tuple(unit for unit in plan.units if unit.name not in names_left_out)
    return replace(plan, modules=modules, units=units), rows
