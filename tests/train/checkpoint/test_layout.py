"""The layout of a checkpoint: every element is in one file, and a rank finds the few files of its parts."""

import math
import random
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.train.checkpoint.layout import (
    SMALL_BYTES,
    CheckpointLayout,
    Mesh,
    TensorPart,
    mesh_index,
    part_of,
    whole,
)
from meshwright.train.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    SavedFile,
    SavedTensor,
    TrainPosition,
    manifest_to_text,
    rank_file,
    read_manifest,
)
from meshwright.train.checkpoint.reader import open_checkpoint, plan_reads
from meshwright.train.errors import CheckpointError
from tests.support.checkpoint_faults import rewrite_manifest
from tests.support.tables import try_each

FSDP, ROWS, COLUMNS = ("dp_shard", 0), ("tp", 0), ("tp", 1)
SMALL = {
    "even": SavedTensor((16, 8), "float32", (ROWS, FSDP)),
    "columns": SavedTensor((8, 16), "float32", (FSDP, COLUMNS)),
    "uneven": SavedTensor((13, 6), "bfloat16", (ROWS, FSDP)),
    "fewer rows than ranks": SavedTensor((3, 2), "float32", (FSDP,)),
    "whole on tp": SavedTensor((9,), "float32", (FSDP,)),
    "whole": SavedTensor((5, 4), "float32"),
    "scalar": SavedTensor((), "float32"),
    "no element": SavedTensor((0, 4), "float32", (FSDP,)),
}
LARGE = {f"large {i}": SavedTensor((2 * SMALL_BYTES,), "uint8", (ROWS,)) for i in range(4)}


def make_mesh(dp_replicate: int, dp_shard: int, tp: int) -> Mesh:
    return (("dp_replicate", dp_replicate), ("dp_shard", dp_shard), ("tp", tp))


def ranks_of(mesh: Mesh) -> range:
    return range(math.prod(degree for _, degree in mesh))


MESHES = [make_mesh(*degrees) for degrees in ((1, 4, 1), (2, 2, 1), (2, 3, 2), (3, 5, 4))]
ANY_MESH = pytest.mark.parametrize("mesh", MESHES, ids=str)


@ANY_MESH
def test_each_element_is_in_the_file_of_one_rank_that_has_it(mesh: Mesh) -> None:
    layout = CheckpointLayout(SMALL, mesh)
    files = {name: torch.zeros(tensor.shape) for name, tensor in SMALL.items()}
    for rank in ranks_of(mesh):
        for name, part in layout.written_by(rank).items():
            tensor = SMALL[name]
            assert part == part_of(tensor.shape, tensor.sharding, mesh, mesh_index(rank, mesh))
            files[name][part.within(whole(tensor.shape))] += 1
    assert [name for name, count in files.items() if not bool((count == 1).all())] == []


@ANY_MESH
def test_parts_are_those_of_torch(mesh: Mesh) -> None:
    """With FSDP alone, beside tensor parallelism on the other dim, and after it on the same dim."""
    degrees = [degree for _, degree in mesh]
    fsdp_after_tp = _StridedShard(0, split_factor=degrees[2])
    for sharding, placements in (
        ((FSDP,), (Replicate(), Shard(0), Replicate())),
        ((FSDP, COLUMNS), (Replicate(), Shard(0), Shard(1))),
        ((ROWS, FSDP), (Replicate(), fsdp_after_tp, Shard(0))),
    ):
        for rows, rank in product((1, 3, 7, 16), ranks_of(mesh)):
            shape = (rows * degrees[2], 2 * degrees[2])  # the planner wants tp to divide what it splits
            index = mesh_index(rank, mesh)
            sizes, offsets = _compute_local_shape_and_global_offset(shape, degrees, list(index), placements)
            part = part_of(shape, sharding, mesh, index)
            assert part.sizes == tuple(sizes)
            assert not part.numel or part.offsets == tuple(offsets)


@ANY_MESH
def test_the_parts_found_are_those_written_that_overlap(mesh: Mesh) -> None:
    layout, seed = CheckpointLayout(SMALL | LARGE, mesh), random.randrange(10**6)
    print(f"seed {seed}")
    rng, written = random.Random(seed), [layout.written_by(rank) for rank in ranks_of(mesh)]
    for name, tensor in (SMALL | LARGE).items():
        for _ in range(8):
            offsets = tuple(rng.randrange(size + 1) for size in tensor.shape)
            sizes = tuple(rng.randint(0, size - o) for size, o in zip(tensor.shape, offsets, strict=True))
            wanted = TensorPart(offsets, sizes)
            parts = [(rank, by_name[name]) for rank, by_name in enumerate(written) if name in by_name]
            expected = [(rank, part) for rank, part in parts if part.overlap(wanted).numel]
            if wanted.numel:
                assert sorted(layout.stored(name, wanted), key=lambda found: found[0]) == expected


def test_large_parts_are_written_in_turn_and_small_ones_by_the_first_rank() -> None:
    mesh = make_mesh(2, 2, 1)
    written = [list(CheckpointLayout(SMALL | LARGE, mesh).written_by(rank)) for rank in ranks_of(mesh)]
    assert written == [
        [*(name for name in SMALL if name != "no element"), "large 0"],
        ["even", "columns", "uneven", "fewer rows than ranks", "whole on tp", "large 1"],
        ["large 2"],
        ["large 3"],
    ]


