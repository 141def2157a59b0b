"""Reads checkpoints, and tensors from other files, into tensors on any mesh; each rank reads its parts.

The contents of a checkpoint's files are computed from its manifest, so a rank opens only the files that
contain elements of its parts, each once. Other files have full tensors, and all their headers are read.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.errors import first_of, one_line
from meshwright.parallel.fsdp import local_part
from meshwright.train.checkpoint.layout import RANDOM, STATE, CheckpointLayout, TensorPart, whole
from meshwright.train.checkpoint.manifest import DTYPES, CheckpointManifest, SavedTensor, rank_file
from meshwright.train.checkpoint.shards import (
    degrees,
    describe_tensor,
    held_part,
    random_state,
    set_numbers,
    training_tensors,
)
from meshwright.train.distributed.agreement import on_all_ranks
from meshwright.train.errors import CheckpointError

SAFETENSORS = ".safetensors"  # the ending of a file's name; any other file is one of torch.save
NESTED = ("model", "state_dict")  # keys of a training's file that may have the state_dict
TORCH_NAMES = {stored: name for name, (stored, _) in DTYPES.items()}  # of safetensors' dtypes


@contextmanager
def open_tensors(file: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the tensors in a file, of which slices can be read. Raises OSError, SafetensorError and
    ValueError."""
    if file.suffix != SAFETENSORS:
        yield map_state_dict(file)
        return
    with safe_open(file, framework="pt") as opened:
        yield {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)


def map_state_dict(file: Path) -> dict[str, Tensor]:
    """Map the state_dict that a file of torch.save has, alone or under a key of NESTED. Raises ValueError if
    there is none, and if the file needs code."""
    try:
        content: Any = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # of the unpickler: any, if the file is damaged
        # not all of its message, which advises to run the code in the file
        code = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it calls {code[1]}, and no code in a file is run" if code else one_line(str(error), 150)
        raise ValueError(f"{reason}; torch.save(model.state_dict(), FILE) writes another") from None
    outer = content if isinstance(content, Mapping) else {}
    found = next((outer[key] for key in NESTED if isinstance(outer.get(key), Mapping)), outer)
    tensors = {str(name): value.detach() for name, value in found.items() if isinstance(value, Tensor)}
    if not tensors:
        keys = ", ".join(map(str, list(outer)[:8])) or type(content).__name__
        raise ValueError(f"no tensors, alone or under {' or '.join(NESTED)}, but {keys}")
    return tensors


def _describe(stored: Any) -> SavedTensor:
    """Return shape and dtype of a tensor in an open file."""
    if isinstance(stored, Tensor):
        return describe_tensor(stored)
    return SavedTensor(tuple(stored.get_shape()), TORCH_NAMES.get(stored.get_dtype(), stored.get_dtype()))


@dataclass(frozen=True)
class StoredPart:
    """A part of a tensor in a file; `dtype` is torch's name, or the format's if torch's has none."""

    file: Path
    part: TensorPart
    dtype: str

    @property
    def tensor(self) -> SavedTensor:
        """Shape and dtype of the part."""
        return SavedTensor(self.part.sizes, self.dtype)


@dataclass(frozen=True)
class TensorFiles:
    """The tensors in a folder's files: `find` returns the stored parts that overlap a part of a tensor."""

    folder: Path
    find: Callable[[str, TensorPart], Iterable[StoredPart]]


@dataclass(frozen=True)
class PartRead:
    """The elements `part` of a tensor, to read from a stored part that contains them."""

    name: str
    stored: StoredPart
    part: TensorPart


def open_checkpoint(checkpoint: Path, manifest: CheckpointManifest) -> TensorFiles:
    """Return the tensors of a checkpoint. No file is opened."""
    layout = CheckpointLayout(manifest.tensors, tuple(manifest.mesh.items()))

    def find(name: str, wanted: TensorPart) -> list[StoredPart]:
        dtype = manifest.tensors[name].dtype
        stored = layout.stored(name, wanted)
        return [StoredPart(checkpoint / rank_file(rank), part, dtype) for rank, part in stored]

    return TensorFiles(checkpoint, find)


