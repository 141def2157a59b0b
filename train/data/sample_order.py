"""The sample order: source and sequence of every position, a pure function of weights and seed.

It is the same on every mesh and needs no index in memory.
"""

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.parallel.errors import first_of
from meshwright.train.data.sequences import Batch, PositionOrder, SequenceShape, count_sequences, read_batch
from meshwright.train.data.token_store import Source

# After this many positions every source has its exact share, so weights have a resolution of 1/10,000.
CYCLE = 10_000
_NAMED = 8  # sequences of a source, in a message


def shares(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return the number of positions of each source in a cycle, at least 1 each.

    They are proportional to the weights; the largest fractions get the remainder.
    """
    exact = np.array(weights) / sum(weights) * CYCLE
    counts = np.maximum(np.floor(exact), 1).astype(np.int64)
    missing = CYCLE - int(counts.sum())
    if missing < 0:  # tiny weights were rounded up: take the excess from the largest
        counts[counts.argmax()] += missing
    else:
        counts[np.argsort(np.floor(exact) - exact, kind="stable")[:missing]] += 1
    return tuple(counts.tolist())


def draw(
    first: int, count: int, weights: tuple[float, ...], seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the source of each position first .. first + count - 1, and how many earlier ones have it."""
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


def count_draws(position: int, weights: tuple[float, ...], seed: int) -> list[int]:
    """Return how many positions before `position` draw from each source."""
    cycle, offset = divmod(position, CYCLE)
    within = np.bincount(_cycle(weights, seed, cycle)[0][:offset], minlength=len(weights))
    return [cycle * share + int(n) for share, n in zip(shares(weights), within, strict=True)]


@functools.lru_cache(maxsize=4)
def _cycle(weights: tuple[float, ...], seed: int, cycle: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Source of each position of a cycle, and how many earlier positions of the cycle have that source."""
    # the third number, 1, separates these random numbers from those of the order within an epoch
    slots = permute(np.arange(CYCLE), CYCLE, np.random.SeedSequence([seed, cycle, 1]))
    order = np.searchsorted(np.cumsum(shares(weights)), slots, side="right").astype(np.int64)
    before = np.empty(CYCLE, np.int64)
    for source in range(len(weights)):
        selected = order == source
        before[selected] = np.arange(int(selected.sum()))
    return order, before


_ROUNDS = 4  # of a Feistel network: four make a pseudo-random permutation (Luby and Rackoff, 1988)


def sample_indices(positions: NDArray[np.int64], n: int, seed: int) -> NDArray[np.int64]:
    """Return which of `n` samples are at these positions of the endless order.

    Each epoch (n positions) is a different permutation of all samples.
    """
    epochs, places = np.divmod(positions, n)
    indices = np.empty_like(positions)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        indices[chosen] = permute(places[chosen], n, np.random.SeedSequence([seed, int(epoch)]))
    return indices


def permute(values: NDArray[np.int64], n: int, seed: np.random.SeedSequence) -> NDArray[np.int64]:
    """Apply a pseudo-random permutation of 0 .. n-1 to values.

    A Feistel network on the next even number of bits, repeated until the value is below n (cycle walking; on
    average less than 4 times).
    """
    half_bits = max(1, (max(n - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    keys = seed.generate_state(_ROUNDS, np.uint64)
    result = values.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        left, right = result[outside] >> np.uint64(half_bits), result[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        result[outside] = (left << np.uint64(half_bits)) | right
        outside &= result >= np.uint64(n)
    return result.astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class SampleOrder(PositionOrder):
    """The endless order of training sequences: source and sequence of each position."""

    def __init__(self, sources: tuple[Source, ...], shape: SequenceShape, seed: int) -> None:
        self.splits, self.seed = [source.split for source in sources], seed
        self.sizes = [count_sequences(split, shape) for split in self.splits]
        self.names = [source.name for source in sources]
        self.weights = tuple(source.weight for source in sources)

    def rows(self, first: int, count: int) -> NDArray[np.int64]:
        """Return rows[count] = (source, index) of positions first .. first + count - 1."""
        sources, places = draw(first, count, self.weights, self.seed)
        rows = np.stack((sources, places), axis=1)
        for source, size in enumerate(self.sizes):
            selected = sources == source
            rows[selected, 1] = sample_indices(places[selected], size, self.seed + source)
        return rows

    def read(self, first: int, count: int, shape: SequenceShape, pinned: bool = False) -> Batch:
        return read_batch(self.splits, self.rows(first, count), shape, pinned)

    def describe(self, positions: NDArray[np.int64]) -> str:
        """Name the sequences at consecutive positions, by source and index in it."""
        by_source: dict[str, list[int]] = {}
        for source, index in self.rows(int(positions[0]), len(positions)).tolist():
            by_source.setdefault(self.names[source], []).append(index)
        return "; ".join(f"{first_of(ids, most=_NAMED)} of {source}" for source, ids in by_source.items())

    def check(self, first: int, shape: SequenceShape) -> None:
        """The order of given sequences needs no check; that of a function of yours does (`GivenOrder`)."""

    def progress(self, position: int, sums: Sequence[int] = ()) -> dict[str, float]:
        """Return the progress at `position` as metrics: epochs of the data, or in a mixture sequences and
        epochs of each source. `sums`: of the readers' counts, which have none."""
        if len(self.sizes) == 1:
            return {"epoch": position / self.sizes[0]}
        taken = dict(zip(self.names, count_draws(position, self.weights, self.seed), strict=True))
        sizes = dict(zip(self.names, self.sizes, strict=True))
        epochs = {f"epoch/{name}": count / sizes[name] for name, count in taken.items()}
        return {f"sequences/{name}": float(count) for name, count in taken.items()} | epochs
