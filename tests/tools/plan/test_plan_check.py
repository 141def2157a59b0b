"""`tools.plan --check`: the planner's collectives and memory agree with the real code, and wrong ones are
detected."""

import dataclasses
import json

import pytest

from meshwright.parallel.memory_breakdown import MemoryBreakdown, StepMemory
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.simulate.simulator import eager_plan
from meshwright.tools.plan.__main__ import main
from meshwright.tools.plan.check import Traffic, check_run, compare, predict_traffic
from meshwright.tools.simulate import simulate_run
from meshwright.train.config import TrainingJob
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.predict import predict_memory
from meshwright.train.planning.resolve import plan_run
from tests.support.simulated import TINY

Output = pytest.CaptureFixture[str]
RUN = ["--config=llama_debug", *TINY, "--model.n_layers=2", "--parallel.compile.enabled=false"]
ACCUMULATED = ["--train.micro_batch_size=1", "--train.global_batch_size=12"]
ONCE, KEPT = "--parallel.reduce_gradients=last_micro_batch", "--parallel.reshard_after_backward=false"
GATHERED = "--parallel.reshard_after_forward=false"
FROZEN = '--train.freeze=["layers.0.*","tok_embeddings.*"]'
MUON = ["--optim.name=muon", "--train.seq_len=8", "--model.vocab_size=64", "--model.n_layers=4"]
MIXED = ["--model.dim=256", "--model.ffn_dim=512", "--model.vocab_size=2048", "--train.seq_len=64"]
MIXED += ["--model.n_layers=3", "--parallel.param_dtype=bfloat16"]
STORED, MOMENTS = "--parallel.storage_dtype=bfloat16", "--optim.state_dtype=bfloat16"
REDUCED, DDP = "--parallel.reduce_dtype=bfloat16", "--parallel.strategy=ddp"
SENT = ["--parallel.activation_checkpoint=offload", "--model.n_layers=6", "--train.seq_len=512"]
CASES = [
    # 6 shards: rows that do not divide evenly are padded
    (12, [*ACCUMULATED, "--parallel.dp_replicate=2", "--parallel.activation_checkpoint=full"]),
    (
        4,
        [
            *ACCUMULATED,
            KEPT,
            "--parallel.reshard_after_forward=2",
            "--parallel.activation_checkpoint=selective",
        ],
    ),
    (4, [*ACCUMULATED, ONCE, KEPT, "--parallel.tp=2", "--parallel.reduce_dtype=bfloat16"]),
    (2, [*ACCUMULATED, ONCE, KEPT, GATHERED, FROZEN]),
    (2, [*ACCUMULATED, ONCE, "--parallel.cp=2"]),
    # few tokens: the peak is in Muon's rounds
    (4, [*MUON, "--parallel.dp_replicate=4"]),
    (1, [*MIXED, STORED, MOMENTS]),
    (4, [*MIXED, *ACCUMULATED, STORED, "--parallel.dp_replicate=2"]),
    (4, [*MIXED, REDUCED, DDP]),
    (4, [*MIXED, STORED, MOMENTS, REDUCED, "--parallel.tp=2"]),
    (4, [*MIXED, *SENT]),
]
MORE = [
    (4, [*ACCUMULATED, ONCE, "--parallel.cp=2", "--parallel.tp=2", "--parallel.cp_exchange=gather"]),
    (1, []),
    (4, ["--parallel.dp_replicate=4"]),
    (4, ["--parallel.tp=2", "--parallel.sequence_parallel=false"]),
    (2, ["--model.tie_embeddings=true", "--parallel.param_dtype=bfloat16"]),
    # few tokens: the peak is where the gradients of the tied weight are added
    (4, ["--model.tie_embeddings=true", "--model.vocab_size=4096", "--train.seq_len=16"]),
    (4, [*ACCUMULATED, ONCE, KEPT, GATHERED, "--parallel.dp_replicate=2", "--parallel.param_dtype=bfloat16"]),
    (4, ["--parallel.cp=4", "--train.global_batch_size=4"]),
    (4, [*MUON, "--parallel.dp_replicate=2", "--parallel.tp=2"]),
    (2, ["--optim.name=muon", "--parallel.param_dtype=bfloat16", FROZEN]),
    (4, [*MIXED, *ACCUMULATED, STORED, MOMENTS]),
    (4, [*MIXED, *SENT, "--parallel.tp=2"]),
    (4, [*MIXED, STORED, DDP]),
]
SAMPLED = [pytest.mark.slow, pytest.mark.sampled(6, together="test_plan_check")]