def read_headers(files: Sequence[Path]) -> dict[str, StoredPart]:
    """Return the full tensors in files, by name. Raises CheckpointError, also for a name in two files."""
    tensors: dict[str, StoredPart] = {}
    for file in files:
        try:
            with open_tensors(file) as opened:
                described = {name: _describe(stored) for name, stored in opened.items()}
            found = {name: StoredPart(file, whole(t.shape), t.dtype) for name, t in described.items()}
        except (OSError, SafetensorError, ValueError) as error:
            raise _unreadable(file, error) from None
        for name in found.keys() & tensors.keys():
            raise CheckpointError(
                f"{name} is in {file} and in {tensors[name].file.name}: download the folder again"
            )
        tensors |= found
    return tensors


def open_full(folder: Path, tensors: Mapping[str, StoredPart]) -> TensorFiles:
    """Return full tensors, as of `read_headers`. No file is opened."""
    return TensorFiles(folder, lambda name, wanted: [tensors[name]] if name in tensors else [])


_ROWS = 4096  # of a matrix compared at a time: 128 MB if a row has 8,192 channels in float32


def is_copy(tensors: Mapping[str, StoredPart], first: str, second: str) -> bool:
    """Whether two full tensors have the same shape, dtype and values."""
    a, b = tensors[first], tensors[second]
    shape = a.tensor.shape
    rows = [(slice(row, row + _ROWS),) for row in range(0, shape[0], _ROWS)] if shape else [()]
    with open_tensors(a.file) as of_a, open_tensors(b.file) as of_b:
        return a.tensor == b.tensor and all(torch.equal(of_a[first][r], of_b[second][r]) for r in rows)


def plan_reads(files: TensorFiles, wanted: Mapping[str, TensorPart]) -> dict[Path, list[PartRead]]:
    """Return what to read from which file for these parts of tensors. Raises CheckpointError if the files do
    not contain every element of them."""
    reads: dict[Path, list[PartRead]] = {}
    for name, part in wanted.items():
        found = 0
        for stored in files.find(name, part) if part.numel else ():
            read = PartRead(name, stored, stored.part.overlap(part))
            reads.setdefault(stored.file, []).append(read)
            found += read.part.numel
        if found != part.numel:
            raise CheckpointError(
                f"{files.folder} contains {found} of {part.numel} elements of {one_line(name, 200)} "
                f"{list(part.sizes)} at {list(part.offsets)}: use another checkpoint, or another copy of it"
            )
    return reads


def read_tensors(
    files: TensorFiles, into: Mapping[str, Tensor], rows: Mapping[str, int] | None = None
) -> None:
    """Read tensors by name into tensors of the same full shape, sharded or not, converted to their dtype; of
    those in `rows` the files have only so many rows, and the others become their mean. Without communication.
    Raises CheckpointError."""
    parts = {name: held_part(tensor) for name, tensor in into.items()}
    local = {name: local_part(tensor.detach()) for name, tensor in into.items()}
    saved = {name: (count, *into[name].shape[1:]) for name, count in (rows or {}).items()}
    stored = parts | {name: parts[name].overlap(whole(shape)) for name, shape in saved.items()}
    for file, reads in plan_reads(files, stored).items():
        try:
            with open_tensors(file) as opened:
                for read in reads:
                    values = _read_part(opened, read)
                    local[read.name][read.part.within(parts[read.name])].copy_(values)
        except (OSError, SafetensorError, ValueError) as error:
            raise _unreadable(file, error) from None
    for name, shape in saved.items():
        if (first := stored[name].sizes[0]) < parts[name].sizes[0]:
            full = torch.empty(shape, dtype=into[name].dtype)
            read_tensors(files, {name: full})
            mean = full.mean(0, dtype=torch.float32)[parts[name].within(whole(shape))[1:]]
            local[name][first:] = mean.to(local[name])


