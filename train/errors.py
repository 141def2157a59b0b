"""The errors that a run reports to its user, by exit code: 2 (USER_ERRORS), or 1 without a traceback
(EXPLAINED_ERRORS)."""

from meshwright.parallel.errors import PlanError


class CheckpointError(ValueError):
    """A checkpoint cannot be used: the message names the checkpoint, the problem and the fix."""


class NoPredictionError(PlanError):
    """A model of the user's runs, but cannot be traced: it has no predicted memory and time."""


class UnreadableError(CheckpointError):
    """The checkpoint cannot be read (I/O, permission), but may be intact: `resume: auto` must not skip it."""


class SaveError(RuntimeError):
    """A checkpoint could not be saved; nothing of it remains, and earlier checkpoints are unchanged."""


class DataError(ValueError):
    """The configured data cannot be used: the message names the problem, the place and the fix."""


class LockError(ValueError):
    """Another run uses this folder."""


class CrashLoopError(ValueError):
    """The run failed at the same step after repeated restarts by torchrun or Slurm, and needs a person."""


class ConfigError(ValueError):
    """The configuration is invalid: the message names the key, the value, the place and the fix."""


# printed as one message, with exit code 2
USER_ERRORS = (ConfigError, PlanError, DataError, CheckpointError, LockError, CrashLoopError)


class NonFiniteError(RuntimeError):
    """Too many steps had a non-finite loss or gradient."""


class OutOfMemory(RuntimeError):
    """The device ran out of memory; the message gives the cause and what to change."""


class PeerLostError(RuntimeError):
    """A process of this run has died: the ranks can no longer agree on anything, and nothing is saved."""


class UnreachableError(PeerLostError):
    """A process of this run cannot be reached at its address, and may never have been."""


COMMITS_INTACT = "committed checkpoints are intact"


# the message explains the failure: no traceback
EXPLAINED_ERRORS = (SaveError, NonFiniteError, OutOfMemory, PeerLostError)
