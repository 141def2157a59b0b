"""`tools.plan --check`: the planner's collectives and memory agree with the real code, and wrong ones are
detected."""

import dataclasses
import json

import pytest

from meshwright.parallel.memory_breakdown import MemoryBreakdown, StepMemory
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.simulate.simulator import Simulation, eager_plan
from meshwright.tools.plan.__main__ import main
from meshwright.tools.plan.check import PlanCheck, check_run, compare, predict_traffic
from meshwright.tools.simulate import simulate_run
from meshwright.train.config import TrainingJob
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.predict import predict_memory
from meshwright.train.planning.resolve import plan_run
from tests.support.simulated import TINY

Output = pytest.CaptureFixture[str]
ACCUMULATED = ["--train.micro_batch_size=1", "--train.global_batch_size=12"]
ONCE, KEPT = "--parallel.reduce_gradients=last_micro_batch", "--parallel.reshard_after_backward=false"
RUN = ["--config=llama_debug", *TINY, "--parallel.compile.enabled=false"]
CASES = [
    (1, []),
    (4, []),
    (8, ["--parallel.dp_replicate=2", "--parallel.activation_checkpoint=full"]),
    (4, ["--parallel.dp_replicate=4"]),
    (4, ["--parallel.reshard_after_forward=2"]),
    (4, ["--parallel.reshard_after_forward=false", "--parallel.activation_checkpoint=selective"]),
    (4, ["--parallel.tp=2", "--train.global_batch_size=4"]),
    (4, ["--parallel.tp=2", "--parallel.sequence_parallel=false"]),
    (2, ["--model.tie_embeddings=true", "--parallel.param_dtype=bfloat16"]),
    (2, ['--train.freeze=["layers.0.*","tok_embeddings.*"]']),
    (4, [*ACCUMULATED, ONCE]),
    (4, [*ACCUMULATED, ONCE, KEPT, "--parallel.reshard_after_forward=false", "--parallel.dp_replicate=2"]),
    (4, [*ACCUMULATED, ONCE, KEPT, "--parallel.tp=2", "--parallel.reduce_dtype=bfloat16"]),
    (4, [*ACCUMULATED, KEPT, "--parallel.reshard_after_forward=2"]),
    (2, [*ACCUMULATED, ONCE, KEPT, '--train.freeze=["layers.0.*","tok_embeddings.*"]']),
    (4, ["--parallel.cp=4", "--train.global_batch_size=4"]),
    (4, ["--parallel.cp=2", "--parallel.tp=2", "--parallel.cp_exchange=gather", *ACCUMULATED, ONCE]),
    (48, []),  # rows that do not divide evenly are padded
]


def small(world_size: int, keys: list[str]) -> tuple[TrainingJob, Plan]:
    config = parse_config([*RUN, "--train.global_batch_size=-1", *keys])
    return config.job, plan_run(config.job, world_size, 8)


@pytest.mark.parametrize(("world_size", "keys"), CASES, ids=str)
def test_collectives_are_those_of_the_real_code(world_size: int, keys: list[str]) -> None:
    check = check_run(*small(world_size, keys))
    assert [row for row in check.collectives if not row.agrees] == []
    assert any(row.limit for row in check.collectives) is (world_size > 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "keys", [[], [ONCE], [KEPT], [ONCE, KEPT, "--parallel.reshard_after_forward=false"]], ids=str
)
def test_what_micro_batches_keep_is_in_the_memory(keys: list[str], dtype: str) -> None:
    """With three micro batches. The run in float32 sums gradients as autograd does, without a cast."""
    job, plan = small(
        2, [*ACCUMULATED, "--train.global_batch_size=6", f"--parallel.param_dtype={dtype}", *keys]
    )
    check = check_run(job, plan)
    rows = {row.name: row for row in check.memory}
    assert rows["grads"].predicted == rows["grads"].simulated
    parameters = rows["params"].simulated  # this rank's half, in float32
    whole = (2 if ONCE in keys else 1) * parameters
    assert rows["grads"].simulated == pytest.approx(whole, rel=0.02)
    assert rows["peak"].difference == pytest.approx(0, abs=0.08)


def test_memory_is_that_of_the_real_code() -> None:
    check = check_run(*small(4, []))
    assert [row.name for row in check.memory] == [
        *(field.name for field in dataclasses.fields(MemoryBreakdown)),
        "peak",
    ]
    assert check.agrees


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    return simulate_run(*small(4, []))


def compared(simulation: Simulation, kind: str = "", collective: str = "") -> PlanCheck:
    """Return a check of a prediction that is 2% off in one kind of memory, or lacks one collective."""
    job, plan = small(4, [])
    traffic, memory = (
        predict_traffic(job, eager_plan(plan)),
        predict_memory(job, eager_plan(plan)),
    )
    if kind:
        wrong = dataclasses.replace(memory.memory, **{kind: round(1.02 * getattr(memory.memory, kind))})
        memory = StepMemory(wrong, memory.at_peak)
    if collective:
        count, size = traffic[collective, "dp_shard"]
        traffic[collective, "dp_shard"] = count - 1, size
    return compare(traffic, memory, simulation)


@pytest.mark.parametrize("kind", ["params", "grads", "optimizer"])
def test_wrong_memory_is_caught(kind: str, simulation: Simulation) -> None:
    assert [row.name for row in compared(simulation, kind).memory if not row.agrees] == [kind]


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_a_missing_collective_is_caught(op: str, simulation: Simulation) -> None:
    check = compared(simulation, collective=op)
    assert [row.name for row in check.collectives if not row.agrees] == [f"{op} dp_shard, count"]
    assert not check.agrees


def test_a_wrong_peak_is_caught_and_other_kinds_are_not_judged(simulation: Simulation) -> None:
    assert compared(simulation, "activations").agrees
    job, plan = small(4, [])
    memory = predict_memory(job, eager_plan(plan))
    high = dataclasses.replace(
        memory.at_peak, activations=memory.at_peak.activations + memory.peak_bytes // 10
    )
    check = compare(predict_traffic(job, eager_plan(plan)), StepMemory(memory.memory, high), simulation)
    assert [row.name for row in check.memory if not row.agrees] == ["peak"]


def test_the_command_says_both_sides(capsys: Output) -> None:
    arguments = [*RUN, "--gpus=4", "--train.global_batch_size=-1", "--check"]
    main(arguments)
    text = capsys.readouterr().out
    for part in ("all_gather dp_shard, count", "predicted", "simulated", "\npeak ", "\ncheck passed: "):
        assert part in text
    main([*arguments, "--json"])
    check = json.loads(capsys.readouterr().out)["check"]
    assert check["agrees"] is True
    assert {"name", "predicted", "simulated", "limit", "difference", "agrees"} == set(check["memory"][0])


def test_a_failed_check_leaves_with_1(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.tools.plan.check.EXACT", -1.0)  # a limit that nothing can meet
    with pytest.raises(SystemExit, match="1"):
        main([*RUN, "--gpus=4", "--train.global_batch_size=-1", "--check"])
    assert "check failed: " in capsys.readouterr().out
