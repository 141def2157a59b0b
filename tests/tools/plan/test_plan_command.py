"""`tools.plan`: plan, memory and verdict without a GPU or processes, and differences between plans."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.diff import describe_difference, diff_plans
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import load_plan, plan_to_yaml
from meshwright.tools.plan.__main__ import main, make_parser
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError
from meshwright.train.planning.resolve import plan_run

Tool = Callable[..., CompletedProcess[str]]
Output = pytest.CaptureFixture[str]
PLAN = ["--config=llama_debug", "--gpus=4", "--train.global_batch_size=-1"]
EAGER = "--parallel.compile.enabled=false"  # because tracing a compiled step takes seconds
KINDS = ["params", "grads", "optimizer", "unsharded", "activations", "logits", "buffers"]


@pytest.fixture
def plan_file(tmp_path: Path, capsys: Output) -> Path:
    """A file with the plan of the debug model on 4 processes."""
    main([*PLAN, "--json"])
    path = tmp_path / "a.yaml"
    path.write_text(json.dumps(json.loads(capsys.readouterr().out)["plan"]))  # JSON is YAML
    return path


def test_json_has_the_plan_and_the_memory(capsys: Output) -> None:
    main(["--config", "llama_8b", "--gpus", "8", EAGER, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["plan"]["mesh"] == {"dp_replicate": 1, "dp_shard": 8, "tp": 1, "cp": 1}
    assert [unit["unit"] for unit in document["plan"]["units"]] == ["tok_embeddings", "layers.[0-31]", "head"]
    memory = document["predicted"]["memory"]
    assert list(memory) == KINDS
    assert memory["params"] == pytest.approx(8.03e9 * 4 / 8 / 2**30, rel=0.01)
    predicted = document["predicted"]
    assert list(predicted["memory_at_peak"]) == KINDS
    assert predicted["peak_memory_gib"] == pytest.approx(sum(predicted["memory_at_peak"].values()))
    assert all(memory[kind] >= gib for kind, gib in predicted["memory_at_peak"].items())
    assert all(
        predicted[key] is None
        for key in ("fits", "step_time_s", "tokens_per_s_per_gpu", "mfu", "reserved_gib")
    )
    assert document["reasons"] == []
    assert not dist.is_initialized()


@pytest.mark.parametrize(("gpus", "fits"), [("1", False), ("64", True)])
def test_the_verdict(capsys: Output, gpus: str, fits: bool) -> None:
    arguments = ["--config=llama_8b", "--gpus", gpus, "--gpu=h100-sxm", EAGER]
    main([*arguments, "--json"])
    assert json.loads(capsys.readouterr().out)["predicted"]["fits"] is fits
    main(arguments)
    text = capsys.readouterr().out
    assert ("\nfits h100-sxm: " in text) is fits
    assert ("does not fit" in text and "Fits: " in text) is not fits


def test_config_keys_win_over_the_file(capsys: Output) -> None:
    keys = [
        "--parallel.dp_replicate=2",
        "--train.micro_batch_size",
        "2",
        "--parallel.dp_shard",
        "-1",
        "--parallel.activation_checkpoint=full",
        EAGER,
    ]
    main(["--config", "llama_debug", "--train.global_batch_size=-1", *keys, "--gpus=8", "--json"])
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["mesh"] == {"dp_replicate": 2, "dp_shard": 4, "tp": 1, "cp": 1}
    assert plan["micro_batch_size"] == 2
    assert plan["units"][1]["activation_checkpoint"] == "full"


def test_text_has_plan_and_memory(capsys: Output) -> None:
    main(["--config", "llama_debug", "--gpus", "2", "--train.global_batch_size=-1", EAGER])
    text = capsys.readouterr().out
    assert "mesh: dp_replicate 1 x dp_shard 2 x tp 1 = 2 processes" in text
    assert all(f"\n{kind} " in text for kind in [*KINDS, "total"])
    assert "fit" not in text


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--config=llama_8", "--gpus=8"], ConfigError, "Did you mean llama_8b.yaml"),
        (["--config=llama_8b", "--gpus=8", "--gpu=h100"], ConfigError, "Did you mean h100-sxm"),
        (
            ["--config=llama_8b", "--gpus=8", "--parallel.dp_shar=4"],
            ConfigError,
            "Did you mean parallel.dp_shard",
        ),
        (["--config=llama_8b", "--gpus=8", "--parallel.dp_shard=3"], PlanError, "dp_shard=3"),
        (["diff", "nothing.yaml", "nothing.yaml"], PlanError, "nothing.yaml"),
    ],
)
def test_mistakes_are_named(arguments: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        main(arguments)


@pytest.mark.parametrize(
    "bad",
    [
        [],
        ["--gpus=8"],
        ["--config=llama_8b", "--gpus=0"],
        ["--config=llama_8b", "--gpus=8", "--gpus-per-node=0"],
        ["--config=llama_8b", "--gpus=8", "--gpu=h100-sxm", "--tokens=0"],
        ["--config=llama_8b", "--gpus=8", "--gpu=h100-sxm", "--tokens=many"],
        ["diff", "one.yaml"],
    ],
    ids=str,
)
def test_bad_options_are_said(bad: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"See python -m tools\.plan -h$"):
        main(bad)


def test_diff_in_words(plan_file: Path, tmp_path: Path, capsys: Output) -> None:
    main(["diff", str(plan_file), str(plan_file)])
    assert capsys.readouterr().out == "the two plans are the same\n"
    other = tmp_path / "b.yaml"
    keys = [
        "--parallel.activation_checkpoint=full",
        "--parallel.dp_replicate=2",
        "--parallel.compile.enabled=false",
        "--train.micro_batch_size=2",
    ]
    main([*PLAN, "--json", *keys])
    other.write_text(json.dumps(json.loads(capsys.readouterr().out)["plan"]))
    main(["diff", str(plan_file), str(other)])
    lines = capsys.readouterr().out.splitlines()
    assert "mesh: dp_shard 4 -> 2" in lines
    assert "compile: enabled true -> false" in lines
    assert "units layers.0 to layers.5 (6): activation_checkpoint none -> full" in lines
    assert "unit head: compiled true -> false" in lines
    main(["diff", str(plan_file), str(other), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["same"] is False
    assert {"where": "mesh", "key": "dp_replicate", "a": 1, "b": 2} in document["differences"]


def test_diff_sees_units_of_one_plan_only_order_and_types(
    plan_file: Path, tmp_path: Path, capsys: Output
) -> None:
    plan = load_plan(plan_file)
    fewer = dataclasses.replace(plan, units=plan.units[:-3] + plan.units[-1:])
    (tmp_path / "fewer.yaml").write_text(plan_to_yaml(fewer))
    main(["diff", str(plan_file), str(tmp_path / "fewer.yaml")])
    assert capsys.readouterr().out.splitlines()[1:] == ["units layers.4 to layers.5 (2): only in the first"]
    turned = dataclasses.replace(plan, units=plan.units[::-1])
    assert [d.key for d in diff_plans(plan, turned)] == ["order"]
    resharded_to_one = dataclasses.replace(plan.units[0], reshard_after_forward=1)
    typed = dataclasses.replace(plan, units=(resharded_to_one, *plan.units[1:]))
    assert [(d.where, d.a, d.b) for d in diff_plans(plan, typed)] == [("unit tok_embeddings", True, 1)]


def small_plan(*keys: str) -> Plan:
    return plan_run(parse_config(["--config=llama_debug", "--train.global_batch_size=-1", *keys]).job, 4)


DIFFERING = [
    (
        ["--parallel.tp=2"],
        [
            "mesh: dp_shard 4 -> 2",
            "mesh: tp 1 -> 2",
            "tensor: sequence_parallel false -> true",
            "tensor: styles none -> of 13 patterns",
            "plan: global_batch_size 4 -> 2",
        ],
    ),
    (["--parallel.cpu_offload=true"], ["plan: cpu_offload false -> true"]),
    (
        ["--parallel.forward_prefetch=0", "--parallel.backward_prefetch=2"],
        [
            "units tok_embeddings to head (8): forward_prefetch 1 -> 0",
            "units tok_embeddings to head (8): backward_prefetch 1 -> 2",
        ],
    ),
    (
        ["--parallel.activation_checkpoint=selective", "--parallel.selective_policy=aten.mm/2,aten.silu"],
        [
            "units layers.0 to layers.5 (6): activation_checkpoint none -> selective",
            "units layers.0 to layers.5 (6): saved_ops [] -> [aten.mm/2, aten.silu]",
        ],
    ),
    (
        ["--parallel.activation_checkpoint=budget", "--parallel.activation_budget=0.3"],
        [
            "units layers.0 to layers.5 (6): activation_checkpoint none -> budget",
            "units layers.0 to layers.5 (6): activation_budget 1.0 -> 0.3",
        ],
    ),
    (["--parallel.compile.cache_dir=/cache"], ["compile: cache_dir null -> /cache"]),
    (
        ["--parallel.param_dtype=bfloat16"],
        ["units tok_embeddings to head (8): param_dtype float32 -> bfloat16"],
    ),
    (
        ["--model.n_layers=7"],
        [
            "model: modules [tok_embeddings, layers.[0-5], head] -> [tok_embeddings, layers.[0-6], head]",
            "unit layers.6: only in the second",
        ],
    ),
    (
        ["--parallel.unit_min_params=700000"],
        [
            "units layers.0 to layers.5 (6): only in the first",
            "units layers.0+layers.1 to layers.4+layers.5 (3): only in the second",
        ],
    ),
]


@pytest.mark.parametrize(("keys", "lines"), DIFFERING, ids=lambda v: v[0])
def test_diff_says_what_a_key_changes(keys: list[str], lines: list[str]) -> None:
    assert [
        describe_difference(difference) for difference in diff_plans(small_plan(), small_plan(*keys))
    ] == lines


def test_diff_goes_by_pattern_where_both_plans_split_weights() -> None:
    split = small_plan("--parallel.tp=2")
    gathered = small_plan(
        "--parallel.tp=2",
        "--parallel.loss_parallel=false",
        "--parallel.tp_modules=[head]",
        "--parallel.sequence_parallel=false",
    )
    lines = [describe_difference(difference) for difference in diff_plans(split, gathered)]
    assert lines[:2] == [
        "tensor: sequence_parallel true -> false",
        "tensor: tok_embeddings vocab -> whole_vocab",
    ]
    assert "tensor: head.output logits -> gathered_logits" in lines
    assert "tensor: head.loss loss -> no style" in lines


def test_diff_shows_hand_written_prefetch_lists() -> None:
    plan = small_plan()
    unit = dataclasses.replace(plan.units[3], forward_prefetch=("layers.3", "head"), backward_prefetch=())
    other = dataclasses.replace(plan, units=(*plan.units[:3], unit, *plan.units[4:]))
    assert [describe_difference(difference) for difference in diff_plans(plan, other)] == [
        "unit layers.2: forward_prefetch 1 -> [layers.3, head]",
        "unit layers.2: backward_prefetch 1 -> []",
    ]


def altered(value: Any) -> Any:
    """Return a different value of the same type, or an equal value of another type."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int | float):
        return value + 1
    return value + "x" if isinstance(value, str) else (*value, "x") if isinstance(value, tuple) else "x"


