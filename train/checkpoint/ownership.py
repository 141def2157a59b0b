"""Which training a run's folder holds (training.json), and whether a start may use the folder (`judge`)."""

import json
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from meshwright.train.checkpoint.commit import list_checkpoints, step_of
from meshwright.train.checkpoint.load import Start, find_checkpoint, put_damaged_aside
from meshwright.train.config import Config
from meshwright.train.distributed.ranks import RankInfo, broadcast_from_rank0, comparable_settings
from meshwright.train.errors import CheckpointError
from meshwright.train.files import read_note, user_path, write_atomically

FILE = "training.json"
# the settings that a training has from its first start on; all others may change when it goes on
_SETTINGS = ("checkpoint.resume", "checkpoint.init_from", "run.seed", "model.", "data.")


@dataclass(frozen=True)
class TrainingRecord:
    """The contents of training.json, which every admitted start writes.

    Args:
        id: made at the first start of the training
        settings: of the start that began it, or rolled it back: checkpoint.resume, the model, data and seed
        resumed_from: the checkpoint that it began from; "" if it began from initial weights
        launch: of the last admitted start (RankInfo.launch)
    """

    id: str
    settings: dict[str, str]
    resumed_from: str = ""
    launch: str = ""


@dataclass(frozen=True)
class Admission:
    """A start that may use its folder.

    Args:
        resume: what it resumes from, as a value of checkpoint.resume
        goes_on: it belongs to the training that the folder holds
        restarted: torchrun has started processes again that had been admitted
    """

    resume: str
    goes_on: bool
    restarted: bool


def read_training(folder: Path) -> TrainingRecord | None:
    """Return the training that a run's folder holds; None if training.json is missing or invalid."""
    return read_note(TrainingRecord, folder / FILE, 1 << 20)


def judge(config: Config, folder: Path, ranks: RankInfo) -> Admission:
    """Decide whether a start may use a run's folder, and change nothing; every rank calls it.

    A start belongs to the training in the folder if checkpoint.resume is auto, or if it is the command that
    began the training, such as a branch or a roll-back. Raises CheckpointError on all ranks if the folder
    contains checkpoints that the start does not continue, because retention would delete them.
    """
    return broadcast_from_rank0(ranks, lambda: _judge(config, folder, ranks.launch))


def _judge(config: Config, folder: Path, launch: str) -> Admission:
    training, asked = read_training(folder), config.checkpoint
    restarted = training is not None and launch == training.launch != ""
    others = list_checkpoints(folder / "checkpoints")
    if others and (asked.resume == "auto" or (training and training.settings == settings_of(config))):
        return Admission("auto", True, restarted)
    if asked.resume == "auto" and training and training.resumed_from:  # a branch before its first checkpoint
        return Admission(training.resumed_from, True, restarted)
    which = f"which checkpoint.resume={asked.resume} does not continue"
    if others and asked.resume != "none":
        path = user_path(asked.resume, "checkpoint.resume", CheckpointError)
        if path.resolve().parent == others[0].resolve().parent:  # a roll-back
            others = [other for other in others if step_of(other) > step_of(path)]
            which = f"newer than {path.name}: to go back to it, move them away"
    if others:
        names = ", ".join(other.name for other in others[-3:])
        raise CheckpointError(
            f"{folder / 'checkpoints'} contains {names}, {which}. Use --checkpoint.resume=auto to resume "
            "from the newest, or another run.dir to leave them unchanged"
        )
    return Admission(asked.resume, False, restarted)


def find_start(config: Config, folder: Path, ranks: RankInfo) -> tuple[Admission, Start]:
    """Decide as `judge` does, and find the checkpoint that the start resumes from."""
    admission = judge(config, folder, ranks)
    asked = replace(config.checkpoint, resume=admission.resume)
    return admission, find_checkpoint(asked, folder / "checkpoints", ranks)


def admit(config: Config, folder: Path, ranks: RankInfo, admission: Admission, start: Start) -> list[str]:
    """From now on the folder is written: record that the start has been admitted, and put damaged checkpoints
    aside; every rank calls it. Returns lines to print, a warning if it cannot be recorded."""
    lines = put_damaged_aside(start, ranks)
    return lines + broadcast_from_rank0(ranks, lambda: _record(config, folder, ranks, admission, start))


def _record(config: Config, folder: Path, ranks: RankInfo, admission: Admission, start: Start) -> list[str]:
    training = read_training(folder)
    if not training or not admission.goes_on:
        origin = start.checkpoint
        rolled_back = training and origin and origin.resolve().is_relative_to(folder.resolve())
        identity = training.id if training and rolled_back else uuid.uuid4().hex
        training = TrainingRecord(identity, settings_of(config), str(origin or ""))
    text = json.dumps(asdict(replace(training, launch=ranks.launch)), indent=2)
    try:
        write_atomically(folder / FILE, f"{text}\n".encode())
    except OSError as error:
        return [f"warning: {folder / FILE} cannot be written ({error.strerror}); the run continues"]
    return []


def describe_training(folder: Path) -> str:
    """Say which training a run's folder holds, and what a start in it does."""
    training, checkpoints = read_training(folder), list_checkpoints(folder / "checkpoints")
    begun = (training and training.resumed_from) or "initial weights"
    about = f"training {training.id}, begun from {begun}: " if training else ""
    if not checkpoints:
        return f"{about}no checkpoint; checkpoint.resume=auto begins there again"
    same = " or the command that began the training" if training else ""
    return f"{about}checkpoint.resume=auto{same} goes on from {checkpoints[-1].name}, others are refused"


def settings_of(config: Config) -> dict[str, str]:
    """Return the settings that a training has from its first start on, as text by key."""
    return {key: value for key, value in comparable_settings(config).items() if key.startswith(_SETTINGS)}
