"""Each kind of fault that docs/proof.md names is told from others, of tensors that have it by design."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshwright.parallel.check.kinds import kind, own_slice
from meshwright.parallel.plan.schema import MeshPlan

MESH = MeshPlan(dp_replicate=2, dp_shard=2, tp=1)
PARTS = torch.randn(4, 2, 5, 7, generator=torch.Generator().manual_seed(0))  # [ranks, micro batches, *shape]
WHOLE, OF_RANK = PARTS.sum((0, 1)), PARTS.sum(1)
OTHER = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))


def weighted(*weights: float) -> Tensor:
    """The gradient if the parts of the ranks weigh so much."""
    return torch.einsum("r,rij->ij", torch.tensor(weights).float(), OF_RANK)


# what rank r has -> what is said
CASES: dict[str, Callable[[int], Tensor]] = {
    "": lambda rank: WHOLE,
    "not finite": lambda rank: WHOLE / 0,
    "zero": lambda rank: 0 * WHOLE,
    "3 times what it should be": lambda rank: 3 * WHOLE,
    "2 times what it should be: not divided by dp_": lambda rank: 2 * WHOLE,
    "0.5 times what it should be: divided by dp_": lambda rank: WHOLE / 2,
    "only of micro batch 2": lambda rank: PARTS[:, 1].sum(0),
    "micro batch 2 counts 3 times as much as micro batch 1": lambda rank: WHOLE + 2 * PARTS[:, 1].sum(0),
    "not reduced over dp_replicate and dp_shard": lambda rank: OF_RANK[rank],
    "not reduced over dp_replicate": lambda rank: OF_RANK[rank // 2 * 2] + OF_RANK[rank // 2 * 2 + 1],
    "not reduced over dp_shard": lambda rank: OF_RANK[rank % 2] + OF_RANK[rank % 2 + 2],
    "only the part of data-parallel rank 1, 3": lambda rank: weighted(0, 1, 0, 1),
    "the parts of the batch weigh": lambda rank: weighted(1, 1, 0.5, 1),
    "the right numbers in another order": lambda rank: WHOLE.flip(0),
    "right only from 1 to 3 of the 5 places of dim 0": lambda rank: torch.cat(
        [OTHER[:1], WHOLE[1:4], OTHER[4:]]
    ),
    "only on rank 2": lambda rank: OTHER if rank == 2 else WHOLE,
    "the ranks disagree": lambda rank: rank * OTHER + OTHER**2,
}


@pytest.mark.parametrize("said", CASES)
def test_what_a_wrong_gradient_looks_like(said: str) -> None:
    found = kind(WHOLE, [CASES[said](rank) for rank in range(4)], PARTS, MESH)
    assert said in found
    assert bool(said) == bool(found)


def test_a_sum_that_is_not_taken_over_tp_is_a_partial_sum() -> None:
    found = kind(WHOLE, [OTHER, WHOLE - OTHER], None, MeshPlan(1, 1, tp=2))
    assert "the reduction over tp is missing" in found


@pytest.mark.parametrize("places", [[1, 2], [0, 4, 2]], ids=["together", "apart"])
def test_a_rank_may_hold_any_rows(places: list[int]) -> None:
    found = own_slice(WHOLE[places], WHOLE)
    assert found is not None
    assert (found[0], found[1].tolist()) == (0, places)
    assert own_slice(OTHER[places], WHOLE) is None