def llama_manifest(mesh: Mesh) -> CheckpointManifest:
    """Three blocks of a Llama 405B with their moments and step counts, saved by the ranks of a mesh. The
    number of files that a rank opens does not depend on the number of blocks."""
    dim, ffn, keys = 16384, 53248, 1024
    shapes: dict[str, SavedTensor] = {}
    for block in range(3):
        for weight, shape, sharding in (
            ("norm", (dim,), (FSDP,)),
            ("wq", (dim, dim), (ROWS, FSDP)),
            ("wk", (keys, dim), (ROWS, FSDP)),
            ("wo", (dim, dim), (FSDP, COLUMNS)),
            ("w1", (ffn, dim), (ROWS, FSDP)),
            ("w2", (dim, ffn), (FSDP, COLUMNS)),
        ):
            name = f"layers.{block}.{weight}"
            shapes[f"optim.{name}.step"] = SavedTensor((), "float32")
            for saved in (f"model.{name}", f"optim.{name}.exp_avg", f"optim.{name}.exp_avg_sq"):
                shapes[saved] = SavedTensor(shape, "float32", sharding)
    ranks = ranks_of(mesh)
    states = {f"random.cpu.{rank}": SavedTensor((5056,), "uint8") for rank in ranks}
    files = {rank_file(rank): SavedFile(2**40, "0" * 64) for rank in ranks}
    return CheckpointManifest(TrainPosition(), files, shapes | states, mesh=dict(mesh))


@pytest.mark.parametrize(
    ("saved", "loaded", "most"),
    [
        (make_mesh(1, 1024, 1), make_mesh(1, 1024, 1), 2),
        (make_mesh(8, 16, 8), make_mesh(8, 16, 8), 10),
        (make_mesh(1, 128, 8), make_mesh(1, 256, 4), 8),
    ],
    ids=str,
)
def test_a_rank_of_a_thousand_opens_few_files(saved: Mesh, loaded: Mesh, most: int) -> None:
    manifest = llama_manifest(saved)
    files = open_checkpoint(Path("checkpoint"), manifest)
    for rank in (0, 1, 511, 700, len(ranks_of(loaded)) - 1):
        if rank >= len(ranks_of(loaded)):
            continue
        parts = {
            name: part_of(tensor.shape, tensor.sharding, loaded, mesh_index(rank, loaded))
            for name, tensor in manifest.tensors.items()
            if not name.startswith("random.")
        }
        if saved == loaded:
            parts[f"random.cpu.{rank}"] = whole((5056,))
        assert len(plan_reads(files, parts)) <= most


WRONG_MESHES = [
    ('"tp": 2', '"tp": 3'),  # ranks without a file
    ('"tp": 2', '"tp": 1000000000000'),
    ('"tp": 2', '"tp": 0'),
    ('"tp": 2', '"cp": 2'),
    ("tp:0 dp_shard:0", "tp:0 tp:0"),
    ("tp:0 dp_shard:0", "tp:0 dp_shard:2"),
    ("tp:0 dp_shard:0", "tp:0 dp_shard"),
    ('"mesh": {', '"axes": {'),
    # a random state that only its rank reads: the others would wait for that rank
    ('"random.cpu.1": "uint8[8]"', '"random.cpu.1": "uint8[4, 2]"'),
    ('"random.cpu.1": "uint8[8]"', '"random.cpu.x": "uint8[8]"'),
    # axes of degree 1, which would take hours
    ('"mesh": {', '"mesh": {' + "".join(f'"axis {i}": 1, ' for i in range(200_000))),
]


def test_a_mesh_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """With a right hash: as if it had been written so."""
    mesh = make_mesh(2, 3, 2)
    files = {rank_file(rank): SavedFile(2**20, "") for rank in ranks_of(mesh)}
    tensors = {**SMALL, "random.cpu.1": SavedTensor((8,), "uint8")}
    text = manifest_to_text(CheckpointManifest(TrainPosition(3), files, tensors, mesh=dict(mesh)))

    def refused(old: str, new: str) -> None:
        assert old in text
        (tmp_path / MANIFEST).write_text(text)
        rewrite_manifest(tmp_path, lambda text: text.replace(old, new))
        with pytest.raises(CheckpointError, match=f"{MANIFEST} is damaged"):
            read_manifest(tmp_path)

    try_each(WRONG_MESHES, refused)


def test_ranks_with_the_same_parts_write_about_the_same_number_of_bytes() -> None:
    """A parameter and its moments have the same size: taking turns by number would give the large ones to
    some ranks only."""
    sizes = {"embedding": 2**23, **{f"layers.{n}": 2**20 * (1 + n % 3) for n in range(24)}, "head": 2**23}
    tensors = {
        name: SavedTensor((size,), "float32")
        for parameter, size in sizes.items()
        for name in (f"model.{parameter}", f"optim.{parameter}.exp_avg", f"optim.{parameter}.exp_avg_sq")
    }
    layout = CheckpointLayout(tensors, (("dp_replicate", 6),))
    written = [sum(part.numel for part in layout.written_by(rank).values()) for rank in range(6)]
    assert sum(written) == 3 * sum(sizes.values())
    assert max(written) < 1.3 * min(written), written