def small(world_size: int, keys: list[str]) -> tuple[TrainingJob, Plan]:
    config = parse_config([*RUN, "--train.global_batch_size=-1", *keys])
    return config.job, plan_run(config.job, world_size, 8)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("world_size", "keys"), [*CASES, *(pytest.param(*case, marks=SAMPLED) for case in MORE)], ids=str
)
def test_collectives_and_memory_are_those_of_the_real_code(world_size: int, keys: list[str]) -> None:
    check = check_run(*small(world_size, keys))
    assert check.wrong == []
    assert any(row.limit for row in check.collectives) is (world_size > 1)
    difference = {row.name: abs(row.difference) for row in (*check.collectives, *check.memory)}
    if MIXED[0] in keys:
        assert difference["peak"] < 0.035
        assert max(difference["params"], difference["optimizer"]) < 1e-3
    if MUON[0] in keys:
        assert difference["peak"] < 0.02
        assert difference["all_to_all world, bytes"] < 0.3, "rank 0 does not own the most"


def test_a_wrong_prediction_is_caught() -> None:
    """One kind of memory off by 2%, a missing collective, and a wrong peak; other kinds are not judged."""
    job, plan = small(4, [])
    plan, simulation = eager_plan(plan), simulate_run(job, plan)
    traffic, memory = predict_traffic(job, plan), predict_memory(job, plan)

    def wrong(traffic: Traffic = traffic, **kinds: float) -> list[str]:
        total = dataclasses.replace(memory.memory, **{kind: round(size) for kind, size in kinds.items()})
        check = compare(traffic, StepMemory(total, memory.at_peak), simulation)
        return [row.name for row in check.wrong]

    assert wrong() == wrong(activations=1.02 * memory.memory.activations) == []
    for kind in ("params", "grads", "optimizer"):
        assert wrong(**{kind: 1.02 * getattr(memory.memory, kind)}) == [kind]
    for op in ("all_gather", "reduce_scatter"):
        count, size = traffic[op, "dp_shard"]
        assert wrong({**traffic, (op, "dp_shard"): (count - 1, size)}) == [f"{op} dp_shard, count"]
    high = memory.at_peak.activations + memory.peak_bytes // 10
    peak = StepMemory(memory.memory, dataclasses.replace(memory.at_peak, activations=high))
    assert [row.name for row in compare(traffic, peak, simulation).memory if not row.agrees] == ["peak"]


def test_the_command_shows_both_sides_and_a_failed_check_leaves_with_1(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*RUN, "--gpus=4", "--train.global_batch_size=-1", "--check"]
    main([*arguments, "--json"])
    check = json.loads(capsys.readouterr().out)["check"]
    assert check["agrees"] is True
    assert {"name", "predicted", "simulated", "limit", "difference", "agrees"} == set(check["memory"][0])
    kinds = [field.name for field in dataclasses.fields(MemoryBreakdown)]
    assert [row["name"] for row in check["memory"]] == [*kinds, "peak"]
    monkeypatch.setattr("meshwright.tools.plan.check.EXACT", -1.0)  # a limit that nothing can meet
    with pytest.raises(SystemExit, match="1"):
        main(arguments)
    text = capsys.readouterr().out
    for part in ("all_gather dp_shard, count", "predicted", "simulated", "\npeak ", "check failed: "):
        assert part in text
