"""A simulation of four ranks compared with four real ranks over gloo: every collective of every rank, in
order, and each rank's bytes of parameters and optimizer state."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from meshwright.parallel.simulate.collectives import StepRecorder, axes_of_groups
from meshwright.parallel.simulate.module_tracker import ModuleTracker
from meshwright.train.model.llama import loss_of_llama
from meshwright.train.step import train_step
from tests.support.launch import EAGER
from tests.support.sharded import build_sharded, random_batches
from tests.support.simulated import TINY, simulated
from tests.support.worlds import run_ranks

RANKS, UNEVEN = 4, "smaller-group-uneven"
FOUR = ["--train.micro_batch_size=1", "--train.global_batch_size=16"]  # micro batches
FOUR_WITH_TP = ["--train.micro_batch_size=1", "--train.global_batch_size=8"]
ONCE, KEPT = "--parallel.reduce_gradients=last_micro_batch", "--parallel.reshard_after_backward=false"
CASES = {
    "fsdp": [],
    "fsdp-tied-far-prefetch": [
        "--model.tie_embeddings=true",
        "--parallel.forward_prefetch=2",
        "--parallel.backward_prefetch=2",
    ],
    "hsdp-accumulation": ["--parallel.dp_replicate=2", "--train.global_batch_size=12"],
    "reduced-once-kept": [*FOUR, ONCE, KEPT, "--parallel.dp_replicate=2"],
    "fsdp-tp-recompute": [
        "--parallel.tp=2",
        "--parallel.activation_checkpoint=full",
        *FOUR_WITH_TP,
        ONCE,
        KEPT,
    ],
    "replicate-tp-whole-tokens": [
        "--parallel.dp_replicate=2",
        "--parallel.tp=2",
        "--parallel.sequence_parallel=false",
        "--parallel.loss_parallel=false",
        "--parallel.activation_checkpoint=selective",
    ],
    "heads": ["--parallel.cp=2", "--train.global_batch_size=4"],
    "gather-recompute": [
        "--parallel.cp=4",
        "--parallel.cp_exchange=gather",
        "--parallel.activation_checkpoint=full",
        "--train.global_batch_size=4",
    ],
    UNEVEN: ["--parallel.reshard_after_forward=2", "--model.vocab_size=265"],
}
SLOW = ("fsdp-tied-far-prefetch", UNEVEN)  # simulating them takes long


def step(arguments: Sequence[str]) -> dict[str, Any]:
    """Return this rank's collectives of one step, and its bytes of parameters and optimizer state."""
    run = build_sharded(arguments)
    batches = random_batches(run)
    recorder = StepRecorder(ModuleTracker(run.model, run.plan), axes_of_groups(run.mesh, run.group), None)
    with recorder.position.following(), recorder:
        train_step(run.model, run.plan.units, run.optimizer, batches, 1.0, run.group, loss_of_llama)
    state = [value for values in run.optimizer.state.values() for value in values.values()]
    return {
        "collectives": [dataclasses.asdict(collective) for collective in recorder.collectives],
        "held": {"params": bytes_of(run.model.parameters()), "optimizer": bytes_of(state)},
    }


def bytes_of(tensors: Any) -> int:
    return sum((t.to_local() if hasattr(t, "to_local") else t).untyped_storage().nbytes() for t in tensors)


def steps(cases: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    return {name: step(arguments) for name, arguments in cases.items()}


@pytest.fixture(scope="module")
def real() -> list[dict[str, dict[str, Any]]]:
    """The results by rank and case."""
    return run_ranks(RANKS, steps, {name: [*TINY, *EAGER, *keys] for name, keys in CASES.items()})


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES]
)
def test_real_processes_do_what_the_simulation_says(case: str, real: list[dict[str, dict[str, Any]]]) -> None:
    """If all sizes divide evenly, the ranks are equal, and one simulated rank per case is enough."""
    for rank in range(RANKS):
        simulated_rank = rank if case == UNEVEN else list(CASES).index(case) % RANKS
        seen, simulation = (
            real[rank][case],
            simulated(RANKS, *TINY, *EAGER, *CASES[case], rank=simulated_rank),
        )
        assert len(seen["collectives"]) > 5
        assert seen["collectives"] == [
            dataclasses.asdict(collective) for collective in simulation.collectives
        ]
        assert seen["held"] == {"params": simulation.memory.params, "optimizer": simulation.memory.optimizer}
