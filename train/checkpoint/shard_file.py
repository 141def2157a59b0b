"""One rank's file: safetensors, with the offsets of its shards in the words of torch's distributed
checkpoint.

It is written straight from the tensors' memory and hashed by a second thread meanwhile; torch's own writer
puts the whole file together in memory first. torch.distributed.checkpoint.HuggingFaceStorageReader reads it,
onto any mesh.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from meshwright.train.checkpoint.manifest import SavedFile
from meshwright.train.checkpoint.shards import Shard

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


def write_shard_file(path: Path, shards: Mapping[str, Shard]) -> SavedFile:
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


def _pieces(shards: Mapping[str, Shard]) -> Iterator[memoryview]:
    yield memoryview(_header(shards))
    for shard in shards.values():
        content = memory_of(shard.values)
        for start in range(0, len(content), _PIECE_BYTES):
            yield content[start : start + _PIECE_BYTES]


def _header(shards: Mapping[str, Shard]) -> bytes:
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
