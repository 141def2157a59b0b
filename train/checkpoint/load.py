"""Resuming: choose the checkpoint that `checkpoint.resume` names, verify it on all ranks, and read it into a
model and optimizer on any mesh."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.errors import first_of
from meshwright.train.checkpoint.commit import list_checkpoints, put_aside
from meshwright.train.checkpoint.layout import RANDOM
from meshwright.train.checkpoint.manifest import CheckpointManifest, SavedTensor, describe_tensor
from meshwright.train.checkpoint.reader import open_checkpoint, read_together
from meshwright.train.checkpoint.shards import degrees, random_state, set_numbers, training_tensors
from meshwright.train.checkpoint.verify import unnamed_files, verify_together
from meshwright.train.config import CheckpointConfig
from meshwright.train.distributed.ranks import RankInfo, broadcast_from_rank0
from meshwright.train.errors import CheckpointError, UnreadableError
from meshwright.train.files import user_path
from meshwright.train.hooks import STATE


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
    tensors = training_tensors(model, optimizer)
    apart = (RANDOM, STATE)
    saved = {name: tensor for name, tensor in manifest.tensors.items() if not name.startswith(apart)}
    refuse_different(checkpoint, {name: describe_tensor(tensor) for name, tensor in tensors.items()}, saved)
    same_mesh = manifest.mesh == dict(degrees(mesh))
    random = {name: state for name, state in random_state().items() if same_mesh and name in manifest.tensors}
    read_together(partial(open_checkpoint, checkpoint, manifest), {**tensors, **random})
    set_numbers(model, optimizer, tensors)
    for name, state in random.items():
        (torch.cuda if ".cuda." in name else torch).set_rng_state(state)
    return bool(random)


def load_states(start: "Start", states: Mapping[str, Tensor]) -> list[str]:
    """Read the state of hooks (`hooks.state_of`) from the checkpoint that a run resumes from, in place; all
    ranks call it. Returns a line about hooks whose state is only in the checkpoint, or only in the run.
    Raises CheckpointError."""
    if start.checkpoint is None or start.manifest is None:
        return []
    saved = {name: tensor for name, tensor in start.manifest.tensors.items() if name.startswith(STATE)}
    lines = []
    for names, problem in (
        (states.keys() - saved.keys(), "begins anew, because the checkpoint has none"),
        (saved.keys() - states.keys(), "is in the checkpoint, but not used: train.hooks has no such hook"),
    ):
        hooks = sorted({name.removeprefix(STATE).partition(".")[0] for name in names})
        lines += [f"warning: the state of {', '.join(hooks)} {problem}"] if hooks else []
    common = {name: states[name] for name in states if name in saved}
    current = {name: describe_tensor(tensor) for name, tensor in common.items()}
    refuse_different(start.checkpoint, current, {name: saved[name] for name in common})
    read_together(partial(open_checkpoint, start.checkpoint, start.manifest), common)
    return lines


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
            "saved with (its config.yaml; the dtypes are optim.state_dtype and parallel.storage_dtype), or "
            "another run.dir, with checkpoint.init_from for its weights"
        )


@dataclass(frozen=True)
class Start:
    """The verified checkpoint to resume from, the newer ones that are damaged, each with the reason, and what
    the run trains otherwise (`compare_configs`), as `key old -> new`."""

    checkpoint: Path | None = None
    manifest: CheckpointManifest | None = None
    damaged: tuple[tuple[Path, str], ...] = ()
    changes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The number of steps already done."""
        return self.manifest.position.step if self.manifest else 0


def find_checkpoint(config: CheckpointConfig, folder: Path, ranks: RankInfo) -> Start:
    """Return the checkpoint that `checkpoint.resume` names; every rank calls it and gets the same result.

    `auto` takes the newest checkpoint in `folder` that verifies; `put_damaged_aside` renames the damaged ones
    after it. Raises CheckpointError if a named checkpoint is missing or damaged, and if checkpoints exist but
    none verifies: a run never silently starts from step 0. Raises UnreadableError if a checkpoint cannot be
    read: it may be intact, so it is not skipped.
    """
    if config.resume == "none":
        return Start()
    if config.resume != "auto":
        path = user_path(config.resume, "checkpoint.resume", CheckpointError)
        try:
            return Start(path, verify_together(path, config.verify))
        except CheckpointError as error:
            raise type(error)(f"checkpoint.resume={config.resume}: {error}") from None
    damaged: list[tuple[Path, str]] = []
    for path in reversed(broadcast_from_rank0(ranks, lambda: list_checkpoints(folder))):
        try:
            return Start(path, verify_together(path, config.verify), tuple(damaged))
        except UnreadableError:
            raise
        except CheckpointError as error:
            damaged.append((path, str(error)))
    if damaged:
        raise CheckpointError(
            f"none of the {len(damaged)} checkpoints in {folder} verifies: {damaged[0][1]}. Fix or delete "
            "them, or use another run.dir"
        )
    return Start()


def put_damaged_aside(start: Start, ranks: RankInfo) -> list[str]:
    """Rename the damaged checkpoints, so that they no longer count, and return a line about each, and about
    files in the checkpoint's folder that it does not name; every rank calls it. Raises CheckpointError."""

    def rename() -> list[str]:
        lines = [f"checkpoint: skipped: {why}. Renamed to {put_aside(path)}" for path, why in start.damaged]
        if start.checkpoint and start.manifest and (names := unnamed_files(start.checkpoint, start.manifest)):
            lines.append(f"warning: {start.checkpoint}: {first_of(names, '; ')}; not read")
        return lines

    return broadcast_from_rank0(ranks, rename)
