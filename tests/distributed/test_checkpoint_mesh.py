"""A checkpoint saved on one mesh loads on any other mesh, bitwise equal: parameters and optimizer state."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.train.checkpoint.commit import list_checkpoints
from meshwright.train.checkpoint.load import load_checkpoint
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.checkpoint.reader import open_checkpoint, read_tensors
from meshwright.train.checkpoint.save import CheckpointSaver
from meshwright.train.checkpoint.shards import own_shards, training_tensors
from meshwright.train.checkpoint.verify import verify_together
from meshwright.train.config import CheckpointConfig
from meshwright.train.step import train_step
from tests.support.launch import EAGER, TINY
from tests.support.sharded import build_sharded, random_batches
from tests.support.worlds import run_ranks

SIZE = [*TINY, "--model.n_kv_heads=4", "--train.global_batch_size=8", "--model.vocab_size=1024"]
TP = [*SIZE, *EAGER, "--parallel.tp=2"]
HSDP_TP = [*SIZE, *EAGER, "--parallel.dp_replicate=2", "--parallel.dp_shard=1", "--parallel.tp=2"]
MESHES = {
    4: {
        "tp": TP,
        "shards": [*SIZE, *EAGER, "--parallel.dp_shard=4", "--parallel.activation_checkpoint=full"],
        "hsdp": [
            *SIZE,
            "--parallel.dp_replicate=2",
            "--parallel.dp_shard=2",
            "--parallel.compile.backend=aot_eager",
        ],
        "hsdp_tp": HSDP_TP,
    },
    2: {"shards": [*SIZE, *EAGER, "--parallel.dp_shard=2"]},
    1: {"alone": [*SIZE, *EAGER]},
}


def save(folder: Path, arguments: Sequence[str]) -> int:
    """Save two steps, synchronously and asynchronously; each save contains all tensors, each element once."""
    run = build_sharded(arguments)
    model, optimizer, mesh, batches = run.model, run.optimizer, run.mesh, random_batches(run)[:1]
    for step, asynchronous in ((1, False), (2, True)):
        train_step(model, optimizer, batches, 1.0, run.group)
        saver = CheckpointSaver(
            CheckpointConfig(asynchronous=asynchronous),
            folder,
            model,
            optimizer,
            mesh,
            {"config.yaml": "run: {}\n"},
            lambda: 2**30,
        )
        saver.save(TrainPosition(step, step * 8, 0, run.config.train.seq_len, dist.get_world_size(), "data"))
        if asynchronous:  # the next training step must not change the checkpoint
            wanted = {
                name: full_tensor(tensor).clone()
                for name, tensor in training_tensors(model, optimizer).items()
            }
            train_step(model, optimizer, batches, 1.0, run.group)
        saver.wait()
        (news,) = saver.poll()
        assert (news.error, news.path) == ("", folder / f"step-{step:08d}")
    counts = torch.tensor(
        sum(shard.values.numel() for shard in own_shards(training_tensors(model, optimizer), mesh).values())
    )
    dist.all_reduce(counts)
    assert counts.item() == sum(tensor.numel() for tensor in wanted.values())
    return compare(folder, wanted)


def load(folder: Path, meshes: Sequence[Sequence[str]]) -> list[int]:
    """Load the newest checkpoint on each mesh. Return the number of compared tensors for each."""
    newest, compared = list_checkpoints(folder)[-1], []
    for arguments in meshes:
        run = build_sharded(arguments)
        load_checkpoint(newest, verify_together(newest, "full"), run.model, run.optimizer)
        loaded = {
            name: full_tensor(tensor) for name, tensor in training_tensors(run.model, run.optimizer).items()
        }
        compared.append(compare(folder, loaded))
    return compared


def compare(folder: Path, wanted: dict[str, torch.Tensor]) -> int:
    """Check that all tensors are bitwise equal to those read by a single process. Return their number."""
    newest = list_checkpoints(folder)[-1]
    manifest = verify_together(newest, "full")
    saved = {name: torch.full_like(tensor, float("nan")) for name, tensor in wanted.items()}
    read_tensors(open_checkpoint(newest, manifest), saved)
    assert saved.keys() == {name for name in manifest.tensors if not name.startswith("random.")}
    different = [name for name in saved if not torch.equal(saved[name], wanted[name])]
    assert not different, different
    return len(saved)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint saved on a mesh of dp_shard 2 and tp 2."""
    folder = tmp_path_factory.mktemp("mesh") / "checkpoints"
    run_ranks(4, save, folder, TP)
    return folder


@pytest.mark.parametrize("processes", MESHES)
def test_a_checkpoint_is_the_same_on_every_mesh(processes: int, saved: Path) -> None:
    meshes = list(MESHES[processes].values())
    for compared in run_ranks(processes, load, saved, meshes):
        assert min(compared) > 2 * 7 * 3, "expected seven weights of two blocks, with two moments each"


def test_hsdp_writes_each_element_once(tmp_path: Path) -> None:
    run_ranks(4, save, tmp_path / "checkpoints", HSDP_TP)
