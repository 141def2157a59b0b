"""mw.save and mw.load in a loop of one's own."""

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import meshwright as mw
from meshwright.parallel.fsdp import full_tensor
from meshwright.tools.checkpoint.__main__ import main as checkpoint_tool
from meshwright.train.checkpoint.commit import list_checkpoints, step_of
from meshwright.train.checkpoint.verify import verify_alone
from meshwright.train.errors import CheckpointError, SaveError


def build(rng: random.Random) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    """A model, and an optimizer of three groups with drawn numbers, one of which has a tensor as its rate."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8))
    units = mw.describe(model, (torch.zeros(1, 8, dtype=torch.long),), blocks="[12]")
    config = mw.ParallelConfig(param_dtype="float32", compile=mw.CompileConfig(enabled=False))
    plan = mw.make_plan(config, units, mw.RunShape(1, 1, seq_len=8))
    sharded = mw.apply_plan(model, plan, mw.build_mesh(plan.mesh, "cpu"), gradients="sum")
    mw.materialize(sharded, seed=0)
    groups = [{"params": [*layer.parameters()]} for layer in (model[1], model[2], model[3])]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.5), foreach=False)
    for group in optimizer.param_groups[1:]:
        group |= {"lr": rng.random(), "betas": (rng.random(), rng.random()), "weight_decay": rng.random()}
    optimizer.param_groups[0]["lr"].fill_(rng.random())
    return sharded, model, optimizer


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """The numbers of the groups and all step counts."""
    keys = ("lr", "betas", "eps", "weight_decay")
    numbers = [{key: group[key] for key in keys} for group in optimizer.param_groups]
    return [numbers, [optimizer.state[p]["step"].item() for p in model.parameters() if p in optimizer.state]]


def test_what_is_loaded_is_what_was_saved_and_a_save_deletes_only_what_it_was_told_to(
    group: None, tmp_path: Path
) -> None:
    """Drawn saves, loads and new beginnings in one folder. Parameters take part in some of the steps only."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng, kept, now = random.Random(seed), dict[int, list[Any]](), 0
    sharded, model, optimizer = build(rng)
    for action in (*rng.choices(("save", "load", "begin"), (3, 1, 1), k=15), "load"):
        if action == "begin":
            (sharded, model, optimizer), now = build(rng), 0
        if action == "load":
            sharded, model, optimizer = build(rng)
            now, _ = mw.load(tmp_path, sharded, optimizer) or (0, {})
            assert now == max(kept, default=0)
            assert not kept or state(model, optimizer) == kept[now]
            continue
        now += rng.randrange(3)
        for parameter in model.parameters():
            parameter.grad = (
                torch.zeros_like(parameter) if rng.random() < 0.7 or not optimizer.state else None
            )
        optimizer.step()
        keep = rng.choice((0, 0, 3))
        if now > max(kept, default=-1):
            path = mw.save(tmp_path, sharded, optimizer, now, keep=keep)
            assert verify_alone(path).position.step == now
            kept[now] = state(model, optimizer)
            kept = {step: kept[step] for step in sorted(kept)[-keep:]}
        else:
            with pytest.raises(SaveError, match=rf"contains .*, so step {now} is not saved.* another folder"):
                mw.save(tmp_path, sharded, optimizer, now, keep=keep)
        assert [step_of(path) for path in list_checkpoints(tmp_path)] == sorted(kept)


def test_other_groups_and_a_negative_keep_are_refused_and_what_is_skipped_is_named(
    group: None, tmp_path: Path
) -> None:
    sharded, model, optimizer = build(random.Random(0))
    with pytest.raises(ValueError, match=r"mw\.save\.keep=-1 must be"):
        mw.save(tmp_path, sharded, optimizer, 1, keep=-1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    mw.save(tmp_path, sharded, optimizer, 1)
    optimizer.zero_grad()
    regrouped = torch.optim.AdamW([p for group in optimizer.param_groups for p in group["params"]])
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000003")
    with (
        pytest.warns(UserWarning, match=r"skipped: .*step-00000003 is damaged"),
        pytest.raises(CheckpointError, match=r"optimizer\.json has other groups .* saved with$"),
    ):
        mw.load(tmp_path, sharded, regrouped)


def test_the_config_of_a_model_of_transformers_goes_out_with_its_weights(group: None, tmp_path: Path) -> None:
    sharded, model, optimizer = build(random.Random(0))
    saved = dict(model.named_parameters())
    model.config = SimpleNamespace(from_dict=dict, to_json_string=lambda use_diff: '{"model_type": "mine"}')
    mw.save(tmp_path / "run", sharded, optimizer, 1)
    checkpoint_tool(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype=bfloat16"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("mine", "bfloat16")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights.keys() == saved.keys()
    assert all(torch.equal(weights[name], full_tensor(saved[name]).bfloat16()) for name in saved)
