"""A checkpoint saved on one mesh loads on any other mesh, bitwise equal: parameters and optimizer state. A
rank opens only the files that contain its parts, and communicates with no other."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_with_torch
from torch.distributed.tensor import DTensor

from meshwright.parallel.fsdp import full_tensor
from meshwright.train.checkpoint import reader
from meshwright.train.checkpoint.commit import list_checkpoints
from meshwright.train.checkpoint.layout import whole
from meshwright.train.checkpoint.manifest import TrainPosition, read_manifest
from meshwright.train.checkpoint.reader import load_checkpoint, open_checkpoint, read_tensors
from meshwright.train.checkpoint.save import CheckpointSaver
from meshwright.train.checkpoint.shards import (
    TensorShard,
    held_part,
    local_shards,
    training_tensors,
    write_shard_file,
)
from meshwright.train.checkpoint.verify import verify_together
from meshwright.train.config import CheckpointConfig
from meshwright.train.errors import CheckpointError
from meshwright.train.model.trained_model import loss_of_forward
from meshwright.train.step import train_step
from tests.support.launch import EAGER, TINY
from tests.support.sharded import build_sharded, random_batches
from tests.support.worlds import run_ranks

# ffn_dim: 66 rows of w1 are 33 on each of two tp ranks, which two shards split into 17 and 16
SIZE = [
    *TINY,
    "--model.n_kv_heads=4",
    "--model.ffn_dim=66",
    "--model.vocab_size=1022",
    "--train.global_batch_size=8",
    "--optim.state_dtype=bfloat16",
]
HSDP = ["--parallel.dp_replicate=2", "--parallel.dp_shard=2"]
MESHES = {
    4: {
        "tp": [*SIZE, *EAGER, "--parallel.tp=2"],
        "hsdp": [*SIZE, *HSDP, "--parallel.compile.backend=aot_eager"],
        "shards": [*SIZE, *EAGER, "--parallel.dp_shard=4", "--parallel.activation_checkpoint=full"],
        "hsdp_tp": [*SIZE, *EAGER, "--parallel.dp_replicate=2", "--parallel.dp_shard=1", "--parallel.tp=2"],
    },
    2: {"pair": [*SIZE, *EAGER, "--parallel.dp_shard=2"]},
    1: {"alone": [*SIZE, *EAGER]},
}
# of four ranks; compiled, the training steps would take most of the time
SAVED = {**MESHES[4], "hsdp": [*SIZE, *EAGER, *HSDP]}
EVERYDAY = ("tp", "hsdp")


def save_on(names: Sequence[str], folder: Path) -> None:
    """Save on each mesh, in the folder of its name."""
    for name in names:
        save(folder / name, SAVED[name], asynchronous=name != "hsdp")


def save(folder: Path, arguments: Sequence[str], asynchronous: bool) -> None:
    """Save after a step; the checkpoint contains all tensors, each element once."""
    run = build_sharded(arguments)
    model, optimizer, mesh, batches = run.model, run.optimizer, run.mesh, random_batches(run)[:1]

    def step() -> None:
        train_step(run.sharded, optimizer, batches, 1.0, loss_of_forward)

    step()
    tensors = training_tensors(model, optimizer)
    wanted = {name: full_tensor(tensor).clone() for name, tensor in tensors.items()}
    config, texts = CheckpointConfig(asynchronous=asynchronous), {"config.yaml": "run: {}\n"}
    saver = CheckpointSaver(config, folder, model, optimizer, mesh, texts, lambda: 2**30)
    saver.save(TrainPosition(1, 8, 0, run.config.train.seq_len, dist.get_world_size(), "data"))
    if asynchronous:  # the next training step must not change the checkpoint
        step()
    saver.wait()
    (news,) = saver.poll()
    assert (news.error, news.path) == ("", folder / "step-00000001")
    tensors = training_tensors(model, optimizer)
    counts = torch.tensor(sum(shard.values.numel() for shard in local_shards(tensors, mesh).values()))
    dist.all_reduce(counts)
    assert counts.item() == sum(tensor.numel() for tensor in wanted.values())
    compare(folder, wanted)


def load_on(folder: Path, meshes: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], list[str]]:
    """Load each checkpoint in the folder on each mesh and compare all tensors. Return the files that this
    rank opened, by the names of the two meshes."""
    opened: dict[tuple[str, str], list[str]] = {}
    really, last = reader.safe_open, list[str]()

    def counted(file: Path, framework: str) -> Any:
        last.append(file.name)
        return really(file, framework=framework)

    reader.safe_open = counted  # type: ignore[misc, assignment]  # this process ends with the test
    for name, arguments in meshes.items():
        run = build_sharded(arguments)
        for saved in sorted(folder.iterdir()):
            newest = list_checkpoints(saved)[-1]
            last.clear()
            load_checkpoint(newest, verify_together(newest, "full"), run.model, run.optimizer, run.mesh)
            opened[saved.name, name] = sorted(last)
            tensors = training_tensors(run.model, run.optimizer)
            assert compare(saved, {name: full_tensor(tensor) for name, tensor in tensors.items()}) > 2 * 7 * 3
    return opened


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


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints for some meshes of four ranks."""
    folder = tmp_path_factory.mktemp("mesh")
    run_ranks(4, save_on, EVERYDAY, folder)
    return folder


