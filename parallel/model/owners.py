"""Which rank orthogonalises which matrix, for an optimizer that needs whole ones: pure functions of costs."""

import heapq
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

ITERATIONS = 5  # of Newton-Schulz
WORST = 1.25  # the most that the busiest rank of a round does, over what each would do at best


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Return the operations of one orthogonalisation: in each iteration a Gram matrix, its square, and a
    product."""
    short, long = sorted((rows, columns))
    return ITERATIONS * (4.0 * short * short * long + 2.0 * short**3)


def share_out(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the owner of each matrix: the dearest first, each to the rank with the least to do so far."""
    heap, owners = [(0.0, rank) for rank in range(ranks)], [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        load, owner = heap[0]
        owners[number] = owner
        heapq.heapreplace(heap, (load + costs[number], owner))
    return owners


def busiest(costs: Sequence[float], ranks: int) -> float:
    """Return the cost of what the rank with the most to do owns."""
    loads = [0.0] * ranks
    for cost, owner in zip(costs, share_out(costs, ranks), strict=True):
        loads[owner] += cost
    return max(loads)


def make_rounds(blocks: Sequence[Sequence[T]], cost: Callable[[T], float], ranks: int) -> list[list[T]]:
    """Return the matrices of each round: those of as many consecutive blocks as keep all ranks busy. The last
    ones, if they do not, are part of the round before. `blocks`: the matrices of each."""
    rounds, current = list[list[T]](), list[T]()
    for matrices in blocks:
        current += matrices
        costs = [*map(cost, current)]
        if busiest(costs, ranks) * ranks <= WORST * sum(costs):
            rounds.append(current)
            current = []
    if rounds:
        rounds[-1] += current
        return rounds
    return [current] if current else []
