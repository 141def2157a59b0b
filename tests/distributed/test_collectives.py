"""A simulation of four ranks compared with four real ranks over gloo: every collective of every rank, in
order, and each rank's bytes of parameters and optimizer state."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest

from meshwright.parallel.simulate.collectives import StepRecorder, axes_of_groups
from meshwright.parallel.simulate.module_tracker import ModuleTracker
from meshwright.tools.plan.check import check_run
from meshwright.train.config_parser import parse_config
from meshwright.train.model.trained_model import loss_of_forward
from meshwright.train.planning.resolve import plan_run
from meshwright.train.step import train_step
from tests.support.launch import EAGER
from tests.support.sharded import build_sharded, random_batches
from tests.support.simulated import TINY, simulated
from tests.support.worlds import run_ranks

RANKS, UNEVEN = 4, "smaller-group-uneven"
CASES = {
    "hsdp-accumulation": ["--parallel.dp_replicate=2", "--train.global_batch_size=12"],
    "fsdp-tp-recompute": [
        "--parallel.tp=2",
        "--parallel.activation_checkpoint=full",
        "--train.global_batch_size=4",
        "--parallel.reduce_gradients=last_micro_batch",
        "--parallel.reshard_after_backward=false",
    ],
    "heads-tied-far-prefetch": [
        "--parallel.cp=2",
        "--train.global_batch_size=4",
        "--model.tie_embeddings=true",
        "--parallel.forward_prefetch=2",
        "--parallel.backward_prefetch=2",
    ],
    "gather-tp-whole-tokens": [
        "--parallel.cp=2",
        "--parallel.cp_exchange=gather",
        "--parallel.tp=2",
        "--parallel.sequence_parallel=false",
        "--parallel.loss_parallel=false",
        "--parallel.activation_checkpoint=selective",
    ],
    UNEVEN: ["--parallel.reshard_after_forward=2", "--model.vocab_size=265"],
}
SLOW = {UNEVEN: [pytest.mark.slow, pytest.mark.sampled(10)]}  # four simulated ranks


def step(arguments: Sequence[str]) -> dict[str, Any]:
    """Return this rank's collectives of one step, and its bytes of parameters and optimizer state."""
    run = build_sharded(arguments)
    batches = random_batches(run)
    recorder = StepRecorder(ModuleTracker(run.model, run.plan), axes_of_groups(run.mesh, run.group), None)
    with recorder.position.following(), recorder:
        train_step(run.sharded, run.optimizer, batches, 1.0, loss_of_forward)
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
def real() -> Any:
    """A function from a case to the results of all ranks; the everyday cases share four processes."""
    everyday = {name: [*TINY, *EAGER, *keys] for name, keys in CASES.items() if name not in SLOW}
    shared = functools.cache(lambda: run_ranks(RANKS, steps, everyday))

    def of_ranks(case: str) -> list[dict[str, Any]]:
        results = run_ranks(RANKS, steps, {case: [*TINY, *EAGER, *CASES[case]]}) if case in SLOW else shared()
        return [of_rank[case] for of_rank in results]

    return of_ranks


@pytest.mark.sampled(3, together="real collectives", day=1)
@pytest.mark.parametrize("case", [pytest.param(case, marks=SLOW.get(case, ())) for case in CASES])
def test_real_processes_do_what_the_simulation_says(case: str, real: Any) -> None:
    """If all sizes divide evenly, the ranks are equal, and one simulated rank per case is enough."""
    for rank, seen in enumerate(real(case)):
        simulated_rank = rank if case == UNEVEN else list(CASES).index(case) % RANKS
        simulation = simulated(RANKS, *TINY, *EAGER, *CASES[case], rank=simulated_rank)
        assert len(seen["collectives"]) > 5
        assert seen["collectives"] == [dataclasses.asdict(sent) for sent in simulation.collectives]
        assert seen["held"] == {"params": simulation.memory.params, "optimizer": simulation.memory.optimizer}


def test_the_copies_of_gradients_of_whole_parts_are_predicted() -> None:
    keys = ["--parallel.tp_modules=[feed_forward]", "--parallel.tp=2", "--train.micro_batch_size=2"]
    config = parse_config([*TINY, *EAGER, *keys])
    rows = {row.name: row for row in check_run(config.job, plan_run(config.job, RANKS)).collectives}
    assert rows["all_reduce tp, count"].agrees
    assert rows["all_reduce tp, bytes"].agrees
