"""Files that do not contain what the manifest says are refused by name."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from meshwright.train.checkpoint.manifest import CheckpointManifest, SavedTensor, TrainPosition, rank_file
from meshwright.train.checkpoint.reader import open_checkpoint, open_full, read_headers, read_tensors
from meshwright.train.checkpoint.shards import TensorShard, write_shard_file
from meshwright.train.errors import CheckpointError

WEIGHT, BIAS = "model.weight", "model.bias"
VALUES = {WEIGHT: torch.arange(40.0).reshape(10, 4), BIAS: torch.arange(7, dtype=torch.bfloat16)}
TENSORS = {
    WEIGHT: SavedTensor((10, 4), "float32", (("dp_shard", 0),)),
    BIAS: SavedTensor((7,), "bfloat16", (("dp_shard", 0),)),
}
Shards = dict[str, TensorShard]


def write(folder: Path, change: Callable[[Shards], object] = lambda shards: None) -> CheckpointManifest:
    """Write the checkpoint of two ranks; `change` changes the second file before."""
    ranks: list[Shards] = []
    for rows, numbers in ((slice(0, 5), slice(0, 4)), (slice(5, 10), slice(4, 7))):
        weight, bias = VALUES[WEIGHT][rows], VALUES[BIAS][numbers]
        ranks.append(
            {WEIGHT: TensorShard(weight, (rows.start, 0)), BIAS: TensorShard(bias, (numbers.start,))}
        )
    change(ranks[-1])
    names = [rank_file(rank) for rank in range(2)]
    files = {name: write_shard_file(folder / name, shards) for name, shards in zip(names, ranks, strict=True)}
    return CheckpointManifest(TrainPosition(), files, TENSORS, mesh={"dp_shard": 2})


def read(folder: Path, manifest: CheckpointManifest) -> dict[str, Tensor]:
    into = {name: torch.full_like(value, float("nan")) for name, value in VALUES.items()}
    read_tensors(open_checkpoint(folder, manifest), into)
    return into


def test_all_parts_are_read(tmp_path: Path) -> None:
    read_back = read(tmp_path, write(tmp_path))
    assert all(torch.equal(read_back[name], value) for name, value in VALUES.items())


def test_values_are_converted_to_the_dtype_of_the_target(tmp_path: Path) -> None:
    """As `checkpoint.init_from` needs it."""
    into = {BIAS: torch.zeros(7, dtype=torch.float64)}
    read_tensors(open_checkpoint(tmp_path, write(tmp_path)), into)
    assert torch.equal(into[BIAS], VALUES[BIAS].double())


def test_rows_that_a_file_does_not_have_become_the_mean_of_its_rows(tmp_path: Path) -> None:
    saved = torch.randn(5, 3)
    save_file({"w": saved}, tmp_path / "a.safetensors")
    files, into = (
        open_full(tmp_path, read_headers([tmp_path / "a.safetensors"])),
        {"w": torch.full((8, 3), 9.0)},
    )
    read_tensors(files, into, {"w": 5})
    assert torch.equal(into["w"][:5], saved)
    assert torch.equal(into["w"][5:], saved.mean(0).expand(3, 3))
    with pytest.raises(CheckpointError, match=r"15 of 24 elements of w"):
        read_tensors(files, into)


def replaced(name: str, values: Tensor, *offsets: int) -> Callable[[Shards], object]:
    return lambda shards: shards.update({name: TensorShard(values, offsets)})


FAULTS: dict[str, tuple[Callable[[Shards], object], str]] = {
    "no tensor": (lambda shards: shards.pop(WEIGHT), WEIGHT),
    "fewer rows": (replaced(WEIGHT, VALUES[WEIGHT][5:9], 5, 0), WEIGHT),
    "more rows": (replaced(BIAS, torch.zeros(9, dtype=torch.bfloat16), 4), ""),
    "another dtype": (replaced(WEIGHT, VALUES[WEIGHT][5:].to(torch.int32), 5, 0), "int32"),
    "more dims": (replaced(BIAS, torch.zeros(3, 1, dtype=torch.bfloat16), 4, 0), ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_without_what_it_should_contain_is_refused(fault: str, tmp_path: Path) -> None:
    change, named = FAULTS[fault]
    with pytest.raises(CheckpointError) as error:
        read(tmp_path, write(tmp_path, change))
    for text in (str(tmp_path / rank_file(1)), named, "use another checkpoint"):
        assert text in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    damages: list[Callable[[Path], object]] = [
        lambda path: path.unlink(),
        lambda path: os.truncate(path, 20),
        lambda path: path.write_bytes(b"\xff" * 100),
    ]
    for number, damage in enumerate(damages):
        folder = tmp_path / str(number)
        folder.mkdir()
        manifest = write(folder)
        damage(folder / rank_file(1))
        with pytest.raises(CheckpointError, match="cannot be read") as error:
            read(folder, manifest)
        assert str(folder / rank_file(1)) in str(error.value)
