"""Step times that are easy to add up by hand, and the events of a timeline."""

import dataclasses
from typing import Any

from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.cost_model import ModuleTimes, PhaseTimes, StepTimes, UnitTimes
from meshwright.parallel.planner.timeline import EXPOSED, Timeline

NOTHING = UnitTimes(0, 0, 0, 0, 0, 0)
LINK_LANES = ("all_gather", "reduce_scatter", "all_reduce")
SHORT = {"embed": "e", "head": "h"}


def times_of(
    plan: Plan,
    *,
    forward: float = 0,
    backward: float = 0,
    tp: tuple[float, float] = (0, 0),
    optimizer: float = 0,
    overlaps: bool = True,
    slowdown: float = 0,
    other_units: dict[str, dict[str, float]] | None = None,
    other_forwards: dict[str, dict[str, float]] | None = None,
    **unit: float,
) -> StepTimes:
    """The same seconds for every unit and module (tp: forward, backward), except those named in `other_units`
    and the forwards named in `other_forwards`."""
    unit_times: dict[str, UnitTimes] = {}
    for plan_unit in plan.units:
        keys: dict[str, Any] = unit | (other_units or {}).get(plan_unit.name, {})
        keys.setdefault("regather_s", keys.get("gather_s", 0))
        unit_times[plan_unit.name] = dataclasses.replace(NOTHING, **keys)
    first, second = PhaseTimes(forward, tp[0]), PhaseTimes(backward, tp[1])
    module_times = {
        m: ModuleTimes(dataclasses.replace(first, **(other_forwards or {}).get(m, {})), second)
        for m in plan.modules
    }
    return StepTimes(unit_times, module_times, optimizer, overlaps, dict.fromkeys(LINK_LANES, slowdown))


def bars(timeline: Timeline, lane: str, phase: str = "") -> list[tuple[str, float, float]]:
    """Unit (e: embedding, h: head, blocks by number), start and end of the lane's events, in order."""
    return [
        (_short(event.module or event.unit), round(event.start_s, 9), round(event.end_s, 9))
        for event in timeline.events
        if event.lane == lane and phase in ("", event.phase)
    ]


def _short(name: str) -> str:
    return "+".join(SHORT.get(part, part.removeprefix("layers.")) for part in name.split("+"))


def exposed_by_unit(step: Timeline) -> dict[str, float]:
    """Exposed seconds of each unit, its tensor-parallel collectives included."""
    waited: dict[str, float] = {}
    for event in step.events:
        if event.lane == EXPOSED:
            waited[event.unit] = waited.get(event.unit, 0.0) + event.seconds
    return waited
