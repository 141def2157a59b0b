"""The number of process groups of a plan: each has its own sockets and threads, and on GPUs a communicator's
memory."""

import pytest
import torch.distributed as dist

from meshwright.train.evaluation import evaluate
from meshwright.train.step import train_step
from tests.support.launch import EAGER, TINY
from tests.support.sharded import build_sharded, random_batches
from tests.support.worlds import run_ranks


def groups_and_losses(layers: int, reshard: str) -> tuple[int, list[float]]:
    """Return the number of process groups apart from the default one, and some losses."""
    run = build_sharded(
        [
            *TINY,
            *EAGER,
            f"--model.n_layers={layers}",
            f"--parallel.reshard_after_forward={reshard}",
            "--train.global_batch_size=8",
        ]
    )
    losses = [
        train_step(run.model, run.optimizer, random_batches(run), 1.0, run.group).loss.item()
        for _ in range(2)
    ]
    evaluate(run.model, random_batches(run), run.group)
    return len(dist.distributed_c10d._world.pg_map) - 1, losses


def test_groups_do_not_grow_with_the_units_that_are_resharded_to_smaller_ones() -> None:
    plain, few, more = (
        run_ranks(4, groups_and_losses, layers, reshard)[0]
        for layers, reshard in ((2, "true"), (2, "2"), (5, "2"))
    )
    assert more[0] == few[0] == plain[0] + 2, (
        "expected one group of the ranks that share a unit, and one of those with the same shard"
    )
    assert few[1] == pytest.approx(plain[1], rel=1e-6)
