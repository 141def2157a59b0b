"""How few blocks have to be recomputed, or sent away, for a plan to fit: bounds that spare most of the
looking."""

import bisect
import dataclasses
from collections.abc import Callable

from meshwright.parallel.planner.step_times import StepTimes


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What can be said of a plan at once: what its parts take, seconds of a step that waits for nothing,
    bytes that it needs at least, and bytes of host memory."""

    times: StepTimes
    least_s: float
    needed_bytes: int
    host_bytes: int


def part_s(kept: Bounds, treated: Bounds, share: float, micro_batches: int) -> float:
    """Seconds of a step at least where a share of the blocks is treated: recomputing costs its share, and
    copying what it takes longer than computing."""
    if host_s := treated.times.host_s:
        part = {name: seconds * share for name, seconds in host_s.items()}
        return dataclasses.replace(treated.times, host_s=part).busy_s(micro_batches)
    return kept.least_s + share * (treated.least_s - kept.least_s)


def smallest(low: int, high: int, guess: int, fits: Callable[[int], bool]) -> int:
    """The smallest number from `low` to `high` that fits, where `high` does, and all from the smallest one
    on. A good guess costs two looks."""
    guess = min(max(guess, low), high)
    if guess > low and not fits(guess - 1):
        low = guess
    if guess < high and fits(guess):
        high = guess
    return low + bisect.bisect_left(range(low, high), True, key=fits)
