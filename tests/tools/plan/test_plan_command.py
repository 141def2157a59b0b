"""`tools.plan`: plan, memory and verdict without a GPU or processes, and differences between plans."""

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.schema import Plan, UnitPlan
from meshwright.parallel.plan.serialize import diff_plans, plan_to_yaml
from meshwright.tools.plan.__main__ import main
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError
from meshwright.train.planning import fit
from meshwright.train.planning.resolve import plan_run
from tests.support.plans import check_facts
from tests.support.tables import try_each

Tool = Callable[..., CompletedProcess[str]]
Output = pytest.CaptureFixture[str]
PLAN = ["--config=llama_debug", "--gpus=4", "--train.global_batch_size=-1"]
EAGER = "--parallel.compile.enabled=false"  # because tracing a compiled step takes seconds
KINDS = ["params", "grads", "optimizer", "unsharded", "activations", "logits", "buffers"]


def small_plan(*keys: str) -> Plan:
    return plan_run(parse_config(["--config=llama_debug", "--train.global_batch_size=-1", *keys]).job, 4)


def write_plan(path: Path, plan: Plan) -> str:
    path.write_text(plan_to_yaml(plan))
    return str(path)


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
def test_the_verdict(capsys: Output, monkeypatch: pytest.MonkeyPatch, gpus: str, fits: bool) -> None:
    monkeypatch.setattr(fit, "list_configs", list)  # test_fit.py has smaller models
    arguments = ["--config=llama_8b", "--gpus", gpus, "--gpu=h100-sxm", EAGER]
    main([*arguments, "--json"])
    assert json.loads(capsys.readouterr().out)["predicted"]["fits"] is fits
    main(arguments)
    text = capsys.readouterr().out
    assert ("\nfits h100-sxm: " in text) is fits
    assert ("does not fit" in text and "Fits: " in text) is not fits


WRONG: list[tuple[list[str], str]] = [
    (["diff", "nothing.yaml", "nothing.yaml"], "nothing.yaml"),
    (["--gpus=8"], "See python -m tools.plan -h"),
    (["--config=llama_8b", "--gpus=8", "--gpu=h100-sxm", "--tokens=0"], "See python -m tools.plan -h"),
]


def test_mistakes_are_named() -> None:
    def check(arguments: list[str], facts: str) -> None:
        with pytest.raises((ConfigError, PlanError)) as error:
            main(arguments)
        check_facts(str(error.value), facts)

    try_each(WRONG, check)