def read_full(files: TensorFiles, manifest: CheckpointManifest, name: str) -> Tensor:
    """Return a tensor of a checkpoint in host memory, assembled from its shards. Raises CheckpointError."""
    saved = manifest.tensors[name]
    tensor = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
    read_tensors(files, {name: tensor})
    return tensor


def _read_part(opened: Mapping[str, Any], read: PartRead) -> Tensor:
    """Return elements of a stored part. Raises ValueError if the file has another part."""
    if read.name not in opened:
        raise ValueError(f"it has no {read.name}")
    stored, expected = opened[read.name], read.stored.tensor
    if _describe(stored) != expected:
        raise ValueError(f"{read.name} is {_describe(stored)}, expected {expected}")
    return stored[read.part.within(read.stored.part)]  # type: ignore[no-any-return]


def _unreadable(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{file} cannot be read ({one_line(str(error), 300)}): use another checkpoint, or another copy of it"
    )


def load_checkpoint(
    checkpoint: Path,
    manifest: CheckpointManifest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
) -> bool:
    """Read a checkpoint, whose manifest has been verified, into model and optimizer in place; all ranks call
    it. Returns whether it restored the random state, which only ranks of the same mesh can go on with.

    Raises CheckpointError if names, shapes or dtypes differ, and on all ranks if one cannot read its parts.
    """
    if not optimizer.state and any(name.startswith("optim.") for name in manifest.tensors):
        # most optimizers create it in their first step: takes one with gradients of zero and a rate of zero
        get_optimizer_state_dict(model, optimizer)
    tensors = training_tensors(model, optimizer)
    saved = {name: each for name, each in manifest.tensors.items() if not name.startswith((RANDOM, STATE))}
    refuse_different(checkpoint, {name: describe_tensor(tensor) for name, tensor in tensors.items()}, saved)
    same_mesh = manifest.mesh == dict(degrees(mesh))
    random = {name: state for name, state in random_state().items() if same_mesh and name in manifest.tensors}
    files = open_checkpoint(checkpoint, manifest)
    on_all_ranks(lambda: read_tensors(files, {**tensors, **random}))
    set_numbers(model, optimizer, tensors)
    for name, state in random.items():
        (torch.cuda if ".cuda." in name else torch).set_rng_state(state)
    return bool(random)


def load_tensors(checkpoint: Path, manifest: CheckpointManifest, into: Mapping[str, Tensor]) -> None:
    """Read tensors of a checkpoint by name, in place; all ranks call it. Raises CheckpointError."""
    current = {name: describe_tensor(tensor) for name, tensor in into.items()}
    refuse_different(checkpoint, current, {name: manifest.tensors[name] for name in into})
    files = open_checkpoint(checkpoint, manifest)
    on_all_ranks(lambda: read_tensors(files, into))


def refuse_different(
    checkpoint: Path, current: Mapping[str, SavedTensor], saved: Mapping[str, SavedTensor]
) -> None:
    """Raise CheckpointError with the first differences between the expected (`current`) and the saved names,
    shapes and dtypes, if there are any."""
    different = [
        f"{name}: expected {current.get(name, 'missing')}, saved {saved.get(name, 'missing')}"
        for name in sorted(current.keys() | saved.keys())
        if current.get(name) != saved.get(name)
    ]
    if different:
        raise CheckpointError(
            f"{checkpoint} was saved with other tensors: {first_of(different, '; ')}. Use the config it was "
            "saved with (its config.yaml; the dtypes are optim.state_dtype and parallel.storage_dtype; "
            "Muon's matrices depend on optim.groups and model.blocks), or another run.dir, with "
            "checkpoint.init_from for its weights"
        )
