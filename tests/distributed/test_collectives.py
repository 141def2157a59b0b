"""What a simulation says four processes do is what four real processes do over gloo: every collective of every rank, in
order, and the bytes that each holds."""

import dataclasses
import json

import pytest

from tests.support.launch import EAGER, run
from tests.support.simulated import TINY, simulated

CASES = {
    "fsdp": [],
    "fsdp-tied-far-prefetch": ["--model.tie_embeddings=true", "--parallel.forward_prefetch=2", "--parallel.backward_prefetch=2"],
    "hsdp-accumulation": ["--parallel.dp_replicate=2", "--train.global_batch_size=12"],
    "fsdp-tp-recompute": ["--parallel.tp=2", "--parallel.activation_checkpoint=full"],
    "replicate-tp-whole-tokens": ["--parallel.dp_replicate=2", "--parallel.tp=2", "--parallel.sequence_parallel=false",
                                  "--parallel.loss_parallel=false", "--parallel.activation_checkpoint=selective"],
    "smaller-group-uneven": ["--parallel.reshard_after_forward=2", "--model.vocab_size=265"],
}  # fmt: skip
SLOW = ("fsdp-tied-far-prefetch", "smaller-group-uneven")


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES])
def test_real_processes_do_what_the_simulation_says(case, tmp_path):
    arguments = [*TINY, *EAGER, *CASES[case]]
    result = run(4, str(tmp_path), *arguments, module="tests.distributed.collectives_worker")
    assert result.returncode == 0, result.stderr
    for rank in range(4):
        real = json.loads((tmp_path / f"{rank}.json").read_text())
        simulation = simulated(4, *arguments, rank=rank)
        assert len(real["collectives"]) > 5
        assert real["collectives"] == [dataclasses.asdict(collective) for collective in simulation.collectives]
        assert real["held"] == {"params": simulation.memory.params, "optimizer": simulation.memory.optimizer}
