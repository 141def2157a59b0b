"""One rank: parameters that FSDP2 leaves alone train as those that it copies, to the bit."""

from typing import Any

import pytest
import torch

from meshwright.parallel.fsdp import full_tensor
from meshwright.parallel.plan.schema import leaves_parameters
from meshwright.train.model.trained_model import loss_of_forward
from meshwright.train.step import train_step
from tests.support.launch import EAGER, TINY
from tests.support.sharded import random_batches, sharded_alone

BFLOAT16 = ["--parallel.param_dtype=bfloat16", "--parallel.storage_dtype=bfloat16"]
OFFLOAD = "--parallel.cpu_offload=true"  # FSDP2 then gathers and reduces, with one rank too
CASES = {
    "accumulated": ["--train.micro_batch_size=1"],
    "summed": ["--train.micro_batch_size=1", "--parallel.reduce_gradients=last_micro_batch"],
    "bfloat16": [*BFLOAT16, "--parallel.activation_checkpoint=full"],
    "float8": [
        *BFLOAT16,
        "--parallel.float8.recipe=tensorwise",
        "--parallel.float8.all_gather=true",
        "--parallel.float8.min_dim=16",
    ],
    "frozen": ["--model.tie_embeddings=true", "--train.freeze=[layers.0.*]"],
}


def trained(arguments: list[str], steps: int = 3) -> tuple[bool, dict[str, Any]]:
    """Whether FSDP2 left the parameters alone; gradient norms, parameters and moments after some steps."""
    with sharded_alone([*TINY, *EAGER, *arguments]) as run:
        results = [
            train_step(run.sharded, run.optimizer, random_batches(run), 0.1, loss_of_forward)
            for _ in range(steps)
        ]
        values = {name: full_tensor(p).detach().clone() for name, p in run.model.named_parameters()}
        for name, parameter in run.model.named_parameters():
            for key, value in run.optimizer.state.get(parameter, {}).items():
                values[f"{name}.{key}"] = full_tensor(torch.as_tensor(value)).clone()
        values |= {f"norm {i}": result.grad_norm for i, result in enumerate(results)}
        return leaves_parameters(run.plan), values


@pytest.mark.parametrize("name", CASES)
def test_parameters_left_alone_train_as_those_that_are_copied(name: str) -> None:
    leaves, values = trained(CASES[name])
    copies, expected = trained([*CASES[name], OFFLOAD])
    assert (leaves, copies) == (True, False)
    assert values.keys() == expected.keys()
    assert [key for key in values if not torch.equal(values[key], expected[key])] == []
