"""Where a run resumes: the checkpoint that `checkpoint.resume` means, verified by all ranks, and read into a
model and its optimizer on whatever mesh they are."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from meshwright.parallel.errors import first_of
from meshwright.train.checkpoint.commit import list_checkpoints, put_aside, refuse_newer
from meshwright.train.checkpoint.huggingface import FilesReader
from meshwright.train.checkpoint.manifest import CheckpointManifest, SavedTensor, describe_tensor, dtype_word
from meshwright.train.checkpoint.shards import random_state, training_tensors
from meshwright.train.checkpoint.verify import verify_together
from meshwright.train.config import CheckpointConfig
from meshwright.train.distributed.ranks import RankInfo, broadcast_from_rank0
from meshwright.train.errors import CheckpointError, UnreadableError
from meshwright.train.files import user_path

# what torch's reader raises
UNREADABLE = (OSError, SafetensorError, ValueError, KeyError, AssertionError, CheckpointException)


def load_checkpoint(
    checkpoint: Path, manifest: CheckpointManifest, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Read a checkpoint, whose manifest has been verified, into model and optimizer in place; all ranks call
    it.

    The random state comes back where as many ranks load as saved. Raises CheckpointError if names, shapes or
    dtypes differ.
    """
    tensors = training_tensors(model, optimizer)
    saved = {name: tensor for name, tensor in manifest.tensors.items() if not name.startswith("random.")}
    refuse_different(checkpoint, {name: describe_tensor(tensor) for name, tensor in tensors.items()}, saved)
    same_size = manifest.position.world_size == dist.get_world_size()
    random = {name: state for name, state in random_state().items() if same_size and name in manifest.tensors}
    read_tensors(checkpoint, manifest, {**tensors, **random})
    _count_steps_alike(optimizer)
    for name, state in random.items():
        (torch.cuda if ".cuda." in name else torch).set_rng_state(state)


def _count_steps_alike(optimizer: torch.optim.Optimizer) -> None:
    """Every parameter has made as many steps as the others. Checkpoints made before 23 November 2026 with
    bfloat16 moments or parameters may say fewer for some: what was counted by a rank that had no row of
    them."""
    steps = [state["step"] for state in optimizer.state.values()]
    if steps:
        torch._foreach_copy_(steps, [torch.stack(steps).max()] * len(steps))


def open_reader(checkpoint: Path, manifest: CheckpointManifest) -> FilesReader:
    """What reads the files of all ranks; their headers are read now, once. Raises CheckpointError."""
    try:
        return FilesReader([checkpoint / name for name in manifest.files if name.endswith(".safetensors")])
    except UNREADABLE as error:
        raise _unreadable(checkpoint, error) from None


def read_tensors(
    checkpoint: Path,
    manifest: CheckpointManifest,
    into: Mapping[str, Tensor],
    alone: bool = False,
    reader: FilesReader | None = None,
) -> None:
    """Read saved tensors by name into tensors of the same shape and dtype, whole or sharded. `alone`: in this
    process, without the other ranks. `reader`: an open one, for who reads several times. Raises
    CheckpointError."""
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = reader or open_reader(checkpoint, manifest)
    stored = reader.read_metadata().state_dict_metadata
    headers = {
        name: SavedTensor(tuple(meta.size), dtype_word(meta.properties.dtype))
        for name in into
        if isinstance(meta := stored.get(name), TensorStorageMetadata)
    }
    refuse_different(checkpoint, {name: manifest.tensors[name] for name in into}, headers)
    try:
        with warnings.catch_warnings():
            if alone:
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as was asked for
            load(dict[str, Any](into), storage_reader=reader, no_dist=alone)
    except UNREADABLE as error:
        raise _unreadable(checkpoint, error) from None


