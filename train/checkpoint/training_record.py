"""training.json: which training the folder of a run holds."""

from dataclasses import dataclass
from pathlib import Path

from meshwright.train.checkpoint.commit import list_checkpoints
from meshwright.train.files import read_note

FILE = "training.json"


@dataclass(frozen=True)
class TrainingRecord:
    """The contents of training.json, which every admitted start writes. `settings`: of the start that began
    the training, or rolled it back: checkpoint.resume, the model, data and seed; `resumed_from`: the
    checkpoint that it began from, "" for initial weights; `launch`: of the last start (RankInfo.launch)."""

    id: str
    settings: dict[str, str]
    resumed_from: str = ""
    launch: str = ""


def read_training(folder: Path) -> TrainingRecord | None:
    """Return the training that a run's folder holds; None if training.json is missing or invalid."""
    return read_note(TrainingRecord, folder / FILE, 1 << 20)


def describe_training(folder: Path) -> str:
    """Say which training a run's folder holds, and what a start in it does."""
    training, checkpoints = read_training(folder), list_checkpoints(folder / "checkpoints")
    begun = (training and training.resumed_from) or "initial weights"
    about = f"training {training.id}, begun from {begun}: " if training else ""
    if not checkpoints:
        return f"{about}no checkpoint; checkpoint.resume=auto begins there again"
    same = " or the command that began the training" if training else ""
    return f"{about}checkpoint.resume=auto{same} goes on from {checkpoints[-1].name}, others are refused"
