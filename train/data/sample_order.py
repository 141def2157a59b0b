"""Which sequence of which source stands at which position: a pure function of weights and seed, the same on
every mesh, without a list in memory."""

import functools

import numpy as np
from numpy.typing import NDArray

from meshwright.train.data.sequences import SequenceShape, count_sequences
from meshwright.train.data.token_store import Source

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


_ROUNDS = 4  # of a Feistel network: four make a pseudo-random permutation (Luby and Rackoff, 1988)


def sample_indices(positions: NDArray[np.int64], n: int, seed: int) -> NDArray[np.int64]:
    """Which of `n` samples stand at these positions of the endless order: each epoch, n positions, is a
    permutation of all samples of its own."""
    epochs, places = np.divmod(positions, n)
    indices = np.empty_like(positions)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        indices[chosen] = permute(places[chosen], n, np.random.SeedSequence([seed, int(epoch)]))
    return indices


def permute(values: NDArray[np.int64], n: int, seed: np.random.SeedSequence) -> NDArray[np.int64]:
    """Pseudo-random permutation of 0 .. n-1: a Feistel network on the next even number of bits, walked until
    the value lies below n again (cycle walking; less than 4 walks on average)."""
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
    """Finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every input bit changes every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class SampleOrder:
    """Which sequence stands at each position of the endless order: a pure function of the seed."""

    def __init__(self, sources: tuple[Source, ...], shape: SequenceShape, seed: int) -> None:
        self.splits, self.seed = [source.split for source in sources], seed
        self.sizes = [count_sequences(split, shape) for split in self.splits]
        self.names, self.weights = (
            [source.name for source in sources],
            tuple(source.weight for source in sources),
        )

    def rows(self, first: int, count: int) -> NDArray[np.int64]:
        """rows[count] = (source, index) of positions first .. first + count - 1."""
        positions = np.arange(first, first + count, dtype=np.int64)
        if len(self.sizes) == 1:
            return np.stack(
                (np.zeros_like(positions), sample_indices(positions, self.sizes[0], self.seed)), axis=1
            )
        sources, places = draw(first, count, self.weights, self.seed)
        rows = np.stack((sources, places), axis=1)
        for source, size in enumerate(self.sizes):
            mine = sources == source
            rows[mine, 1] = sample_indices(places[mine], size, self.seed + source)
        return rows


def data_progress(order: SampleOrder, position: int) -> dict[str, float]:
    """How far positions before `position` have come: epochs of the data; in a mixture sequences and epochs by
    source."""
    if len(order.sizes) == 1:
        return {"epoch": position / order.sizes[0]}
    taken = dict(zip(order.names, drawn(position, order.weights, order.seed), strict=True))
    epochs = {
        f"epoch/{name}": count / size for (name, count), size in zip(taken.items(), order.sizes, strict=True)
    }
    return {f"sequences/{name}": float(count) for name, count in taken.items()} | epochs
