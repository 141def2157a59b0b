"""status.json: what became of a run, for whoever looks at its folder, and for the next start in it."""

import contextlib
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from meshwright.train.read_json import read_json

State = Literal["running", "finished", "stopped", "failed"]
LIMIT_BYTES = 1 << 20  # a reason may carry an error's whole message


@dataclass(frozen=True)
class FailedStarts:
    """How many starts in a row, all from the same checkpoint, failed without getting further than step
    `step`."""

    count: int = 0
    step: int = 0


@dataclass(frozen=True)
class Status:
    """What status.json says. `resumed_from`: the step of the checkpoint it started from; None: from the
    beginning."""

    state: State
    step: int
    resumed_from: int | None
    reason: str
    failed: FailedStarts


def write_status(
    folder: Path,
    state: State,
    step: int,
    resumed_from: int | None,
    saved: bool,
    reason: str = "",
    failed: FailedStarts = FailedStarts(),
    named: bool = False,
) -> str:
    """Write status.json by one rename, so that a reader never sees half of it. `saved`: there is a
    checkpoint. `named`: the command names where to start (checkpoint.resume is not auto), so that by itself
    it would start there again.

    Returns "" or, because an unwritable folder must not end a run, a sentence that says why it could not be
    written.
    """
    status = {
        "state": state,
        "step": step,
        "resumed_from": resumed_from,
        "reason": reason[: LIMIT_BYTES // 8],
        "how_to_go_on": _how_to_go_on(state, saved, named),
        "failed_starts": failed.count,
        "failed_at_step": failed.step,
    }
    # Processes of several nodes may write at once, and threads of one process: none may share the partial
    # file.
    partial = folder / f".status.json.{secrets.token_hex(8)}.partial"
    try:
        partial.write_text(json.dumps(status, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, folder / "status.json")
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        return f"{folder}/status.json could not be written ({error.strerror}) and may be out of date"
    return ""


def _how_to_go_on(state: State, saved: bool, named: bool) -> str:
    if state == "running":
        return ""
    if not saved:
        return (
            f"nothing was saved: the same command starts "
            f"{'where this one did' if named else 'from the beginning'}"
        )
    if state == "finished":
        return f"a larger train.steps{' with --checkpoint.resume=auto' if named else ''} continues it"
    return "the same command with --checkpoint.resume=auto goes on" if named else "run the same command again"


def read_status(folder: Path) -> Status | None:
    """What a run before this one left; None where there is none, or none that can be understood."""
    try:
        status = read_json(folder / "status.json", LIMIT_BYTES)
    except (OSError, ValueError):
        return None
    if status.get("state") not in get_args(State):
        return None
    resumed_from = _number(status, "resumed_from") if status.get("resumed_from") is not None else None
    failed = FailedStarts(_number(status, "failed_starts"), _number(status, "failed_at_step"))
    return Status(
        cast(State, status["state"]),
        _number(status, "step"),
        resumed_from,
        str(status.get("reason", "")),
        failed,
    )


def _number(status: dict[str, Any], key: str) -> int:
    """A count that may be missing (an older version's file) or anything at all: then 0."""
    value = status.get(key)
    return value if type(value) is int and value >= 0 else 0
