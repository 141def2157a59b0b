"""What a sweep notes of each run, beside what the run itself leaves: how it was started, and how that
ended."""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal, cast, get_args

from meshwright.parallel.errors import one_line
from meshwright.tools.plan.files import write_whole
from meshwright.train.fault_tolerance.run_status import read_status
from meshwright.train.files import read_json

NAME, OUTPUT = "attempt.json", "output.txt"
LIMIT_BYTES = 1 << 20
TAIL_BYTES = 1 << 18  # of an output, searched for a reason
REASON_LETTERS = 600
# An error's name at the start of a line, as rank 0 prints it; torchrun's own report comes later, and has none
# so.
_ERROR = re.compile(
    r"^(?:\[\w+\]:\s*)?(?:rank \d+: )?((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Unsupported|Interrupt): .*)$"
)
_DEVICE = re.compile(r"^device: (.+), \d+ process", re.MULTILINE)
Ended = Literal["waiting", "running", "finished", "stopped", "failed", "refused"]


@dataclass(frozen=True)
class Attempt:
    """The last start of a run.

    Args:
        state: waiting where there was none; running also where sweep and run were killed together
        reason: why it failed, was stopped or is refused
        began_s: when, in seconds of Unix time
        predicted: step_time_s and peak_memory_gib, where they were predicted for this machine
    """

    state: Ended = "waiting"
    processes: int = 0
    nodes: int = 0
    arguments: tuple[str, ...] = ()
    reason: str = ""
    exit_code: int | None = None
    began_s: float = 0.0
    predicted: Mapping[str, float] = field(default_factory=dict)


def read_attempt(folder: Path) -> Attempt:
    """Of a run's folder; waiting where there is none, or nothing that can be understood."""
    try:
        found = read_json(folder / NAME, LIMIT_BYTES)
        known = {item.name for item in fields(Attempt)}
        attempt = Attempt(**{key: value for key, value in found.items() if key in known})
    except (OSError, ValueError, TypeError):
        return Attempt()
    sound = attempt.state in get_args(Ended) and isinstance(attempt.predicted, dict)
    return attempt if sound else Attempt()


def write_attempt(folder: Path, attempt: Attempt) -> float:
    """By one rename. Returns when, by the clock of the folder's disk, which may be another machine's. Raises
    ConfigError where the folder cannot be written."""
    write_whole(folder / NAME, (json.dumps(asdict(attempt), indent=2) + "\n").encode())
    return (folder / NAME).stat().st_mtime


def launched_with(folder: Path) -> dict[str, int]:
    """Processes and nodes of the run that was started in a folder; {} if none was."""
    attempt = read_attempt(folder)
    known = attempt.state not in ("waiting", "refused") and (folder / "config.yaml").is_file()
    return {"processes": attempt.processes, "nodes": attempt.nodes} if known else {}


def state_of(folder: Path) -> tuple[Ended, str]:
    """How a run stands and why: by the sweep's note, and where others started it (Slurm) by its own status.
    Whether its plan is refused is found anew each time: one that was refused before, and no longer is,
    waits."""
    attempt, status = read_attempt(folder), read_status(folder)
    if attempt.state in ("waiting", "running", "refused") and status is not None:
        return status.state, status.reason
    return ("waiting", "") if attempt.state == "refused" else (attempt.state, attempt.reason)


def judge(folder: Path, exit_code: int, began_s: float, output: str) -> tuple[Ended, str]:
    """What has become of a run that was started at `began_s`, as `write_attempt` says it, and has ended: its
    own word, where it has left one since, else what it printed."""
    status = read_status(folder)
    if status is not None and _written_since(folder / "status.json", began_s):
        if status.state in ("stopped", "finished") and (exit_code == 0 or status.state == "stopped"):
            return cast(Ended, status.state), status.reason
        if status.state == "failed" and status.reason:
            return "failed", one_line(status.reason, REASON_LETTERS)
    reason = find_reason(output) or "it printed nothing"
    return "failed", reason if exit_code else f"it ended without a last word in status.json: {reason}"


def has_last_word(folder: Path, began_s: float) -> bool:
    """Whether a run that was started at `began_s` has said itself how it has ended."""
    status = read_status(folder)
    return (
        status is not None and status.state != "running" and _written_since(folder / "status.json", began_s)
    )


def find_reason(output: str) -> str:
    """The first error that is named in an output, with what is indented below it; else its last line; "" of
    nothing."""
    lines = [line for line in output.splitlines() if line.strip()]
    for i, line in enumerate(lines):
        if match := _ERROR.match(line):
            more = [match[1]]
            for below in lines[i + 1 : i + 5]:
                if not below.startswith("  ") or below.lstrip().startswith(("File ", "rank")):
                    break
                more.append(below.strip())
            return one_line(" ".join(more), REASON_LETTERS)
    return one_line(lines[-1], REASON_LETTERS) if lines else ""


def output_since(folder: Path, offset: int) -> str:
    """What a run has printed after so many bytes, of much its end."""
    try:
        with (folder / OUTPUT).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(offset, size - TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def device_of(folder: Path) -> str:
    """The device that a run has named in its output; "" where there is none."""
    match = _DEVICE.search(output_since(folder, 0))
    return match[1] if match else ""


def _written_since(path: Path, began_s: float) -> bool:
    try:
        return path.stat().st_mtime >= began_s - 1.0  # file systems that count in whole seconds
    except OSError:
        return False


def now_s() -> float:
    """Seconds of Unix time, as files have it."""
    return time.time()
