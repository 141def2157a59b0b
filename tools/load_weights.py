"""Whole tensors out of a checkpoint's shards, and into files, in one process: no process group, no device."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from meshwright.models.llama import LlamaConfig
from meshwright.train.checkpoint.commit import list_checkpoints
from meshwright.train.checkpoint.huggingface import FilesReader
from meshwright.train.checkpoint.initial_weights import PREFIX, weight_shapes
from meshwright.train.checkpoint.load import read_tensors
from meshwright.train.checkpoint.manifest import MANIFEST, CheckpointManifest, SavedTensor
from meshwright.train.checkpoint.verify import verify_alone
from meshwright.train.config import Config
from meshwright.train.config_parser import load_config
from meshwright.train.errors import CheckpointError, ConfigError


def checkpoints_folder(path: Path) -> Path:
    """The folder that holds the checkpoints of a run, given it or the run's own. CheckpointError if it is not
    there."""
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: no such folder. Name a run, such as runs/NAME, or its checkpoints folder"
        )
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def find_newest(path: Path) -> Path:
    """A checkpoint as it is; of a run, or of its checkpoints folder, the newest. CheckpointError if there is
    none."""
    if (path / MANIFEST).is_file():
        return path
    folder = checkpoints_folder(path)
    found = list_checkpoints(folder)
    if not found:
        raise CheckpointError(
            f"{folder} holds no complete checkpoint (a folder step-NNNNNNNN with a {MANIFEST}): "
            "name a checkpoint, or a run that has saved one"
        )
    return found[-1]


def checkpoint_config(checkpoint: Path) -> Config:
    """The config of the run that saved a checkpoint. Raises CheckpointError."""
    path = checkpoint / "config.yaml"
    if not path.is_file():
        raise CheckpointError(
            f"{checkpoint} has no config.yaml, so its model is not known: copy the run's into it"
        )
    try:
        return load_config(path)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None


def saved_weights(
    checkpoint: Path, manifest: CheckpointManifest, model: LlamaConfig
) -> dict[str, SavedTensor]:
    """The model's parameters by fqn, as the manifest has them. CheckpointError if it does not have the
    config's."""
    shapes = weight_shapes(model)
    found = {fqn: manifest.tensors[PREFIX + fqn] for fqn in shapes if PREFIX + fqn in manifest.tensors}
    for fqn, shape in shapes.items():
        if fqn not in found or found[fqn].shape != shape:
            raise CheckpointError(
                f"{checkpoint} does not hold the model of its config.yaml: {fqn} is "
                f"{found.get(fqn, 'missing')}, not of shape {list(shape)}: use another checkpoint"
            )
    return found


def load_whole_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The model's whole parameters on the CPU, by fqn and in the order of `model.named_parameters()`, as
    saved (float32).

    A tied weight is there once. Needs host memory for the whole model. Raises CheckpointError, also if the
    checkpoint does not verify.
    """
    manifest = verify_alone(checkpoint)
    saved = saved_weights(checkpoint, manifest, checkpoint_config(checkpoint).model)
    names = {PREFIX + name: name for name in saved}
    whole = read_whole(checkpoint, manifest, list(names))
    return {names[name]: tensor for name, tensor in whole.items()}


def read_whole(
    checkpoint: Path, manifest: CheckpointManifest, names: Sequence[str], reader: FilesReader | None = None
) -> dict[str, Tensor]:
    """Tensors of a checkpoint, by their names there, each put together from its shards. `reader`: an open
    one, for who reads several times. Raises CheckpointError."""
    saved = {name: manifest.tensors[name] for name in names}
    whole = {name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for name, t in saved.items()}
    read_tensors(checkpoint, manifest, whole, alone=True, reader=reader)
    return whole


def write_weights(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, and wait until the disk has it. Raises OSError and SafetensorError."""
    file.touch()
    # as the user's umask has it; safetensors would leave the file to its owner alone
    mode = file.stat().st_mode
    save_file(dict(tensors), file, metadata={"format": "pt"})
    file.chmod(mode)
    with open(file, "rb") as written:
        os.fsync(written.fileno())
