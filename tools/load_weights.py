"""Reads full tensors from a checkpoint's shards, in one process without process group or device."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from meshwright.train.checkpoint.initial_weights import weight_shapes
from meshwright.train.checkpoint.manifest import MODEL, CheckpointManifest, SavedTensor
from meshwright.train.checkpoint.reader import TensorFiles, open_checkpoint, read_tensors
from meshwright.train.checkpoint.verify import verify_alone
from meshwright.train.config import Config, ModelConfig
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


def saved_weights(
    checkpoint: Path, manifest: CheckpointManifest, model: ModelConfig
) -> dict[str, SavedTensor]:
    """Return the manifest's entries of the model's parameters, by fully qualified name. CheckpointError if a
    name or shape does not match the config."""
    shapes = weight_shapes(model)
    saved = {fqn: manifest.tensors[MODEL + fqn] for fqn in shapes if MODEL + fqn in manifest.tensors}
    for fqn, shape in shapes.items():
        if fqn not in saved or saved[fqn].shape != shape:
            raise CheckpointError(
                f"{checkpoint} does not contain the model of its config.yaml: {fqn} is "
                f"{saved.get(fqn, 'missing')}, not of shape {list(shape)}: use another checkpoint"
            )
    return saved


def load_into(model: nn.Module, checkpoint: Path, config: ModelConfig) -> None:
    """Read parameters and saved buffers into an unsharded model, in place. Raises CheckpointError."""
    manifest = verify_alone(checkpoint)
    saved_weights(checkpoint, manifest, config)
    named = {MODEL + name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    into = {name: tensor for name, tensor in named.items() if name in manifest.tensors}
    read_tensors(open_checkpoint(checkpoint, manifest), into)


def state_dict_names(manifest: CheckpointManifest) -> dict[str, str]:
    """Return the name in the manifest by that in the model's state_dict, where a tied tensor has all of its
    names; of a checkpoint of an older version its first name only."""
    stored = {name: name for name in manifest.tensors if name.startswith(MODEL)}
    return {name.removeprefix(MODEL): ours for name, ours in {**stored, **manifest.tied}.items()}


def load_full_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Return the model's full parameters on the CPU in their saved dtype, by fully qualified name, in the
    order of `model.named_parameters()`.

    A tied weight is returned once. Needs host memory for the full model. Raises CheckpointError, also if a
    checksum of the checkpoint does not match.
    """
    manifest = verify_alone(checkpoint)
    saved = saved_weights(checkpoint, manifest, checkpoint_config(checkpoint).model)
    names = {MODEL + name: name for name in saved}
    tensors = read_full_tensors(open_checkpoint(checkpoint, manifest), manifest, list(names))
    return {names[name]: tensor for name, tensor in tensors.items()}


def read_full_tensors(
    files: TensorFiles, manifest: CheckpointManifest, names: Sequence[str]
) -> dict[str, Tensor]:
    """Return tensors of an open checkpoint by name, each assembled from its shards. Raises
    CheckpointError."""
    saved = {name: manifest.tensors[name] for name in names}
    tensors = {name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for name, t in saved.items()}
    read_tensors(files, tensors)
    return tensors
