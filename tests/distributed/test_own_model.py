"""Models that nobody here wrote compute the same, sharded, recomputed, compiled and split, as one process;
and train and save the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import meshwright as mw
from meshwright.tools.bench.own_model.command import compare_in_worker
from meshwright.tools.bench.own_model.models import MODELS, on_meta, plans_of
from tests.support.own_models import EACH
from tests.support.worlds import run_ranks


def make(name: str, processes: int, **keys: Any) -> tuple[Any, Any, Any]:
    """A model on the meta device, its plan and its example."""
    model, example = on_meta(MODELS[name])
    compiled = mw.CompileConfig(backend="aot_eager")
    config = mw.ParallelConfig(compile=compiled, **keys)
    units = mw.describe(model, example)
    return model, mw.make_plan(config, units, mw.RunShape(processes, processes, seq_len=12)), example


@pytest.mark.parametrize("name", EACH)
def test_the_same_outputs_and_gradients_as_one_process(name: str) -> None:
    for processes in (2, 4):
        if plans := plans_of(name, processes):
            found = run_ranks(processes, compare_in_worker, torch.device("cpu"), name, plans)[0]
            for plan, result in found.items():
                assert result["differences"] == [], plan
                assert result["compared"] > 10
                assert result["largest"] < 1e-5
                if name.startswith("transformers'"):
                    # two kinds of Gemma 3's blocks; the input of ViT's first has other strides
                    kinds = 2 if name.endswith(("Gemma 3", "ViT")) else 1
                    assert result["graphs"] == kinds, "one graph for each kind of block"


def train(name: str, keys: dict[str, Any], folder: str, steps: int, load: bool) -> list[float]:
    """Losses and gradient norms in turn, of some steps on data that can be learned."""
    model, plan, example = make(name, dist.get_world_size(), **keys)
    sharded = mw.apply_plan(model, plan, mw.build_mesh(plan.mesh, "cpu"), gradients="sum")
    mw.materialize(sharded, seed=1)
    model.eval()  # no dropout, whose masks depend on the rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    first = 0
    if load:
        loaded = mw.load(folder, sharded, optimizer)
        assert loaded is not None
        first, extra = loaded
        assert extra == {"name": name}
    seen = []
    ids = example["input_ids"].repeat(2, 1)
    for _ in range(first, first + steps):
        own = ids.tensor_split(plan.mesh.data_parallel)[sharded.data_rank].split(2)
        total = torch.zeros(())
        for batch, count in sharded.micro_batches(own, lambda batch: batch.numel()):
            output = model(input_ids=batch)
            logits = getattr(output, "logits", output).float()
            loss = F.cross_entropy(logits.flatten(0, 1), batch.flatten(), reduction="sum") / count
            loss.backward()
            total += loss.detach()
        norm = sharded.clip_grad_norm(0.5)
        dist.all_reduce(total, group=sharded.data_group)
        optimizer.step()
        optimizer.zero_grad()
        seen += [total.item(), norm.item()]
    if not load:
        mw.save(folder, sharded, optimizer, first + steps, extra={"name": name})
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformers' Qwen3", "torch's TransformerEncoder"])
def test_every_mesh_trains_the_same_and_goes_on_from_any_other(name: str, tmp_path: Path) -> None:
    alone = run_ranks(1, train, name, {}, str(tmp_path / "1"), 4, False)[0]
    assert alone[-2] < alone[0] - 0.1, "it learns"
    meshes = [(2, {"activation_checkpoint": "full"}), (4, {"dp_replicate": 2})]
    if name.startswith("transformers'"):
        meshes.append((4, {"tp": 2}))
    for ranks, keys in meshes:
        folder = str(tmp_path / json.dumps(keys))
        assert run_ranks(ranks, train, name, keys, folder, 4, False)[0] == pytest.approx(alone, rel=1e-4)
    on = run_ranks(2, train, name, {}, str(tmp_path / "1"), 2, True)[0]
    for ranks, keys in ((1, {}), meshes[-1]):
        folder = str(tmp_path / json.dumps(meshes[-1][1]))
        assert run_ranks(ranks, train, name, keys, folder, 2, True)[0] == pytest.approx(on, rel=1e-4)
