"""The order of samples: a pure function of the seed, the same on every mesh, without a list in memory."""

import numpy as np
from numpy.typing import NDArray

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