# The files that ranks 0 to 3 open on the mesh that saved. All parts are small: one that several ranks have
# is in the file of the first of them. Step counts are in that of rank 0, random states in each rank's own.
OPENED = {"tp": ["0", "01", "02", "023"], "shards": ["0", "01", "02", "03"]}
OPENED |= {name: ["0", "01", "02", "013"] for name in ("hsdp", "hsdp_tp")}
OF_ALL = {"tp": "0123", "shards": "0123", "hsdp": "01", "hsdp_tp": "01"}  # one replica has the parts of both


def check_loading(processes: int, names: Sequence[str], saved: Path) -> None:
    """Load on these meshes: seven weights of two blocks, with two moments each, and more; each rank opens few
    files, once."""
    opened = run_ranks(processes, load_on, saved, {name: MESHES[processes][name] for name in names})
    assert all(len(files) == len({*files}) for rank in opened for files in rank.values())
    for rank, of_rank in enumerate(opened):
        for (name, mesh), files in of_rank.items():
            if mesh in (name, "alone"):
                digits = OF_ALL[name] if mesh == "alone" else OPENED[name][rank]
                assert files == [f"rank-{int(file):05d}.safetensors" for file in digits]


@pytest.mark.parametrize(("processes", "names"), [(4, EVERYDAY), (2, ["pair"]), (1, ["alone"])])
def test_a_checkpoint_is_the_same_on_every_mesh(processes: int, names: Sequence[str], saved: Path) -> None:
    check_loading(processes, names, saved)


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_every_pair_of_meshes(tmp_path: Path) -> None:
    run_ranks(4, save_on, [*SAVED], tmp_path)
    for processes, meshes in MESHES.items():
        check_loading(processes, [*meshes], tmp_path)


def test_torch_reads_a_checkpoint(saved: Path) -> None:
    for folder in saved.iterdir():
        checkpoint = list_checkpoints(folder)[-1]
        manifest = read_manifest(checkpoint)
        ours = {
            name: torch.full(tensor.shape, float("nan"), dtype=getattr(torch, tensor.dtype))
            for name, tensor in manifest.tensors.items()
            if not name.startswith("random.")
        }
        theirs = {name: tensor.clone() for name, tensor in ours.items()}
        read_tensors(open_checkpoint(checkpoint, manifest), ours)
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            load_with_torch(theirs, storage_reader=HuggingFaceStorageReader(str(checkpoint)), no_dist=True)
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def read_without_a_group(checkpoint: Path, arguments: Sequence[str]) -> list[str]:
    """Return the tensors of which this rank reads other values than a single process. Without a process group
    any communication raises an error."""
    run = build_sharded(arguments)
    tensors, manifest = training_tensors(run.model, run.optimizer), read_manifest(checkpoint)
    dist.destroy_process_group()
    read_tensors(open_checkpoint(checkpoint, manifest), tensors)
    full = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    read_tensors(open_checkpoint(checkpoint, manifest), full)
    local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return [
        name
        for name, tensor in tensors.items()
        if not torch.equal(local[name], full[name][held_part(tensor).within(whole(tensor.shape))])
    ]


def test_ranks_read_without_each_other(saved: Path) -> None:
    """Two ranks of tp, a checkpoint of dp x tp."""
    checkpoint = list_checkpoints(saved / "tp")[-1]
    assert run_ranks(2, read_without_a_group, checkpoint, MESHES[4]["tp"]) == [[]] * 2


def load_with_a_file_of_too_few_tensors(checkpoint: Path, arguments: Sequence[str], lost: str) -> str:
    run = build_sharded(arguments)
    path = checkpoint / "rank-00003.safetensors"
    if dist.get_rank() == 0:
        kept = {name: tensor for name, tensor in load_file(path).items() if name != lost}
        path.unlink()
        shards = {name: TensorShard(tensor, (0,) * tensor.dim()) for name, tensor in kept.items()}
        write_shard_file(path, shards)
    dist.barrier()
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(checkpoint, read_manifest(checkpoint), run.model, run.optimizer, run.mesh)
    return str(error.value)


def test_what_one_rank_cannot_read_is_an_error_on_all(saved: Path, tmp_path: Path) -> None:
    """Otherwise the others wait for that rank in the next collective. Only rank 1 needs this part: of the
    last rows, which tp rank 1 had."""
    checkpoint = tmp_path / "step-00000001"
    shutil.copytree(list_checkpoints(saved / "tp")[-1], checkpoint)
    lost = "model.layers.1.attention.wq.weight"
    messages = run_ranks(2, load_with_a_file_of_too_few_tensors, checkpoint, MESHES[2]["pair"], lost)
    assert len({*messages}) == 1
    for text in (str(checkpoint / "rank-00003.safetensors"), lost, "use another checkpoint"):
        assert text in messages[0]
