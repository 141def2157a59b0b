"""The files of a checkpoint as targets of the mutations of test_untrusted.py."""

import dataclasses
import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from meshwright.train.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    TrainPosition,
    describe_tensor,
    manifest_to_text,
    read_manifest,
)
from meshwright.train.checkpoint.reader import open_checkpoint, read_tensors
from meshwright.train.checkpoint.shards import TensorShard, write_shard_file
from meshwright.train.checkpoint.verify import verify_alone
from meshwright.train.errors import CheckpointError
from tests.support.mutations import Target

NAME = "model.weight"


def checkpoint_targets(folder: Path) -> Iterator[Target]:
    """A checkpoint's manifest and header; also with hashes that fit the mutant, so that the hash does not
    refuse it."""
    checkpoint = folder / "step-00000003"
    checkpoint.mkdir()
    shards, manifest = checkpoint / "rank-00000.safetensors", checkpoint / MANIFEST
    value = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    saved = write_shard_file(shards, {NAME: TensorShard(value, (0, 0))})
    split = dataclasses.replace(describe_tensor(value), sharding=(("dp_shard", 0),))
    valid = CheckpointManifest(
        TrainPosition(3, 24, 0, 32, 1, "data"), {shards.name: saved}, {NAME: split}, mesh={"dp_shard": 1}
    )
    manifest.write_text(manifest_to_text(valid))
    for path in (manifest, shards):
        verify = partial(verify_alone, checkpoint)
        yield Target(f"checkpoint {path.name}", path, verify, (CheckpointError,), named=(str(checkpoint),))
    yield Target(
        "signed manifest",
        manifest,
        partial(_read_signed, checkpoint),
        (CheckpointError,),
        named=(str(checkpoint),),
    )

    def read() -> None:
        if shards.is_file() or not shards.exists():  # pipes are refused earlier, by the verification
            read_tensors(open_checkpoint(checkpoint, valid), {NAME: torch.empty(8, 8)})

    yield Target("signed header", shards, read, (CheckpointError,), named=(str(checkpoint),))


def _read_signed(checkpoint: Path) -> None:
    path = checkpoint / MANIFEST
    if path.is_file() and not path.is_symlink():
        body = path.read_bytes().rpartition(b',\n "sha256"')[0] + b"\n}"
        path.write_bytes(
            body[:-2] + b',\n "sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'
        )
    manifest = read_manifest(checkpoint)
    for name, tensor in manifest.tensors.items():
        if name == NAME:  # never allocate more than the files contain
            into = {name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))}
            read_tensors(open_checkpoint(checkpoint, manifest), into)
