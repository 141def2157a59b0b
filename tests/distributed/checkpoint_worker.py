"""Saves a trained model on one mesh, or loads it on others and compares. Run by test_checkpoint_mesh.py.

Arguments: the checkpoints' folder; `save` or `load`; then one string of config arguments for each mesh.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from parallel.mesh import build_mesh, data_parallel_group
from train.build import build_model
from train.checkpoint.config import CheckpointConfig
from train.checkpoint.folder import list_checkpoints
from train.checkpoint.load import load_checkpoint, read_tensors
from train.checkpoint.manifest import Position
from train.checkpoint.saver import Saver
from train.checkpoint.shards import own_shards, training_tensors
from train.checkpoint.verify import verify_together
from train.config import parse_config
from train.ending import end_process
from train.optim import build_optimizer
from train.place import read_place
from train.planning import plan_run
from train.runtime import start_process
from train.step import Batch, train_step


def build(arguments: str):
    config, place = parse_config(arguments.split()), read_place()
    plan = plan_run(config, place.world_size, place.local_world_size)
    mesh = build_mesh(plan.mesh, "cpu")
    model = build_model(config, plan, mesh, torch.device("cpu"))
    return config, mesh, model, build_optimizer(model, config.optim)


def save(folder: Path, arguments: str) -> None:
    """Two steps, saved with and without the training waiting: both times all the tensors, each element once."""
    config, mesh, model, optimizer = build(arguments)
    tokens = torch.randint(0, 300, (2, config.train.seq_len + 1), generator=torch.Generator().manual_seed(dist.get_rank()))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    for step, asynchronous in ((1, False), (2, True)):
        train_step(model, optimizer, [batch], 1.0, data_parallel_group(mesh))
        saver = Saver(CheckpointConfig(asynchronous=asynchronous), folder, model, optimizer, mesh, {"config.yaml": "run: {}\n"},
                      lambda: 2**30)  # fmt: skip
        saver.save(Position(step, step * 8, 0, config.train.seq_len, dist.get_world_size(), "data"))
        if asynchronous:  # what training does meanwhile does not reach the checkpoint
            wanted = {name: whole(tensor).clone() for name, tensor in training_tensors(model, optimizer).items()}
            train_step(model, optimizer, [batch], 1.0, data_parallel_group(mesh))
        saver.wait()
        (news,) = saver.news()
        assert (news.error, news.path) == ("", folder / f"step-{step:08d}")
    counts = torch.tensor(sum(shard.values.numel() for shard in own_shards(training_tensors(model, optimizer), mesh).values()))
    dist.all_reduce(counts)
    assert counts.item() == sum(tensor.numel() for tensor in wanted.values())
    compare(folder, wanted)


def load(folder: Path, arguments: str) -> None:
    _, _, model, optimizer = build(arguments)
    newest = list_checkpoints(folder)[-1]
    load_checkpoint(newest, verify_together(newest, "full"), model, optimizer)
    compare(folder, {name: whole(tensor) for name, tensor in training_tensors(model, optimizer).items()})


def compare(folder: Path, wanted: dict[str, torch.Tensor]) -> None:
    """Bit for bit with what a single process reads."""
    newest = list_checkpoints(folder)[-1]
    manifest = verify_together(newest, "full")
    saved = {name: torch.full_like(tensor, float("nan")) for name, tensor in wanted.items()}
    read_tensors(newest, manifest, saved, alone=True)
    assert saved.keys() == {name for name in manifest.tensors if not name.startswith("random.")}
    different = [name for name in saved if not torch.equal(saved[name], wanted[name])]
    assert not different, different
    if dist.get_rank() == 0:
        print(json.dumps({"compared": len(saved)}), flush=True)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    _, target, action, *meshes = sys.argv
    first = parse_config(meshes[0].split())
    start_process(first.run, read_place(), torch.device("cpu"))
    for one in meshes:
        {"save": save, "load": load}[action](Path(target), one)
    dist.destroy_process_group()
    end_process(0)
