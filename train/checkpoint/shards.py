"""Which part of which tensor a rank writes, and into what file.

All ranks together write each element once, and nobody has to ask another. A rank's file is safetensors, with
the offsets of its shards in the words of torch's distributed checkpoint. It is written straight from the
tensors' memory and hashed by a second thread meanwhile; torch's own writer puts the whole file together in
memory first. torch.distributed.checkpoint.HuggingFaceStorageReader reads it, onto any mesh.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshwright.parallel.fsdp import local_part
from meshwright.train.checkpoint.manifest import SavedFile


@dataclass(frozen=True)
class TensorShard:
    """A rank's part of a tensor: its values, and where in the whole tensor they begin."""

    values: Tensor
    offsets: tuple[int, ...]


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor that training changes, by plain name: `model.FQN` and `optim.FQN.MOMENT`; a tied weight
    once."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"model.{name}": parameter.detach() for parameter, name in names.items()}
    for parameter, state in optimizer.state.items():
        tensors |= {f"optim.{names[parameter]}.{key}": value for key, value in state.items()}
    return tensors


def random_state() -> dict[str, Tensor]:
    """The state of this rank's random generators, each under a name of its own."""
    rank = dist.get_rank()
    states = {f"random.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states[f"random.cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def own_shards(tensors: Mapping[str, Tensor], mesh: DeviceMesh) -> dict[str, TensorShard]:
    """What this rank writes of tensors that lie on `mesh`, the run's, or on some of its axes. Those that
    several ranks hold alike take turns among them, one tensor after the other."""
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    assert mesh.mesh_dim_names is not None
    shards = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        copies, mine = 1, 0
        for axis, size, coordinate in zip(mesh.mesh_dim_names, mesh.shape, coordinates, strict=True):
            if axis not in _sharded_axes(tensor):
                copies, mine = copies * size, mine * size + coordinate
        if number % copies != mine:
            continue
        shard = _own_shard(tensor)
        if shard.values.numel():
            shards[name] = shard
    return shards


def _sharded_axes(tensor: Tensor) -> set[str]:
    if not isinstance(tensor, DTensor):
        return set()
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None
    return {
        axis for axis, placement in zip(names, tensor.placements, strict=True) if not placement.is_replicate()
    }


def _own_shard(tensor: Tensor) -> TensorShard:
    if not isinstance(tensor, DTensor):
        return TensorShard(tensor, (0,) * tensor.dim())
    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = local_part(tensor)
    assert local.shape == torch.Size(shape), (local.shape, shape)
    return TensorShard(local, tuple(offsets))


# Of a tensor in the header of a rank's file: its name twice, dtype, shape, offsets. Of an 8B model 204 on
# average, of a 405B 210.
_HEADER_BYTES = 256


def needed_bytes(tensors: Mapping[str, Tensor], random: Mapping[str, Tensor], world_size: int) -> int:
    """Bytes of the files of all ranks: the tensors once; of each rank the random state, and the header of its
    file, which names nearly all tensors: with thousands of ranks that is gigabytes."""
    return count_bytes(tensors) + world_size * (count_bytes(random) + len(tensors) * _HEADER_BYTES)


def count_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the whole tensors, over all ranks."""
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())


_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PIECE_BYTES = 16 * 2**20  # written and hashed at a time


def write_shard_file(path: Path, shards: Mapping[str, TensorShard]) -> SavedFile:
    """Write shards that lie in host memory into a new file, and wait until the disk has it. OSError if that
    fails."""
    # The largest elements first, so that every tensor begins at a multiple of its element's size.
    ordered = dict(sorted(shards.items(), key=lambda item: -item[1].values.itemsize))
    digest, size_bytes = hashlib.sha256(), 0
    with open(path, "xb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        hashed = []
        for piece in _pieces(ordered):
            hashed.append(hasher.submit(digest.update, piece))
            size_bytes += len(piece)
            while len(piece):
                piece = piece[file.write(piece) :]
        os.fsync(file.fileno())
    for future in hashed:
        future.result()
    return SavedFile(size_bytes, digest.hexdigest())


def _pieces(shards: Mapping[str, TensorShard]) -> Iterator[memoryview]:
    yield memoryview(_header(shards))
    for shard in shards.values():
        content = memory_of(shard.values)
        for start in range(0, len(content), _PIECE_BYTES):
            yield content[start : start + _PIECE_BYTES]


def _header(shards: Mapping[str, TensorShard]) -> bytes:
    offsets = {name: {"saved_offsets": shard.offsets} for name, shard in shards.items()}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, shard in shards.items():
        start, end = end, end + shard.values.nbytes
        header[name] = {
            "dtype": _DTYPES[shard.values.dtype],
            "shape": list(shard.values.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory; not copied if they lie side by side."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