def test_diff_misses_no_field_of_a_plan() -> None:
    """Including fields that are added later."""
    plan = small_plan("--parallel.tp=2")
    for part in (plan.mesh, plan.tensor, plan.context, plan.compile, plan.float8, plan.units[1]):
        for field in dataclasses.fields(part):
            if field.name in ("styles", "modules"):
                continue
            changed = dataclasses.replace(part, **{field.name: altered(getattr(part, field.name))})
            plan_key = {
                id(plan.mesh): "mesh",
                id(plan.tensor): "tensor",
                id(plan.context): "context",
                id(plan.compile): "compile",
                id(plan.float8): "float8",
            }.get(id(part))
            units = (plan.units[0], changed, *plan.units[2:])
            other = dataclasses.replace(plan, **({plan_key: changed} if plan_key else {"units": units}))
            assert field.name in [difference.key for difference in diff_plans(plan, other)]
    plan_keys = (
        "micro_batch_size",
        "accumulation",
        "cpu_offload",
        "storage_dtype",
        "attention",
        "loss_chunk_tokens",
        "fused_projections",
        "async_tp",
        "modules",
        "unsharded",
    )
    for key in plan_keys:
        other = dataclasses.replace(plan, **{key: altered(getattr(plan, key))})
        assert key in [difference.key for difference in diff_plans(plan, other)]
    assert {field.name for field in dataclasses.fields(Plan)} == {
        "mesh",
        "tensor",
        "context",
        "compile",
        "float8",
        "units",
        *plan_keys,
    }


