"""What a run asks of its checkpoints."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshwright.train.bounds import bounded

VerifyMode = Literal["full", "size"]


class CheckpointError(ValueError):
    """A checkpoint cannot be used: the message names it, what is wrong and the way out."""


class UnreadableError(CheckpointError):
    """Whether a checkpoint is whole cannot be told now: the disk or the system does not let us read it. It
    may well be, so nobody passes it over."""


# what says for certain that a file is not there; no other OSError does
GONE = (FileNotFoundError, NotADirectoryError)


def make_unreadable(path: Path, error: OSError) -> UnreadableError:
    """The error for a file or folder of a checkpoint that is there, or may be, and cannot be read."""
    return UnreadableError(
        f"{path} cannot be read ({error.strerror or error}), which does not mean that it is damaged; nothing "
        "was passed over: mend that and start again"
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save and where to go on.

    Args:
        every: optimizer steps between checkpoints; the last step and a stop are saved too; 0 is never
        keep: how many of the newest checkpoints stay; 0 keeps all
        keep_every: checkpoints of steps that this number divides stay for good; 0 is none
        asynchronous: write beside the training, from a copy in host memory; false lets the training wait (as
            a CPU without room for the copy does anyway)
        on_error: what a failed save does: stop ends the run as failed after the step; warn says so and trains
            on. Too little host memory for the copy, which GPUs take before the first step, is an error of the
            config, or likewise a warning
        resume: auto goes on from the newest checkpoint of run.dir that verifies, or starts if there is none;
            none starts anew; or the path of a checkpoint
        verify: what is compared with the manifest before a tensor is used: full hashes every byte; size only
            the files' sizes
        init_from: weights to start with at step 0: folder of a Hugging Face Llama (config.json,
            *.safetensors), or a checkpoint, of which the optimizer's state is left; null draws random ones. A
            run that resumes does not read them
    """

    every: int = bounded(0, low=0)
    keep: int = bounded(2, low=0)
    keep_every: int = bounded(0, low=0)
    asynchronous: bool = True
    on_error: Literal["stop", "warn"] = "stop"
    resume: str = "auto"
    verify: VerifyMode = "full"
    init_from: str | None = None
