"""Checkpoints: sharded safetensors files, a JSON of the position, and one rename that makes them count.

`checkpoints/step-00000100/` holds every rank's shards (torch's distributed checkpoint writes and reshards them;
no pickle anywhere), `state.json`, and the run's config. A folder with a final name is complete.
"""

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.bounds import bounded

STEP_FOLDER = re.compile(r"step-(\d{8,})")


class CheckpointError(ValueError):
    """A checkpoint cannot be used: the message names it, what is wrong and the way out."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save and where to go on.

    Args:
        every: optimizer steps between checkpoints; the last step and a stop are saved too; 0 is never
        keep: how many of the newest checkpoints stay; 0 keeps all
        resume: auto goes on from the newest checkpoint of run.dir, or starts if there is none; none starts anew;
            or the path of a checkpoint
        init_from: weights to start with at step 0: folder of a Hugging Face Llama (config.json, *.safetensors), or a
            checkpoint, of which the optimizer's state is left; null draws random ones. A run that resumes does not read them
    """

    every: int = bounded(0, low=0)
    keep: int = bounded(2, low=0)
    resume: str = "auto"
    init_from: str | None = None


@dataclass(frozen=True)
class Position:
    """How far a run is: steps done, samples of the data order used; and what that order and the random state hang on:
    seed, tokens per sequence, the number of processes, and the fingerprint of the data."""

    step: int = 0
    samples: int = 0
    seed: int = 0
    seq_len: int = 0
    world_size: int = 0
    data: str = ""


def find_checkpoint(resume: str, folder: Path) -> Path | None:
    """The checkpoint that `checkpoint.resume` means, or None to start at step 0. CheckpointError if a named one is
    not there: never a silent start from 0."""
    if resume == "none":
        return None
    if resume == "auto":
        found = list_checkpoints(folder)
        return found[-1] if found else None
    path = Path(resume).expanduser()
    if not (path / "state.json").is_file():
        raise CheckpointError(f"checkpoint.resume={resume} is not a checkpoint (it has no state.json): "
                              "name a folder such as runs/NAME/checkpoints/step-00000100, or auto")  # fmt: skip
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    found = [path for path in folder.glob("step-*") if STEP_FOLDER.fullmatch(path.name) and (path / "state.json").is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def read_position(checkpoint: Path) -> Position:
    """The position a checkpoint was saved at. CheckpointError if it cannot be read, or a file is gone or cut short."""
    try:
        state = json.loads((checkpoint / "state.json").read_text())
        files = dict(state.pop("files"))
        position = Position(**state)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{checkpoint}/state.json cannot be read ({error}): name another checkpoint") from None
    here = _file_sizes(checkpoint)
    odd = [f"{name} ({here.get(name, 'missing')} of {size} bytes)" for name, size in files.items() if here.get(name) != size]
    if odd:
        raise CheckpointError(f"{checkpoint} is damaged: {', '.join(odd[:3])}. Delete it, or name another checkpoint")
    return position


def _file_sizes(checkpoint: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(checkpoint.glob("*.safetensors"))}


def refuse_newer(folder: Path, start_step: int) -> None:
    """CheckpointError if the run's folder holds checkpoints beyond where this run starts: they are another training's,
    and the next start would take them for this one's."""
    newer = [path.name for path in list_checkpoints(folder) if int(path.name.removeprefix("step-")) > start_step]
    if newer:
        raise CheckpointError(f"{folder} holds {', '.join(newer[-3:])}, newer than step {start_step} where this run starts: "
                              "delete them, or use another run.dir")  # fmt: skip


def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, position: Position, config_yaml: str, keep: int
) -> Path:
    """Save model, optimizer, random state and position; all ranks call it. The step's folder appears by one rename.

    Then the oldest checkpoints beyond `keep` are deleted.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    final = folder / f"step-{position.step:08d}"
    partial = folder / f".{final.name}.partial"
    main = dist.get_rank() == 0
    if main:
        for leftover in folder.glob(".step-*"):  # of a save or a deletion that was cut short
            shutil.rmtree(leftover)
        partial.mkdir(parents=True)
    dist.barrier()
    tensors = {**training_tensors(model, optimizer), **_random_state()}
    save(tensors, storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True))
    dist.barrier()
    if main:
        (partial / "config.yaml").write_text(config_yaml)
        state = {**asdict(position), "files": _file_sizes(partial)}
        (partial / "state.json").write_text(json.dumps(state) + "\n")
        os.rename(partial, final)
        for old in list_checkpoints(folder)[: -keep or None] if keep else []:
            hidden = old.with_name(f".{old.name}.old")  # a name that does not count, in case the deletion is cut short
            os.rename(old, hidden)
            shutil.rmtree(hidden)
    dist.barrier()
    return final


def load_checkpoint(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read a checkpoint into model and optimizer in place, on whatever mesh they are; all ranks call it.

    The random state comes back where as many ranks load as saved. Raises CheckpointError.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    position = read_position(checkpoint)
    tensors = training_tensors(model, optimizer)
    reader = HuggingFaceStorageReader(str(checkpoint))
    saved = reader.read_metadata().state_dict_metadata
    saved_shapes = {name: tuple(getattr(meta, "size", ())) for name, meta in saved.items()}
    _compare(checkpoint, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, saved_shapes)
    random_state = {name: state for name, state in _random_state().items() if name in saved}
    if position.world_size != dist.get_world_size():
        random_state = {}
    load({**tensors, **random_state}, storage_reader=reader)
    for name, state in random_state.items():
        (torch.cuda if ".cuda." in name else torch).set_rng_state(state)


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor that training changes, by plain name: `model.FQN` and `optim.FQN.MOMENT`; a tied weight once."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"model.{name}": parameter.detach() for parameter, name in names.items()}
    for parameter, state in optimizer.state.items():
        tensors |= {f"optim.{names[parameter]}.{key}": value for key, value in state.items()}
    return tensors


def _random_state() -> dict[str, Tensor]:
    rank = dist.get_rank()
    states = {f"random.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states[f"random.cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def _compare(checkpoint: Path, here: dict[str, Any], saved: dict[str, Any]) -> None:
    differences = [f"{name}: here {here.get(name, 'missing')}, saved {saved.get(name, 'missing')}"
                   for name in sorted(here.keys() | saved.keys())
                   if here.get(name) != saved.get(name) and not name.startswith("random.")]  # fmt: skip
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise CheckpointError(f"{checkpoint} is of another model: {'; '.join(differences[:3])}{more}. "
                              "Use its config, or another run.dir")  # fmt: skip