def test_strategy_and_advice_are_said(capsys: Output) -> None:
    main([*PLAN, EAGER, "--gpus=16", "--parallel.strategy=hybrid_shard"])
    text = capsys.readouterr().out
    assert "mesh: dp_replicate 2 x dp_shard 8 x tp 1 = 16 processes" in text
    assert (
        "\nstrategy hybrid_shard: HSDP: ZeRO-3 within each node, replicated across nodes (dp_replicate 2, "
        in text
    )
    assert "advice" not in text
    main([*PLAN, EAGER, "--gpus=16", "--parallel.strategy=hybrid_shard", "--gpus-per-node=4"])
    assert "mesh: dp_replicate 4 x dp_shard 4 x tp 1 = 16 processes" in capsys.readouterr().out
    main([*PLAN, EAGER, "--parallel.dp_replicate=2"])
    assert "\nadvice: dp_replicate=2 within a single node" in capsys.readouterr().out


@pytest.mark.parametrize(("keys", "count"), [([], 0), (["--parallel.dp_replicate=2"], 1)])
def test_json_has_the_advice_as_a_list(keys: list[str], count: int, capsys: Output) -> None:
    main([*PLAN, EAGER, "--json", *keys])
    advice = json.loads(capsys.readouterr().out)["advice"]
    assert len(advice) == count
    assert all(isinstance(sentence, str) for sentence in advice)


