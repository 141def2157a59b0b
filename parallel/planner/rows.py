"""Rows of equal blocks: what a step of a plan needs follows from a step with a few blocks of each row."""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from math import lcm
from typing import NamedTuple

from meshwright.parallel.plan.schema import Plan


class InnerBlocks(NamedTuple):
    """The inner blocks of a row, which are equal to the one before them and to the one after them.

    All-gathers use their buffers in turn, so the number of blocks is a multiple of the `period`.
    """

    before: str
    blocks: tuple[str, ...]
    after: str
    period: int


def inner_blocks(plan: Plan, kind: Callable[[str], object], edge: int) -> list[InnerBlocks]:
    """Return the inner blocks of each row of neighboring modules of the same `kind`, with a unit of its own
    each and the same settings. A plan with lists of prefetched units, which can name any block, has none.

    `edge`: blocks at each end of a row that are not inner ones, besides those that are prefetched.
    """
    unit_of = {module: unit for unit in plan.units for module in unit.modules}

    def full_kind(name: str) -> object:
        unit = unit_of[name]
        return (kind(name), unit.settings) if unit.modules == (name,) else name

    rows = list[InnerBlocks]()
    for _, row in groupby(plan.modules, full_kind):
        names = list(row)
        forward, backward = unit_of[names[0]].forward_prefetch, unit_of[names[0]].backward_prefetch
        if isinstance(forward, tuple) or isinstance(backward, tuple):
            return []
        begin, period = edge + max(forward, backward), lcm(forward + 1, max(1, backward))
        inner = max(0, len(names) - 2 * begin)
        if count := inner - inner % period:
            blocks = tuple(names[begin : begin + count])
            rows.append(InnerBlocks(names[begin - 1], blocks, names[begin + count], period))
    return rows


def without(plan: Plan, blocks: frozenset[str]) -> Plan:
    """Return the plan without some blocks."""
    modules = tuple(name for name in plan.modules if name not in blocks)
    return replace(plan, modules=modules, units=tuple(unit for unit in plan.units if unit.name not in blocks))
