"""Reads full tensors from a checkpoint's shards, in one process without process group or device."""

from pathlib import Path

import torch
from torch import Tensor

from meshwright.train.checkpoint.manifest import MODEL, CheckpointManifest
from meshwright.train.checkpoint.reader import TensorFiles, read_tensors
from meshwright.train.config import Config
from meshwright.train.config_parser import load_config
from meshwright.train.errors import CheckpointError, ConfigError


def checkpoint_config(checkpoint: Path) -> Config:
    """Read the config of the run that saved a checkpoint. Raises CheckpointError."""
    path = checkpoint / "config.yaml"
    if not path.is_file():
        raise CheckpointError(
            f"{checkpoint} has no config.yaml, so its model is unknown: copy the run's config.yaml into it"
        )
    try:
        return load_config(path)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None


def state_dict_names(manifest: CheckpointManifest) -> dict[str, str]:
    """Return the name in the manifest by that in the model's state_dict, where a tied tensor has all of its
    names; of a checkpoint of an older version its first name only."""
    stored = {name: name for name in manifest.tensors if name.startswith(MODEL)}
    return {name.removeprefix(MODEL): ours for name, ours in {**stored, **manifest.tied}.items()}


def read_full(files: TensorFiles, manifest: CheckpointManifest, name: str) -> Tensor:
    """Return a tensor of an open checkpoint, assembled from its shards. Raises CheckpointError."""
    saved = manifest.tensors[name]
    tensor = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
    read_tensors(files, {name: tensor})
    return tensor
