"""What a start begins from: whether it may use the folder of its run, which may hold another training
(`judge`), and the checkpoint that it resumes from, verified on all ranks."""

import json
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.parallel.errors import first_of
from meshwright.parallel.plan.schema import Plan
from meshwright.train.checkpoint.commit import list_checkpoints, put_aside, step_of
from meshwright.train.checkpoint.manifest import CheckpointManifest
from meshwright.train.checkpoint.training_record import FILE, TrainingRecord, read_training
from meshwright.train.config import CheckpointConfig, Config, ModelConfig
from meshwright.train.distributed.agreement import broadcast_from_rank0, comparable_settings
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.errors import CheckpointError, UnreadableError
from meshwright.train.files import user_path, write_atomically

if TYPE_CHECKING:
    from meshwright.train.checkpoint.initial_weights import Weights


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
            return _verified(path, config)
        except CheckpointError as error:
            raise type(error)(f"checkpoint.resume={config.resume}: {error}") from None
    damaged: list[tuple[Path, str]] = []
    for path in reversed(broadcast_from_rank0(ranks, lambda: list_checkpoints(folder))):
        try:
            return _verified(path, config, tuple(damaged))
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


def _verified(path: Path, config: CheckpointConfig, damaged: tuple[tuple[Path, str], ...] = ()) -> Start:
    from meshwright.train.checkpoint.verify import verify_together  # late: only a resume reads a checkpoint

    return Start(path, verify_together(path, config.verify), damaged)


def put_damaged_aside(start: Start, ranks: RankInfo) -> list[str]:
    """Rename the damaged checkpoints, so that they no longer count, and return a line about each, and about
    files in the checkpoint's folder that it does not name; every rank calls it. Raises CheckpointError."""

    def rename() -> list[str]:
        lines = [f"checkpoint: skipped: {why}. Renamed to {put_aside(path)}" for path, why in start.damaged]
        if start.checkpoint and start.manifest:
            from meshwright.train.checkpoint.verify import unnamed_files  # late, as above

            if names := unnamed_files(start.checkpoint, start.manifest):
                lines.append(f"warning: {start.checkpoint}: {first_of(names, '; ')}; not read")
        return lines

    return broadcast_from_rank0(ranks, rename)


# the settings that a training has from its first start on; all others may change when it goes on
_SETTINGS = ("checkpoint.resume", "checkpoint.init_from", "run.seed", "model.", "data.")


@dataclass(frozen=True)
class Admission:
    """A start that may use its folder. `resume`: what it resumes from, as a value of checkpoint.resume;
    `goes_on`: it belongs to the training that the folder holds; `restarted`: torchrun has started processes
    again that had been admitted."""

    resume: str
    goes_on: bool
    restarted: bool


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


def settings_of(config: Config) -> dict[str, str]:
    """Return the settings that a training has from its first start on, as text by key."""
    return {key: value for key, value in comparable_settings(config).items() if key.startswith(_SETTINGS)}


def describe_start(init_from: str | None, resume_from: Path | None) -> list[str]:
    """Return the log line that names the initial weights, in a list; an empty list without init_from."""
    if init_from is None:
        return []
    if resume_from:
        return [f"weights: checkpoint.init_from is not read, because the run resumes from {resume_from}"]
    return [f"weights: from {init_from}, with a new optimizer at step 0"]


def compare_configs(start: Start, config: Config, plan: Plan, ranks: RankInfo) -> Start:
    """Return the start with what the run trains otherwise than its checkpoint; every rank calls it. Raises
    ConfigError on all ranks for another model, and for other dtypes of its state."""
    checkpoint = start.checkpoint
    if checkpoint is None or not (checkpoint / "config.yaml").is_file():  # mw.save writes none
        return start
    from meshwright.train.checkpoint.changes import changes_since  # late: only a resume has changes

    changes = broadcast_from_rank0(ranks, lambda: changes_since(checkpoint, config, plan))
    return replace(start, changes=changes)


def choose_weights(config: CheckpointConfig, model: ModelConfig, start: Start) -> "Weights | None":
    """Return the weights that `checkpoint.init_from` names, checked against the model; None without it, or if
    the run resumes from a checkpoint. Raises CheckpointError, and ConfigError for another model."""
    if config.init_from is None or start.checkpoint:
        return None
    from meshwright.train.checkpoint.initial_weights import find_weights  # late: few runs start from weights

    return find_weights(config.init_from, model, config.changed_model, config.init_strict)