def test_a_node_has_no_more_gpus_than_the_run(capsys: Output) -> None:
    """A run on 3 GPUs has a node of 3, which tp=3 divides, not of 8, the default."""
    main(
        [
            *PLAN,
            EAGER,
            "--gpus=3",
            "--parallel.tp=3",
            "--model.n_heads=6",
            "--model.n_kv_heads=3",
            "--model.ffn_dim=513",
            "--train.seq_len=255",
        ]
    )
    assert "advice" not in capsys.readouterr().out


def test_help_names_every_option(tool: Tool) -> None:
    done = tool("plan", "-h")
    assert (done.returncode, done.stderr) == (0, "")
    for action in make_parser()._actions:
        assert all(option in done.stdout for option in action.option_strings)
        assert action.help
    for part in ("--section.key=value", "diff", "h100-sxm", "train.main -h"):
        assert part in " ".join(done.stdout.split())


def test_a_bad_path_is_one_line(tool: Tool) -> None:
    done = tool("plan", "--config", "nowhere/nothing.yaml", "--gpus", "8")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("ConfigError: ")


@pytest.mark.slow
def test_this_machine_is_measured_and_the_prediction_says_so(tool: Tool, tmp_path: Path) -> None:
    options = [
        *("--config=llama_debug", "--gpus=2", "--gpu=here", "--train.seq_len=32", "--model.dim=64"),
        f"--parallel.compile.cache_dir={tmp_path}",
    ]
    first, second = (tool("plan", *options) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert "here: measured this machine for" in first.stderr
    assert "on 2 processes, 2 per node: this machine" in first.stdout
    assert "here: this machine as it measured itself 1 minute ago" in second.stderr
    assert second.stdout == first.stdout
