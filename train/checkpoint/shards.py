"""The parts of tensors that a rank has and writes, and the format of its file.

All ranks together write each element once (layout.py). A rank's file is safetensors, with the offsets of its
shards in the format of torch's distributed checkpoint:
torch.distributed.checkpoint.HuggingFaceStorageReader reads it onto any mesh. It is written directly from the
tensors' memory while a second thread hashes it; torch's own writer first builds the complete file in memory.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright import __version__
from meshwright.parallel.errors import first_of
from meshwright.parallel.fsdp import local_part, names_by_parameter
from meshwright.train.checkpoint.layout import CheckpointLayout, Mesh, TensorPart, part_of, whole
from meshwright.train.checkpoint.manifest import DTYPES, MODEL, SavedFile, SavedTensor, Sharding
from meshwright.train.errors import SaveError


@dataclass(frozen=True)
class TensorShard:
    """A rank's part of a tensor: its values, and their offsets in the full tensor."""

    values: Tensor
    offsets: tuple[int, ...]


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return every tensor that training changes, by name: `model.FQN` and `optim.FQN.MOMENT`; a tied weight
    once. Numbers of an optimizer's state are returned as copies in tensors (`set_numbers`).

    Raises SaveError for state that is neither a tensor nor a number, and for a dtype that cannot be saved.
    """
    names = {tensor: first for tensor, (first, *_) in state_names(model).items()}
    tensors = {f"{MODEL}{name}": tensor.detach() for tensor, name in names.items()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, int | float):
                value = torch.tensor(value, dtype=torch.float64)
            elif value is not None and not isinstance(value, Tensor):
                raise SaveError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} ({key}) for "
                    f"{names[parameter]}: only tensors and numbers can be saved"
                )
            if value is not None:
                _refuse_local(optimizer, names[parameter], key, parameter, value)
                tensors[f"optim.{names[parameter]}.{key}"] = value
    for name, group, key in _numbers(optimizer):
        tensors[name] = torch.tensor(group[key], dtype=torch.float64)
    dtypes = {name: dtype_name(tensor.dtype) for name, tensor in tensors.items()}
    if unknown := [f"{name} ({dtype})" for name, dtype in dtypes.items() if dtype not in DTYPES]:
        raise SaveError(
            f"{first_of(unknown)} cannot be saved in this dtype (only {', '.join(DTYPES)}): "
            "convert it, or register a buffer that can be computed with persistent=False"
        )
    return tensors


def state_names(model: nn.Module) -> dict[Tensor, list[str]]:
    """Return parameters and persistent buffers, each with its names in the model: of a tied one several."""
    persistent, names = model.state_dict().keys(), names_by_parameter(model)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in persistent:
            names.setdefault(buffer, []).append(name)
    return names


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the other names of tied tensors, each with the one under which the tensor is saved."""
    names = state_names(model).values()
    return {f"{MODEL}{other}": f"{MODEL}{first}" for first, *others in names for other in others}


