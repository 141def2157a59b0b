"""What differs between two checkpoints: config, names, shapes, dtypes and values, whatever meshes they were
saved on."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.tools.command import format_table
from meshwright.train.checkpoint.huggingface import FilesReader
from meshwright.train.checkpoint.load import open_reader, read_tensors
from meshwright.train.checkpoint.manifest import Manifest, SavedTensor
from meshwright.train.checkpoint.verify import verify_alone

RANDOM = "random."  # states of the processes that saved, which say nothing of the model
_Opened = tuple[Path, Manifest, FilesReader]


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is not the same in both: what each has, and the largest absolute difference of a value
    where shape and dtype are alike."""

    name: str
    here: str
    there: str
    largest: float | None


@dataclass(frozen=True)
class Differences:
    """All differences between two checkpoints. `position`: keys with both values; `config`: lines of a
    diff."""

    position: Mapping[str, tuple[object, object]]
    config: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]
    compared: int
    same: bool


def compare_checkpoints(one: Path, other: Path) -> Differences:
    """Compare two checkpoints, of which every byte is verified first; in memory is one pair of tensors at a
    time. The number of processes and the random state are not compared. Raises CheckpointError."""
    here, there = verify_alone(one), verify_alone(other)
    position = {
        key: (value, getattr(there.position, key))
        for key, value in vars(here.position).items()
        if value != getattr(there.position, key) and key != "world_size"
    }
    names = [name for name in {**here.tensors, **there.tensors} if not name.startswith(RANDOM)]
    opened = [
        (checkpoint, manifest, open_reader(checkpoint, manifest))
        for checkpoint, manifest in ((one, here), (other, there))
    ]
    found = tuple(each for name in names if (each := _compare(name, *opened)))
    config = tuple(
        difflib.unified_diff(_lines(one), _lines(other), "config.yaml", "config.yaml", lineterm="", n=0)
    )
    return Differences(position, config, found, len(names), not (position or config or found))


def difference_text(differences: Differences) -> str:
    """For people: the position, the config's lines, and the tensors that differ, the first 40 of them."""
    lines = [f"{key}: {here} | {there}" for key, (here, there) in differences.position.items()]
    lines += [line for line in differences.config if line[:1] in "+-" and not line.startswith(("+++", "---"))]
    rows = [
        (t.name, t.here, t.there, "" if t.largest is None else f"{t.largest:.3g}")
        for t in differences.tensors
    ]
    if rows:
        lines.append(format_table(("tensor", "here", "there", "largest difference"), rows[:40]))
    count = (
        f"{len(rows)} of {differences.compared} tensors differ"
        if rows
        else f"all {differences.compared} tensors are equal"
    )
    return "\n".join([*lines, count])


def _compare(name: str, one: _Opened, other: _Opened) -> TensorDifference | None:
    here, there = one[1].tensors.get(name), other[1].tensors.get(name)
    if here is None or there is None or here != there:
        return TensorDifference(name, str(here or "missing"), str(there or "missing"), None)
    a, b = (_read(name, here, *opened) for opened in (one, other))
    if torch.equal(a, b):
        return None
    return TensorDifference(name, str(here), str(there), (a.double() - b.double()).abs().max().item())


def _read(
    name: str, saved: SavedTensor, checkpoint: Path, manifest: Manifest, reader: FilesReader
) -> torch.Tensor:
    whole = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
    read_tensors(checkpoint, manifest, {name: whole}, alone=True, reader=reader)
    return whole


def _lines(checkpoint: Path) -> list[str]:
    path = checkpoint / "config.yaml"
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
