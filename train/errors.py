"""Every error that a user of a run can see, by what it ends with: exit code 2 (USER_ERRORS), or 1 with no
traceback (EXPLAINED_ERRORS)."""

from meshwright.parallel.errors import PlanError


class CheckpointError(ValueError):
    """A checkpoint cannot be used: the message names it, what is wrong and the way out."""


class UnreadableError(CheckpointError):
    """Whether a checkpoint is whole cannot be told now: the disk or the system does not let us read it. It
    may well be, so nobody passes it over."""


class SaveError(RuntimeError):
    """A checkpoint could not be saved; nothing of it is left, and those before are as they were."""


class DataError(ValueError):
    """The data asked for cannot be used: the message names what, where and the way out."""


class LockError(ValueError):
    """Another run works in this folder."""


class CrashLoopError(ValueError):
    """Started again and again by torchrun or Slurm, the run fails at the same step: for a human to look
    at."""


class ConfigError(ValueError):
    """The configuration is wrong: the message names key, value, place and way out."""


# one message, exit code 2
USER_ERRORS = (ConfigError, PlanError, DataError, CheckpointError, LockError, CrashLoopError)


class NonFiniteError(RuntimeError):
    """Too many steps were not finite, or something that is not finite would have been saved."""


class OutOfMemory(RuntimeError):
    """The message says all."""


class PeerLostError(RuntimeError):
    """A process of this run has died: nothing can be agreed any more, and nothing is saved."""


# failures of which the message says all: no traceback
EXPLAINED_ERRORS = (SaveError, NonFiniteError, OutOfMemory, PeerLostError)