def set_numbers(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Set the numbers in the optimizer's state to those that were read into `tensors`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, int | float):
                state[key] = type(value)(tensors[f"optim.{names[parameter]}.{key}"].item())
    for name, group, key in _numbers(optimizer):
        group[key] = type(group[key])(tensors[name].item())


def _numbers(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the numbers that an optimizer of the user's keeps in its groups, each with its name, group and
    key; not those that the config gives."""
    if not getattr(optimizer, "saves_numbers", False):
        return
    for place, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and key not in ("lr", "lr_factor", "weight_decay"):
                yield f"optim.groups.{place}.{key}", group, key


def _refuse_local(
    optimizer: torch.optim.Optimizer, name: str, key: str, parameter: Tensor, value: Tensor
) -> None:
    """Raise SaveError for the state of a shard that does not say which part of the whole it is."""
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return
    if value.shape == local_part(parameter).shape != parameter.shape:
        raise SaveError(
            f"{type(optimizer).__name__} keeps for {name} a tensor of this rank's shard, {key}, that is no "
            "DTensor, so that no other mesh could load it: make it by torch.zeros_like(parameter)"
        )


def code_versions() -> dict[str, str]:
    """Return the versions that a manifest has."""
    return {"meshwright": __version__, "torch": str(torch.__version__)}


def describe_tensor(tensor: torch.Tensor) -> SavedTensor:
    """Return shape, dtype and sharding of a full tensor."""
    return SavedTensor(tuple(tensor.shape), dtype_name(tensor.dtype), sharding_of(tensor))


def sharding_of(tensor: torch.Tensor) -> Sharding:
    """Return the sharding of a tensor, from its placements."""
    if not isinstance(tensor, DTensor):
        return ()
    axes: Any = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    split = [(axis, placement) for axis, placement in axes if not placement.is_replicate()]
    # FSDP splits a dim after tensor parallelism has split it, although its axis comes first in the mesh:
    # torch's placement for that is no Shard.
    split.sort(key=lambda pair: not pair[1].is_shard())
    return tuple((axis, placement.dim) for axis, placement in split)


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without its prefix, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def random_state() -> dict[str, Tensor]:
    """Return the states of this rank's random generators, by names that contain the rank."""
    rank = dist.get_rank()
    states = {f"random.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states[f"random.cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def local_shards(tensors: Mapping[str, Tensor], mesh: DeviceMesh) -> dict[str, TensorShard]:
    """Return this rank's shards to write, of tensors on `mesh` (the run's) or on some of its axes."""
    layout = CheckpointLayout({name: describe_tensor(t) for name, t in tensors.items()}, degrees(mesh))
    shards = {}
    for name, part in layout.written_by(mesh.get_rank()).items():
        assert part == held_part(tensors[name]), (name, part, held_part(tensors[name]))
        shards[name] = TensorShard(local_part(tensors[name]), part.offsets)
    return shards


def degrees(mesh: DeviceMesh) -> Mesh:
    """Return the axes of a mesh with their degrees."""
    assert mesh.mesh_dim_names is not None
    return tuple(zip(mesh.mesh_dim_names, mesh.shape, strict=True))


def held_part(tensor: Tensor) -> TensorPart:
    """Return the part of a tensor that this rank has."""
    if not isinstance(tensor, DTensor):
        return whole(tensor.shape)
    index = tensor.device_mesh.get_coordinate()
    assert index is not None
    part = part_of(tuple(tensor.shape), sharding_of(tensor), degrees(tensor.device_mesh), tuple(index))
    assert local_part(tensor).shape == part.sizes, (local_part(tensor).shape, part)
    return part


# Of a tensor in the header of a rank's file: its name twice, dtype, shape, offsets. The average is 204 for an
# 8B model, 210 for a 405B model.
_HEADER_BYTES = 256


def needed_bytes(tensors: Mapping[str, Tensor], random: Mapping[str, Tensor], world_size: int) -> int:
    """Return the bytes of all ranks' files: the tensors once, and for each rank its random state and file
    header. A header names nearly all tensors: with thousands of ranks the headers take gigabytes."""
    return count_bytes(tensors) + world_size * (count_bytes(random) + len(tensors) * _HEADER_BYTES)


def count_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of the full tensors, over all ranks."""
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())


_PIECE_BYTES = 16 * 2**20  # written and hashed at a time


def write_shard_file(path: Path, shards: Mapping[str, TensorShard]) -> SavedFile:
    """Write shards in host memory into a new file, wait until it is on disk, and return its size and hash.
    Raises OSError."""
    offsets = {name: {"saved_offsets": shard.offsets} for name, shard in shards.items()}
    # the names of torch's distributed checkpoint
    metadata = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    described = {name: describe_tensor(shard.values) for name, shard in shards.items()}
    digest, size_bytes = hashlib.sha256(), 0
    with open(path, "xb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        hashed = []
        for piece in file_pieces(described, lambda name: shards[name].values, **metadata):
            hashed.append(hasher.submit(digest.update, piece))
            size_bytes += len(piece)
            while len(piece):
                piece = piece[file.write(piece) :]
        os.fsync(file.fileno())
    for future in hashed:
        future.result()
    return SavedFile(size_bytes, digest.hexdigest())


def file_pieces(
    tensors: Mapping[str, SavedTensor], read: Callable[[str], Tensor], **metadata: str
) -> Iterator[memoryview]:
    """Yield the content of a safetensors file piece by piece: the length of its header, the header, and the
    tensors, each of which is read when it is its turn."""
    # the largest elements first, so that every tensor is aligned to its element size
    ordered = dict(sorted(tensors.items(), key=lambda item: -DTYPES[item[1].dtype][1]))
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, tensor in ordered.items():
        start, end = end, end + tensor.size_bytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype][0],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in ordered:
        values = read(name).detach().resolve_conj().contiguous()  # no copy of a contiguous one
        content = values.reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(content), _PIECE_BYTES):
            yield content[start : start + _PIECE_BYTES]
        del values, content  # before the next is read
