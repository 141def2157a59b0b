"""An embedding that is not gathered for its backward trains bit for bit like one that is."""

from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.parallel.fsdp import local_part
from meshwright.train.model.llama import loss_of_llama
from meshwright.train.step import train_step
from tests.support.launch import EAGER, TINY
from tests.support.sharded import build_sharded, random_batches
from tests.support.worlds import run_ranks

COMPILED = ("--parallel.compile.backend=aot_eager",)
CASES = {
    "fsdp": (2, (*EAGER, "--train.micro_batch_size=1")),
    "fsdp-compiled": (2, COMPILED),
    "hsdp-and-tp": (8, (*EAGER, "--parallel.dp_replicate=2", "--parallel.tp=2")),
    "kept-gathered": (2, (*EAGER, "--parallel.reshard_after_forward=false")),
    "smaller-group": (4, (*EAGER, "--parallel.reshard_after_forward=2")),
    "cpu-offload": (2, (*EAGER, "--parallel.cpu_offload=true")),
    "one-process": (1, EAGER),
}


def losses_and_weights(arguments: list[str], gathered: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Train two steps; return the losses and this rank's shards of the weights."""
    run: Any = build_sharded(arguments)
    assert not run.plan.units[0].unshard_in_backward
    run.model.tok_embeddings.set_unshard_in_backward(gathered)
    losses = [
        train_step(
            run.model, run.plan.units, run.optimizer, random_batches(run), 1.0, run.group, loss_of_llama
        ).loss.item()
        for _ in range(2)
    ]
    return losses, {name: local_part(p).detach().clone() for name, p in run.model.named_parameters()}


@pytest.mark.parametrize("case", CASES)
def test_the_gradients_are_those_of_a_gathered_embedding(case: str) -> None:
    ranks, arguments = CASES[case]
    both = [run_ranks(ranks, losses_and_weights, [*TINY, *arguments], gathered) for gathered in (False, True)]
    for (losses, weights), (expected_losses, expected_weights) in zip(*both, strict=True):
        assert losses == expected_losses
        assert losses[1] < losses[0], "the second step has the same batch"
        assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)