def test_diff_in_words(tmp_path: Path, capsys: Output) -> None:
    one = write_plan(tmp_path / "a.yaml", small_plan())
    main(["diff", one, one])
    assert capsys.readouterr().out == "the two plans are the same\n"
    keys = ["--parallel.dp_replicate=2", "--parallel.compile.enabled=false", "--train.micro_batch_size=2"]
    other = write_plan(tmp_path / "b.yaml", small_plan(*keys, "--parallel.activation_checkpoint=full"))
    main(["diff", one, other])
    lines = capsys.readouterr().out.splitlines()
    assert "mesh.dp_shard: 4 -> 2" in lines
    assert "compile.enabled: true -> false" in lines
    full = "none in tok_embeddings, head; full in layers.[0-5]"
    assert f"units.activation_checkpoint: none -> {full}" in lines
    main(["diff", one, other, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["same"] is False
    assert {"key": "mesh.dp_replicate", "a": "1", "b": "2"} in document["differences"]


def test_diff_sees_units_of_one_plan_only_order_types_and_lists() -> None:
    plan = small_plan()

    def with_units(units: tuple[UnitPlan, ...]) -> dict[str, tuple[str, str]]:
        return diff_plans(plan, dataclasses.replace(plan, units=units))

    fewer = with_units(plan.units[:-3] + plan.units[-1:])
    assert fewer["units"] == ("tok_embeddings, layers.[0-5], head", "tok_embeddings, layers.[0-3], head")
    assert "units" in with_units((*plan.units[1::-1], *plan.units[2:])), "another order"
    settings = {"reshard_after_forward": 1, "forward_prefetch": ("layers.3", "head"), "backward_prefetch": ()}
    changed = dataclasses.replace(plan.units[3], **settings)  # type: ignore[arg-type]
    found = {
        key: after for key, (_, after) in with_units((*plan.units[:3], changed, *plan.units[4:])).items()
    }
    assert found.keys() == {f"units.{key}" for key in settings}
    assert "; 1 in layers.2; false in head" in found["units.reshard_after_forward"]
    assert "; [layers.3, head] in layers.2" in found["units.forward_prefetch"]
    assert "; [] in layers.2" in found["units.backward_prefetch"]


DIFFERING = [
    (
        ["--parallel.tp=2"],
        "mesh.dp_shard: 4 -> 2 ... mesh.tp: 1 -> 2 ... tensor.sequence_parallel: false -> true ... "
        "tensor.styles.layers.*.attention.wq: none -> colwise ... global_batch_size: 4 -> 2",
    ),
    (
        ["--parallel.activation_checkpoint=selective", "--parallel.selective_policy=aten.mm/2,aten.silu"],
        "units.saved_ops: [] -> [] in tok_embeddings, head; [aten.mm/2, aten.silu] in layers.[0-5]",
    ),
    (["--parallel.compile.cache_dir=/cache"], "compile.cache_dir: null -> /cache"),
    (
        ["--model.n_layers=7"],
        "modules: [tok_embeddings, layers.[0-5], head] -> [tok_embeddings, layers.[0-6], head]",
    ),
    (
        ["--parallel.unit_min_params=700000"],
        "units: tok_embeddings, layers.[0-5], head -> "
        "tok_embeddings, layers.0+layers.1, layers.2+layers.3, layers.4+layers.5, head",
    ),
]


def test_diff_says_what_a_key_changes() -> None:
    def check(keys: list[str], facts: str) -> None:
        found = diff_plans(small_plan(), small_plan(*keys))
        check_facts("\n".join(f"{key}: {a} -> {b}" for key, (a, b) in found.items()), facts)

    try_each(DIFFERING, check)


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

    def changes_of(**changes: Any) -> dict[str, tuple[str, str]]:
        return diff_plans(plan, dataclasses.replace(plan, **changes))

    for field in dataclasses.fields(Plan):
        value = getattr(plan, field.name)
        if not dataclasses.is_dataclass(value) and field.name != "units":
            assert field.name in changes_of(**{field.name: altered(value)})
            continue
        part, before, after = (
            (plan.units[1], plan.units[:1], plan.units[2:]) if field.name == "units" else (value, (), ())
        )
        for inner in dataclasses.fields(part):
            if inner.name not in ("styles", "modules"):
                other = copy.copy(part)  # replace() would refuse what a config key does not allow
                vars(other)[inner.name] = altered(getattr(part, inner.name))
                whole = (*before, other, *after) if before else other
                assert f"{field.name}.{inner.name}" in changes_of(**{field.name: whole})


def test_strategy_and_advice_are_said(capsys: Output) -> None:
    hybrid = [*PLAN, EAGER, "--gpus=16", "--parallel.strategy=hybrid_shard"]
    main(hybrid)
    text = capsys.readouterr().out
    check_facts(text, "dp_replicate 2 x dp_shard 8 x tp 1 = 16 processes ... \nstrategy hybrid_shard: ")
    assert "advice" not in text
    main([*hybrid, "--gpus-per-node=4"])
    assert "dp_replicate 4 x dp_shard 4 x tp 1 = 16 processes" in capsys.readouterr().out
    poor = [*PLAN, EAGER, "--parallel.dp_replicate=2"]
    main(poor)
    assert "\nadvice: dp_replicate=2 " in capsys.readouterr().out
    main([*poor, "--json"])
    (sentence,) = json.loads(capsys.readouterr().out)["advice"]
    assert sentence.startswith("dp_replicate=2 ")


def test_a_node_has_no_more_gpus_than_the_run(capsys: Output) -> None:
    """A run on 3 GPUs has a node of 3, which tp=3 divides, not of 8, the default."""
    model = ["--model.n_heads=6", "--model.n_kv_heads=3", "--model.ffn_dim=513", "--train.seq_len=255"]
    main([*PLAN, EAGER, "--gpus=3", "--parallel.tp=3", *model])
    assert "advice" not in capsys.readouterr().out


def test_a_bad_path_is_one_line(tool: Tool) -> None:
    done = tool("plan", "--config", "nowhere/nothing.yaml", "--gpus", "8")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("ConfigError: ")


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_this_machine_is_measured_and_the_prediction_says_so(tool: Tool, tmp_path: Path) -> None:
    options = [
        *("--config=llama_debug", "--gpus=2", "--gpu=here", "--train.seq_len=32", "--model.dim=64"),
        f"--parallel.compile.cache_dir={tmp_path}",
    ]
    first, second = (tool("plan", *options) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert "here: measured this machine for" in first.stderr
    assert "on 2 processes, 2 per node: this machine" in first.stdout
    assert "here: this machine as it measured itself on 20" in second.stderr
    assert second.stdout == first.stdout