def _unreadable(checkpoint: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(f"{checkpoint} cannot be read ({error}): use another checkpoint")


def refuse_different(
    checkpoint: Path, here: Mapping[str, SavedTensor], saved: Mapping[str, SavedTensor]
) -> None:
    """CheckpointError with the first differences of names, shapes and dtypes, if there are any."""
    different = [
        f"{name}: here {here.get(name, 'missing')}, saved {saved.get(name, 'missing')}"
        for name in sorted(here.keys() | saved.keys())
        if here.get(name) != saved.get(name)
    ]
    if different:
        what = _dtype_keys(here, saved) or "another model"
        raise CheckpointError(
            f"{checkpoint} is of {what}: {first_of(different, '; ')}. Use its config, another "
            "run.dir, or for its weights alone checkpoint.init_from"
        )


def _dtype_keys(here: Mapping[str, SavedTensor], saved: Mapping[str, SavedTensor]) -> str:
    """The keys that make the difference, where it is one of dtypes alone; else nothing."""
    if {name: tensor.shape for name, tensor in here.items()} != {
        name: tensor.shape for name, tensor in saved.items()
    }:
        return ""
    keys = {"model.": "parallel.storage_dtype", "optim.": "optim.state_dtype"}
    found = {
        f"{key}={saved[name].dtype}"
        for name in here
        for prefix, key in keys.items()
        if name.startswith(prefix) and here[name].dtype != saved[name].dtype
    }
    return " and ".join(sorted(found))


@dataclass(frozen=True)
class Start:
    """A verified checkpoint to go on from, and lines that say what was passed over on the way to it."""

    checkpoint: Path | None = None
    manifest: CheckpointManifest | None = None
    said: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Steps that are done already."""
        return self.manifest.position.step if self.manifest else 0


def find_start(config: CheckpointConfig, folder: Path, ranks: RankInfo) -> Start:
    """The checkpoint to resume from, none of whose successors in `folder` another training may have written.
    Every rank calls it, and all find the same.

    After a restart by torchrun or Slurm it is what the run has committed itself by then, if anything,
    whatever `checkpoint.resume` names. Raises CheckpointError, also as `find_checkpoint` does.
    """
    resume = config.resume
    if ranks.restarts and broadcast_from_rank0(ranks, lambda: bool(list_checkpoints(folder))):
        resume = "auto"
    start = find_checkpoint(replace(config, resume=resume), folder, ranks)
    inside = start.checkpoint and start.checkpoint.resolve().parent == folder.resolve()
    broadcast_from_rank0(ranks, lambda: refuse_newer(folder, start.step, resume == "auto" or bool(inside)))
    return start


def find_checkpoint(config: CheckpointConfig, folder: Path, ranks: RankInfo) -> Start:
    """The checkpoint that `checkpoint.resume` means; every rank calls it, and all find the same.

    Under `auto` it is the newest in `folder` that verifies; those passed over are renamed, so that they no
    longer count. Raises CheckpointError if one is named that is not there or does not verify, and if there
    are some of which none verifies: never a silent start from step 0. UnreadableError if one cannot be read
    now: it may be whole, and is not passed over.
    """
    if config.resume == "none":
        return Start()
    if config.resume != "auto":
        path = user_path(config.resume, "checkpoint.resume", CheckpointError)
        return Start(path, _verify_named(config, path))
    damaged: list[tuple[Path, str]] = []
    found = broadcast_from_rank0(ranks, lambda: list_checkpoints(folder))
    for path in reversed(found):
        try:
            manifest = verify_together(path, config.verify)
        except UnreadableError:
            raise
        except CheckpointError as error:
            damaged.append((path, str(error)))
            continue
        aside = broadcast_from_rank0(ranks, lambda: [put_aside(one) for one, _ in damaged])
        said = [
            f"checkpoint: passed over: {why}. It is now {new}"
            for (_, why), new in zip(damaged, aside, strict=True)
        ]
        return Start(path, manifest, tuple(said))
    if damaged:
        raise CheckpointError(
            f"none of the {len(damaged)} checkpoints in {folder} verifies: {damaged[0][1]}. Mend or delete "
            "them, or use another run.dir"
        )
    return Start()


def _verify_named(config: CheckpointConfig, path: Path) -> CheckpointManifest:
    try:
        return verify_together(path, config.verify)
    except CheckpointError as error:
        raise type(error)(f"checkpoint.resume={config.resume}: {error}") from None
