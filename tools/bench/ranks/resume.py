"""Count what a resume costs one rank: its checkpoint is a real manifest with real file headers, whose tensors
are holes in sparse files; the rank reads it with the real code into tensors on the meta device."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.plan.schema import MeshPlan
from meshwright.parallel.simulate.simulator import fake_process_group
from meshwright.train.checkpoint.layout import CheckpointLayout, Mesh, TensorPart, whole
from meshwright.train.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    SavedFile,
    SavedTensor,
    TrainPosition,
    describe_tensor,
    manifest_to_text,
    rank_file,
    read_manifest,
)
from meshwright.train.checkpoint.reader import open_checkpoint, plan_reads, read_tensors
from meshwright.train.checkpoint.shards import (
    TensorShard,
    degrees,
    file_header,
    held_part,
    random_state,
    training_tensors,
)
from meshwright.train.config_parser import parse_config
from meshwright.train.model.build import shard_model
from meshwright.train.optim.optimizer import build_optimizer
from meshwright.train.planning.resolve import plan_run

GPUS_PER_NODE = 8
CUDA_RANDOM_BYTES = 16  # the size of the random state of a GPU (torch 2.11 to 2.13)


@dataclass(frozen=True)
class ResumeCost:
    """The cost of a resume for a rank.

    Args:
        files: files opened, besides the manifest
        metadata_bytes: of the manifest and of the headers of these files
        payload_bytes: of the tensors' parts that the rank has, which are not read here
        manifest_cpu_s: to read and check the manifest
        cpu_s: to read the manifest, find the parts, and open and map the files; without the payload
    """

    files: int
    metadata_bytes: int
    payload_bytes: int
    manifest_cpu_s: float
    cpu_s: float


@contextmanager
def training_state(config_name: str, mesh: MeshPlan, rank: int) -> Iterator[tuple[dict[str, Tensor], Mesh]]:
    """Yield the tensors of a run as `rank` of the mesh has them, on the meta device, and the mesh."""
    degrees_of_axes = [f"--parallel.{axis}={degree}" for axis, degree in vars(mesh).items()]
    config = parse_config(
        [f"--config={config_name}", "--train.global_batch_size=-1", *degrees_of_axes], "tools.bench"
    )
    plan = plan_run(config.job, mesh.world_size, min(GPUS_PER_NODE, mesh.world_size))
    with fake_process_group(mesh.world_size, rank):
        device_mesh = build_mesh(plan.mesh, "cpu")
        model = shard_model(config.model, plan, device_mesh).model
        yield training_tensors(model, build_optimizer(model, config.optim)), degrees(device_mesh)


def make_manifest(config_name: str, mesh: MeshPlan) -> CheckpointManifest:
    """Return the manifest of a checkpoint of such a run. Only the files' sizes and hashes are invented."""
    with training_state(config_name, mesh, 0) as (tensors, axes):
        described = {name: describe_tensor(tensor) for name, tensor in tensors.items()}
    cpu_state = tuple(torch.get_rng_state().shape)
    for rank in range(mesh.world_size):
        described[f"random.cpu.{rank}"] = SavedTensor(cpu_state, "uint8")
        described[f"random.cuda.{rank}"] = SavedTensor((CUDA_RANDOM_BYTES,), "uint8")
    share = math.ceil(sum(tensor.size_bytes for tensor in described.values()) / mesh.world_size)
    files = {rank_file(rank): SavedFile(share, f"{rank:064x}") for rank in range(mesh.world_size)}
    position = TrainPosition(1000, 1000, 0, 8192, mesh.world_size, "0" * 64)
    return CheckpointManifest(position, files, described, mesh=dict(axes))


def count_resume(checkpoint: Path, config_name: str, mesh: MeshPlan, rank: int) -> ResumeCost:
    """Read a checkpoint of a manifest alone as `rank` of a mesh; files that it opens are made first."""
    with training_state(config_name, mesh, rank) as (into, _):
        start_s = time.process_time()
        manifest = read_manifest(checkpoint)
        manifest_cpu_s = time.process_time() - start_s
        if manifest.position.world_size == mesh.world_size:
            into = into | random_state()
        start_s = time.process_time()
        parts = {name: held_part(tensor) for name, tensor in into.items()}
        planned = plan_reads(open_checkpoint(checkpoint, manifest), parts)
        find_cpu_s = time.process_time() - start_s
        header_bytes = sum(write_sparse_file(file, manifest) for file in planned)
        start_s = time.process_time()
        read_tensors(open_checkpoint(checkpoint, manifest), into)
        # read_tensors finds the parts again, but with the results of the first search in its caches
        read_cpu_s = time.process_time() - start_s
    payload_bytes = sum(part.numel * into[name].dtype.itemsize for name, part in parts.items())
    return ResumeCost(
        len(planned),
        (checkpoint / MANIFEST).stat().st_size + header_bytes,
        payload_bytes,
        manifest_cpu_s,
        manifest_cpu_s + find_cpu_s + read_cpu_s,
    )


def write_sparse_file(file: Path, manifest: CheckpointManifest) -> int:
    """Write the file of a rank with holes in place of its tensors; return the bytes of its header."""
    rank = next(rank for rank in range(manifest.position.world_size) if rank_file(rank) == file.name)
    parts = CheckpointLayout(manifest.tensors, tuple(manifest.mesh.items())).written_by(rank)
    for name in (f"random.cpu.{rank}", f"random.cuda.{rank}"):
        parts[name] = whole(manifest.tensors[name].shape)
    shards = {name: _without_values(part, manifest.tensors[name].dtype) for name, part in parts.items()}
    header = file_header(shards)
    partial = file.with_suffix(f".{os.getpid()}")  # another process may be reading such a file
    partial.write_bytes(header)
    os.truncate(partial, len(header) + sum(shard.values.nbytes for shard in shards.values()))
    partial.replace(file)
    return len(header)


def _without_values(part: TensorPart, dtype: str) -> TensorShard:
    return TensorShard(torch.empty(part.sizes, dtype=getattr(torch, dtype), device="meta"), part.offsets)


def write_manifest(checkpoint: Path, config_name: str, mesh: MeshPlan) -> Path:
    """Write a checkpoint without files; return its folder."""
    checkpoint.mkdir()
    text = manifest_to_text(make_manifest(config_name, mesh))
    (checkpoint / MANIFEST).write_text(text, encoding="utf-8")
    return checkpoint
