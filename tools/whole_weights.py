"""Whole tensors out of a checkpoint's shards, in one process: no process group, no device."""

import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from train.checkpoint import CheckpointError, list_checkpoints
from train.config import Config, ConfigError, load_config
from train.init_from import PREFIX, weight_shapes


@dataclass(frozen=True)
class SavedTensor:
    """One tensor of a checkpoint, as a whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.elements * self.dtype.itemsize


def checkpoints_folder(path: Path) -> Path:
    """The folder that holds the checkpoints of a run, given it or the run's own. CheckpointError if it is not there."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder. Name a run, such as runs/NAME, or its checkpoints folder")
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def find_newest(path: Path) -> Path:
    """A checkpoint as it is; of a run, or of its checkpoints folder, the newest. CheckpointError if there is none."""
    if (path / "state.json").is_file():
        return path
    folder = checkpoints_folder(path)
    found = list_checkpoints(folder)
    if not found:
        raise CheckpointError(f"{folder} holds no complete checkpoint (a folder step-NNNNNNNN with a state.json): "
                              "name a checkpoint, or a run that has saved one")  # fmt: skip
    return found[-1]


def checkpoint_config(checkpoint: Path) -> Config:
    """The config of the run that saved a checkpoint. Raises CheckpointError."""
    path = checkpoint / "config.yaml"
    if not path.is_file():
        raise CheckpointError(f"{checkpoint} has no config.yaml, so its model is not known: copy the run's into it")
    try:
        return load_config(path)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_saved_tensors(checkpoint: Path) -> dict[str, SavedTensor]:
    """Every tensor of a checkpoint by its saved name (`model.FQN`, `optim.FQN.MOMENT`, `random.*`), from headers alone.

    Raises CheckpointError where a file cannot be read, or where the shards do not add up to whole tensors.
    """
    saved: dict[str, SavedTensor] = {}
    holes: list[str] = []
    for name, meta in _read_metadata(checkpoint).items():
        saved[name] = SavedTensor(tuple(meta.size), meta.properties.dtype)
        # a shard appears once, by its offsets, however many processes held a copy
        shards = {tuple(chunk.offsets): math.prod(chunk.sizes) for chunk in meta.chunks if math.prod(chunk.sizes)}
        if sum(shards.values()) != saved[name].elements:
            holes.append(name)
    weights = {name.removeprefix(PREFIX): t.shape for name, t in saved.items() if name.startswith(PREFIX)}
    wanted = weight_shapes(checkpoint_config(checkpoint).model)
    # a shard lost at a tensor's end leaves no hole: only the model knows that the tensor was longer
    holes += [PREFIX + name for name in wanted.keys() | weights.keys() if wanted.get(name) != weights.get(name)]
    if holes:
        names = sorted(set(holes))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise CheckpointError(f"{checkpoint} is not whole: of {', '.join(names[:3])}{more} there is not what its "
                              "config.yaml says. A file is missing, or the config is another run's: "
                              "use another checkpoint")  # fmt: skip
    return saved


def load_whole_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The model's whole parameters on the CPU, by fqn and in the order of `model.named_parameters()`, as saved (float32).

    A tied weight is there once. Needs host memory for the whole model. Raises CheckpointError.
    """
    saved = read_saved_tensors(checkpoint)
    names = weight_shapes(checkpoint_config(checkpoint).model)
    whole = {f"{PREFIX}{name}": torch.empty(shape, dtype=saved[f"{PREFIX}{name}"].dtype) for name, shape in names.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is: this is one process
        load({**whole}, storage_reader=HuggingFaceStorageReader(str(checkpoint)), no_dist=True)
    return {name.removeprefix(PREFIX): tensor for name, tensor in whole.items()}


def _read_metadata(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    try:
        metadata = HuggingFaceStorageReader(str(checkpoint)).read_metadata()
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{checkpoint}: a file of it cannot be read ({error}): use another checkpoint") from None
    return {name: m for name, m in metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
