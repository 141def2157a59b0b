"""tools/plan.py: plan, memory and verdict without a GPU or processes, and differences in words."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch.distributed as dist

from parallel.plan import PlanError
from parallel.plan_file import load_plan, plan_to_yaml
from tools.plan import main, make_parser
from tools.plan_diff import diff_plans
from train.config import ConfigError

Tool = Callable[..., CompletedProcess[str]]
Output = pytest.CaptureFixture[str]
PLAN = ["--config=llama_debug", "--gpus=4", "--train.global_batch_size=-1"]
KINDS = ["params", "grads", "optimizer", "unsharded", "activations", "logits", "buffers"]


@pytest.fixture
def plan_file(tmp_path: Path, capsys: Output) -> Path:
    """The plan of the debug model on 4 processes, as a file."""
    main([*PLAN, "--json"])
    path = tmp_path / "a.yaml"
    path.write_text(json.dumps(json.loads(capsys.readouterr().out)["plan"]))  # JSON is YAML
    return path


def test_json_has_the_plan_and_the_memory(capsys: Output) -> None:
    main(["--config", "llama_8b", "--gpus", "8", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["plan"]["mesh"] == {"dp_replicate": 1, "dp_shard": 8, "tp": 1}
    assert [unit["unit"] for unit in document["plan"]["units"]] == ["tok_embeddings", "layers.[0-31]", "head"]
    memory = document["predicted"]["memory"]
    assert list(memory) == KINDS
    assert memory["params"] == pytest.approx(8.03e9 * 4 / 8 / 2**30, rel=0.01)
    assert document["predicted"]["peak_memory_gib"] == pytest.approx(sum(memory.values()))
    assert document["predicted"]["fits"] is None
    assert not dist.is_initialized()


@pytest.mark.parametrize(("gpus", "fits"), [("1", False), ("64", True)])
def test_the_verdict(capsys: Output, gpus: str, fits: bool) -> None:
    arguments = ["--config=llama_8b", "--gpus", gpus, "--gpu=h100-sxm"]
    main([*arguments, "--json"])
    assert json.loads(capsys.readouterr().out)["predicted"]["fits"] is fits
    main(arguments)
    text = capsys.readouterr().out
    assert ("\nfits h100-sxm: " in text) is fits
    assert ("does not fit" in text and "Fits: " in text) is not fits


def test_config_keys_win_over_the_file(capsys: Output) -> None:
    keys = ["--parallel.dp_replicate=2", "--train.micro_batch_size", "2", "--parallel.dp_shard", "-1",
            "--parallel.activation_checkpoint=full"]  # fmt: skip
    main(["--config", "llama_debug", "--train.global_batch_size=-1", *keys, "--gpus=8", "--json"])
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["mesh"] == {"dp_replicate": 2, "dp_shard": 4, "tp": 1}
    assert plan["micro_batch_size"] == 2
    assert plan["units"][1]["activation_checkpoint"] == "full"


def test_text_has_plan_and_memory(capsys: Output) -> None:
    main(["--config", "llama_debug", "--gpus", "2", "--train.global_batch_size=-1"])
    text = capsys.readouterr().out
    assert "mesh: dp_replicate 1 x dp_shard 2 x tp 1 = 2 processes" in text
    assert all(f"\n{kind} " in text for kind in [*KINDS, "total"])
    assert "fit" not in text


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--config=llama_8", "--gpus=8"], ConfigError, "Did you mean llama_8b.yaml"),
        (["--config=llama_8b", "--gpus=8", "--gpu=h100"], ConfigError, "Did you mean h100-sxm"),
        (["--config=llama_8b", "--gpus=8", "--parallel.dp_shar=4"], ConfigError, "Did you mean parallel.dp_shard"),
        (["--config=llama_8b", "--gpus=8", "--parallel.dp_shard=3"], PlanError, "dp_shard=3"),
        (["diff", "nothing.yaml", "nothing.yaml"], PlanError, "nothing.yaml"),
    ],
)
def test_mistakes_are_named(arguments: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        main(arguments)


@pytest.mark.parametrize("bad", [[], ["--config=llama_8b"], ["--config=llama_8b", "--gpus=0"], ["diff", "one.yaml"]])
def test_bad_options_leave_with_2(bad: list[str], capsys: Output) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(bad)
    assert "error:" in capsys.readouterr().err


def test_diff_in_words(plan_file: Path, tmp_path: Path, capsys: Output) -> None:
    main(["diff", str(plan_file), str(plan_file)])
    assert capsys.readouterr().out == "the two plans are the same\n"
    other = tmp_path / "b.yaml"
    keys = ["--parallel.activation_checkpoint=full", "--parallel.dp_replicate=2", "--parallel.compile.enabled=false",
            "--train.micro_batch_size=2"]  # fmt: skip
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


def test_diff_sees_units_of_one_plan_only_order_and_types(plan_file: Path, tmp_path: Path, capsys: Output) -> None:
    plan = load_plan(plan_file)
    fewer = dataclasses.replace(plan, units=plan.units[:-3] + plan.units[-1:])
    (tmp_path / "fewer.yaml").write_text(plan_to_yaml(fewer))
    main(["diff", str(plan_file), str(tmp_path / "fewer.yaml")])
    assert capsys.readouterr().out.splitlines()[1:] == ["units layers.4 to layers.5 (2): only in the first"]
    turned = dataclasses.replace(plan, units=plan.units[::-1])
    assert [d.key for d in diff_plans(plan, turned)] == ["order"]
    one = dataclasses.replace(plan.units[0], reshard_after_forward=1)
    typed = dataclasses.replace(plan, units=(one, *plan.units[1:]))
    assert [(d.where, d.a, d.b) for d in diff_plans(plan, typed)] == [("unit tok_embeddings", True, 1)]


def test_help_names_every_option(tool: Tool) -> None:
    done = tool("plan", "-h")
    assert (done.returncode, done.stderr) == (0, "")
    for action in make_parser()._actions:
        assert all(option in done.stdout for option in action.option_strings)
        assert action.help
    for word in ("--section.key=value", "diff", "h100-sxm", "train.main -h"):
        assert word in " ".join(done.stdout.split())


def test_a_bad_path_is_one_line(tool: Tool) -> None:
    done = tool("plan", "--config", "nowhere/nothing.yaml", "--gpus", "8")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("ConfigError: ")
