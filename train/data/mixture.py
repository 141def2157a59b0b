"""Which source each position of a mixture draws from: a pure function of weights and seed."""

import functools

import numpy as np
from numpy.typing import NDArray

from meshwright.train.data.order import permute

# positions after which every source has had its share exactly: weights count to a ten-thousandth
CYCLE = 10_000


def shares(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Positions of each source in a cycle: proportional to its weight, the remainder to the largest
    fractions, none without any."""
    exact = np.array(weights) / sum(weights) * CYCLE
    counts = np.maximum(np.floor(exact), 1).astype(np.int64)
    missing = CYCLE - int(counts.sum())
    if missing < 0:  # tiny weights were rounded up: the largest gives
        counts[counts.argmax()] += missing
    else:
        counts[np.argsort(np.floor(exact) - exact, kind="stable")[:missing]] += 1
    return tuple(counts.tolist())


def draw(
    first: int, count: int, weights: tuple[float, ...], seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For positions first .. first + count - 1 the source each draws from, and how many before it drew from
    the same."""
    sources, places = np.empty(count, np.int64), np.empty(count, np.int64)
    per_cycle, done = np.array(shares(weights)), 0
    while done < count:
        cycle, offset = divmod(first + done, CYCLE)
        order, before = _cycle(weights, seed, cycle)
        taken = order[offset : offset + count - done]
        part = slice(done, done + len(taken))
        sources[part] = taken
        places[part] = cycle * per_cycle[taken] + before[offset : offset + len(taken)]
        done += len(taken)
    return sources, places


def drawn(position: int, weights: tuple[float, ...], seed: int) -> list[int]:
    """How many positions before `position` draw from each source."""
    cycle, offset = divmod(position, CYCLE)
    within = np.bincount(_cycle(weights, seed, cycle)[0][:offset], minlength=len(weights))
    return [cycle * share + int(n) for share, n in zip(shares(weights), within, strict=True)]


@functools.lru_cache(maxsize=4)
def _cycle(weights: tuple[float, ...], seed: int, cycle: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Source of each position of a cycle, and how many positions of the cycle before it have the same."""
    # 1: apart from every epoch's order
    slots = permute(np.arange(CYCLE), CYCLE, np.random.SeedSequence([seed, cycle, 1]))
    order = np.searchsorted(np.cumsum(shares(weights)), slots, side="right").astype(np.int64)
    before = np.empty(CYCLE, np.int64)
    for source in range(len(weights)):
        mine = order == source
        before[mine] = np.arange(int(mine.sum()))
    return order, before
